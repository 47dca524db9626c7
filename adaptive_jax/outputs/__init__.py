"""Outputs: hidden states to the loss and the probabilities of all words."""
