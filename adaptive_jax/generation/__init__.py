"""Text that a trained model writes."""

from adaptive_jax.errors import of_extra

with of_extra("train"):
    import absl  # noqa: F401
