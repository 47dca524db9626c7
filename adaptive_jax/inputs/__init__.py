"""Inputs: token ids to vectors, and the table of all words as bands."""
