"""The language model: input, body and output together."""

from adaptive_jax.errors import of_extra

with of_extra("layers"):
    import flax  # noqa: F401
