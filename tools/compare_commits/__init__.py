"""Compares the numbers of two commits; see __main__.py."""
