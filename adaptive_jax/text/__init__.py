"""Scores, writes and embeds raw text with a trained model."""
