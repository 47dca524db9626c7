"""Outputs: hidden states to the loss and the probabilities of all words."""

from adaptive_jax.errors import of_extra

with of_extra("layers"):
    import flax  # noqa: F401
