"""Optimizers and schedules: optax transformations whose arguments are the keys of a config."""

from adaptive_jax.errors import of_extra

with of_extra("layers"):
    import optax  # noqa: F401
