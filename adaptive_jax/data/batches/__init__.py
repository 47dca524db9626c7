"""Ids to batches."""
