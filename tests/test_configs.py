"""Every shipped config: it builds, states what the paper states, and a tiny copy of it takes a step."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax import optim, sharding
from adaptive_jax.data import corpora
from adaptive_jax.data.batching import Batch
from adaptive_jax.model import build
from adaptive_jax.plan import parameter_shapes, plan
from adaptive_jax.state import initial_state
from adaptive_jax.training import make_update

FILES = sorted((Path(__file__).parents[1] / "configs").glob("*.py"))

# Millions of parameters as published: Baevski & Auli 2019, Tables 2 and 3.
PUBLISHED = {"wikitext103:adp_t": 246.9, "wikitext103:best": 246.9}


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows():
    for path in FILES:
        module = load(path)
        for row in getattr(module, "ROWS", {"adp_t": {}}):
            yield pytest.param(module.get_config(row).to_dict(), id=f"{path.stem}:{row}")


def tiny(config):
    """The same config with 97 words and narrow layers; what is switched on stays on."""
    source = dict(config["input"])
    if "cutoffs" in source:
        source["cutoffs"] = tuple(11 + 30 * i for i in range(len(source["cutoffs"])))
    table = dict(config["output"]["table"])
    if "cutoffs" in table:
        table["cutoffs"] = source["cutoffs"]
    body = config["body"] | {"layers": 2, "features": 32, "heads": 4, "feed_forward": 48}
    return config | {"input": source, "body": body, "output": config["output"] | {"table": table}}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name):
    """`--dry_run` counts the paper's parameters to 0.1M, with no corpus at hand."""
    file, row = name.split(":")
    config = load(next(path for path in FILES if path.stem == file)).get_config(row).to_dict()
    counts = plan(config, config["data"]["vocabulary_size"], 8)["parameters"]
    assert round(counts["total"] / 1e6, 1) == PUBLISHED[name]
    assert counts["total"] == counts["input"] + counts["body"] + counts["output"]


@pytest.mark.parametrize("config", rows())
def test_settings_agree_with_each_other(config):
    """The schedule is as long as the run, the vocabulary is the published one, and 1 to 8 devices can share an update."""
    rates = config["optimizer"]
    assert config["steps"] == rates["warmup_steps"] + rates["cycle_steps"] * (2 ** rates["cycles"] - 1)
    published = corpora.CORPORA[config["data"]["corpus"]]
    assert published is None or published.vocabulary == config["data"]["vocabulary_size"]
    for devices in (1, 2, 4, 8):
        costs = plan(config, config["data"]["vocabulary_size"], devices)
        assert costs["accumulation"] * costs["rows_per_device"] * devices == costs["rows_per_update"]
        assert costs["rows_per_device"] * config["data"]["block"] <= config["tokens_per_device"]


@pytest.mark.parametrize("config", rows())
def test_no_setting_is_read_by_default(config):
    """A config states every field of the layers it names, so that what a run does can be read in one place."""
    model = build(config, config["data"]["vocabulary_size"])
    given = {"parent", "name", "dtype", "vocabulary_size", "features", "table", "source"}
    for group, layer in (("input", model.input), ("body", model.body), ("output", model.output)):
        assert set(layer.__dataclass_fields__) - given == set(config[group]) - given
    assert set(model.output.table.__dataclass_fields__) - given == set(config["output"]["table"]) - given


@pytest.mark.parametrize("config", rows())
def test_tiny_copy_takes_a_step(config):
    """One update with every dropout on gives every parameter a momentum that is finite and not zero."""
    config = tiny(config)
    mesh = sharding.data_mesh()
    model = build(config, 97)
    optimizer = optim.from_config(config["optimizer"])[0]
    state = initial_state(model, optimizer, 0, mesh)
    ids = jax.random.permutation(jax.random.key(0), jnp.arange(2 * 8 * 8) % 97).reshape(2, 8, 8)
    batch = Batch(np.asarray(ids), np.asarray(ids[..., ::-1]), np.ones(ids.shape, np.float32))
    update = make_update(model, optimizer, lambda step: 0.0, mesh, seed=0)
    state, numbers = update(state, sharding.put_rows(mesh, batch, axis=1))
    assert all(np.isfinite(value) for value in numbers.values())
    # Momentum, not the parameters, shows the gradient: the first rate of a warm-up is 1e-7.
    trace = state.optimizer[1].trace
    for path, gradient in jax.tree.leaves_with_path(jax.device_get(trace)):
        assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0, jax.tree_util.keystr(path)


@pytest.mark.parametrize("config", rows())
def test_every_parameter_gets_a_gradient_from_some_word(config):
    """Over targets and inputs of all words, every entry of every parameter but the keys' bias gets a gradient."""
    config = tiny(config)
    model = build(config, 97)
    words = jnp.arange(97)[None]
    params = model.init(jax.random.key(0), words, words, jnp.ones(words.shape))["params"]
    loss = jax.jit(jax.grad(lambda p: model.apply({"params": p}, words, words[:, ::-1], jnp.ones(words.shape))[0]))
    gradient = loss(params)
    for path, leaf in jax.tree.leaves_with_path(jax.device_get(gradient)):
        name = jax.tree_util.keystr(path)
        if "query_key_value" in name and "bias" in name:
            # A bias of the keys adds the same to all scores of a query, and softmax does not see it.
            leaf = np.delete(leaf.reshape(len(leaf), 3, -1), 1, axis=1)
        silent = np.abs(leaf).reshape(leaf.shape[0], -1) == 0
        # A feed-forward unit may be off for all words; everything else must move.
        assert silent.mean() < (0.05 if "inner" in name or "outer" in name else 1e-9), name


def test_dry_run_shapes_are_those_of_a_real_initialisation():
    """The plan's count of parameters is the number of numbers in an initialised model."""
    config = tiny(load(FILES[0]).get_config().to_dict())
    model = build(config, 97)
    ids = jnp.zeros((1, 2), jnp.int32)
    params = model.init(jax.random.key(0), ids, ids, jnp.ones(ids.shape))["params"]
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda a: a.shape, parameter_shapes(model))
    assert plan(config, 97, 1)["parameters"]["total"] == sum(leaf.size for leaf in jax.tree.leaves(params))
