"""What a trained model does with raw text: scores it, goes on with it, says what its words are
like.
"""
