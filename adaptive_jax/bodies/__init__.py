"""Bodies: vectors to hidden states, causally."""

from adaptive_jax.errors import of_extra

with of_extra("layers"):
    import flax  # noqa: F401
