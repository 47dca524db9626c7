"""Losses as functions of arrays: they need JAX and nothing else."""
