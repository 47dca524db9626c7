"""Optimizers and schedules: optax transformations whose arguments are the keys of a config."""
