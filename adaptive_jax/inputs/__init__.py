"""Inputs: token ids to vectors, and the table of all words as bands."""

from adaptive_jax.errors import of_extra

with of_extra("layers"):
    import flax  # noqa: F401
