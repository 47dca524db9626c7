"""Activations of layers, by name."""

import jax
import jax.numpy as jnp

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "selu": jax.nn.selu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
}
