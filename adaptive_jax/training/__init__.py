"""Text to Run: the loop, updates, metrics, finetuning, clusters of words."""

from adaptive_jax.errors import of_extra

with of_extra("train"):
    import absl  # noqa: F401
