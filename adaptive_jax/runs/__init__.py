"""Files of a run: config, vocabulary, checkpoints."""

from adaptive_jax.errors import of_extra

with of_extra("train"):
    import absl  # noqa: F401
