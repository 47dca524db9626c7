"""Programs that many tests need, traced and compiled once in a process: most of the time of a run
in a test goes there.
"""

import contextlib
import functools

import jax
import numpy as np
import pytest

from adaptive_jax.generation import decoding
from adaptive_jax.scores import scoring
from adaptive_jax.training import loop, sparse


def once(function, key_of):
    """The function, whose results are kept by `key_of` its arguments."""
    results = {}

    @functools.wraps(function)
    def call(*args, **how):
        key = key_of(*args, **how)
        if key not in results:
            results[key] = function(*args, **how)
        return results[key]

    return call


def optimizer_key(config, model):
    """All that decides an optimizer."""
    return model, config["compose_share"], repr((config["optimizer"], config["schedule"]))


def state_key(model, optimizer, *given, **how):
    """All that decides a state."""
    return model, optimizer, *given, tuple(how.items())


def initial_key(model, optimizer, seed, layout):
    """All that decides a state before the first update."""
    leaves, tree = jax.tree.flatten(layout)
    return model, optimizer, seed, tuple(leaves), tree


def update_key(model, optimizer, mesh, seed, layout, options):
    """All that decides an update."""
    leaves, tree = jax.tree.flatten(layout)
    return model, optimizer, mesh, seed, tuple(leaves), tree, options


def first_states(make):
    """`initial_state` that computes each state once: on devices it is a copy, as an update takes
    the arrays that it is given.
    """
    first = once(lambda *given: jax.device_get(make(*given)), initial_key)

    def initial_state(model, optimizer, seed, layout):
        return jax.tree.map(
            lambda a, like: jax.device_put(np.copy(a), like.sharding),
            first(model, optimizer, seed, layout),
            layout,
        )

    return initial_state


@contextlib.contextmanager
def sharing():
    """Within it, runs and decoders of this process that do the same share one program."""
    decoders = {}
    begin = decoding.Decoder.__init__

    def decoder(self, run, tables):
        begin(self, run, tables)
        key = run.model, run.mesh
        self._cache, self._programs = decoders.setdefault(key, (self._cache, self._programs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "initial_state", first_states(loop.initial_state))
        patch.setattr(loop, "shape_of_state", once(loop.shape_of_state, state_key))
        patch.setattr(loop, "make_update", once(loop.make_update, update_key))
        patch.setattr(sparse, "optimizer", once(sparse.optimizer, optimizer_key))
        patch.setattr(decoding.Decoder, "__init__", decoder)
        for name in "_composer", "make_scorer", "initial_carry":  # which forget all but the last 8
            made = getattr(scoring, name)
            patch.setattr(scoring, name, functools.cache(made.__wrapped__))
        yield


@pytest.fixture(scope="session", autouse=True)
def traced_once():
    """See `sharing`."""
    with sharing():
        yield
