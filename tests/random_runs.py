"""Runs of random parameters, and what they predict by the shortest way."""

import jax
import jax.numpy as jnp
import numpy as np

from adaptive_jax.data.vocabulary.clusters import in_clusters
from adaptive_jax.model.language_model import build, parameter_shapes
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.parallel import sharding
from adaptive_jax.runs.run import Run
from tests.toys import random_params

LENGTH = 48  # tokens of the row that `log_probs_of` reads


def random_run(config, vocabulary, scale=1.0):
    """A run of this config. Words differ the more in probability the larger the scale."""
    config, vocabulary = in_clusters(config, vocabulary)
    model, mesh = build(config, len(vocabulary)), sharding.device_mesh()
    params = random_params(parameter_shapes(model), scale)
    parts = {"model": model, "mesh": mesh, "params": params, "step": 0, "identity": b""}
    return Run(None, config, vocabulary).with_parts(**parts)


def quiet(batches, count):
    """Shows no progress."""
    return batches


def log_probs_of(run):
    """A function of token ids, the first of which was only read: the log-probabilities of the word
    after them, computed from all of them.
    """

    @jax.jit
    def program(tokens, last):
        zeros = jnp.zeros((1, LENGTH), jnp.int32)
        batch = Batch(tokens, zeros, zeros, jnp.zeros(1, jnp.int32))
        variables = {"params": run.params, "lexicon": run.lexicon}
        return run.model.apply(variables, batch, last[None, None], method="log_probs")[0, 0]

    def log_probs(tokens):
        padded = np.zeros((1, LENGTH), np.int32)  # what comes after changes nothing
        padded[0, : len(tokens)] = tokens
        return np.asarray(program(padded, np.int32(len(tokens) - 1)), np.float64)

    return log_probs
