"""Plans of updates: FLOPs by formula and by jaxpr, memory, devices that share parameters, and
what is traced for them.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.config.keys import complete, resolve
from adaptive_jax.errors import InputError
from adaptive_jax.inputs.lookup import Lookup
from adaptive_jax.model.language_model import LanguageModel, build
from adaptive_jax.numerics.platforms import tracing_for
from adaptive_jax.outputs.softmax import Softmax
from adaptive_jax.outputs.tables import OwnTable
from adaptive_jax.planning import cutoffs, traced
from adaptive_jax.planning.flops import softmax_flops, zipf_visits
from adaptive_jax.planning.plan import (
    choose_fsdp,
    describe,
    dry_run_lines,
    make_plan,
    scale,
)
from configs import billion_word, papers, quickstart, wikitext103

VERY_LARGE = resolve(billion_word.get_config("very_large"))
LAYERS = papers.layers(
    cutoffs=(20, 60),
    width=16,
    narrow=8,
    characters={"width": 8, "filters": ((1, 16), (3, 24)), "length": 10},
)


def small(layers="adp_t", **changes):
    """The quickstart's config with 122 words, as `rows.config` changes it."""
    body = {
        "body.attention_dropout": 0.1,
        "body.features": 32,
        "body.heads": 2,
        "body.feed_forward": 64,
    }
    words = {"data.vocabulary_size": 122, "tokens_per_update": 4096, "tokens_per_device": 512}
    return complete(quickstart.SETTINGS, LAYERS[layers], body | words, changes)


@pytest.fixture
def traces(monkeypatch):
    """How often `LanguageModel.hidden` is traced, from nothing; a list that grows."""
    calls, hidden = [], LanguageModel.hidden

    def counted(self, *arguments, **options):
        calls.append(options)
        return hidden(self, *arguments, **options)

    for function in (traced.variables, traced.forward_flops, traced.activations):
        function.cache_clear()
    monkeypatch.setattr(LanguageModel, "hidden", counted)
    return calls


def test_plans_trace_a_model_once(traces):
    """Whatever the devices: for the shapes, for the FLOPs, and with the backward pass for the
    activations.
    """
    config = small()
    plan, lines = dry_run_lines(config, 1, int(16e9))
    assert lines == [*describe(plan).splitlines(), *scale(config, int(16e9))]
    assert {make_plan(config, 122, devices).rows_per_device for devices in (1, 8, 32, 64)} == {
        8,
        2,
        1,
    }
    assert [call.get("train", False) for call in traces] == [False, False, True]
    make_plan(config, 123, 1)
    assert len(traces) == 6


def test_evaluation_chooses_devices_from_shapes_alone(traces):
    """As few as hold the parameters, or the config's number if it divides; no update is traced."""
    words, config = 793_471, VERY_LARGE
    found = [
        choose_fsdp(config, words, 8, memory)
        for memory in (None, int(40e9), int(10e9), int(4e9), int(1e9))
    ]
    assert (
        (found[0], found[1], found[-1]) == (1, 1, 8)
        and found == sorted(found)
        and len(set(found)) > 2
    )
    assert [choose_fsdp(config | {"fsdp": n}, words, 8, int(1e9)) for n in (2, 3, 16)] == [2, 1, 8]
    assert len(traces) == 1


def test_composed_words_count_once_an_update():
    """The plan of GroC adds the products that make vectors of all words: convolutions with
    strides, highway, projection, map.
    """
    body, letters = (
        {"name": "lstm", "features": 8, "widths": (8,)},
        {"width": 4, "filters": ((1, 6), (3, 10)), "strides": (1, 2)},
    )
    source = {"name": "groc", "lexicon": "given", "length": 9} | letters
    model = build(
        {
            "dtype": "float32",
            "input": source,
            "body": body,
            "output": {"name": "softmax", "table": {"name": "tied"}},
        },
        50,
    )
    word = 9 * 4 * 6 + 4 * 12 * 10 + 16 * 32 + 16 * 8 + 24 * 8
    assert traced.composed_flops(model) == 2 * 50 * word
    lookup = model.clone(input=Lookup(50, 8), output=Softmax(OwnTable(50, 8)))
    assert traced.forward_flops(model, 5) == traced.forward_flops(lookup, 5)
    assert traced.composed_flops(lookup) == 0


@pytest.mark.parametrize("layers", ["adp_t", "cnn", "sm"])
@pytest.mark.parametrize("remat", ["none", "all"])
def test_activations_grow_with_the_rows(layers, remat):
    """The bytes told from one trace are those of a trace with that number of rows."""
    model = build(small(layers, **{"body.remat": remat}), 122)
    variables = traced.variables(model)
    weights = {(a.shape, a.dtype) for a in jax.tree.leaves(variables["params"])}

    def kept(variables, batch):
        def hidden(params):
            rngs = {"dropout": jax.random.key(0)}
            return model.apply(
                variables | {"params": params}, batch, train=True, method="hidden", rngs=rngs
            )[0]

        return jax.vjp(hidden, variables["params"])[1]

    fixed, per_row = traced.activations(model, 18)
    for rows in (7, 9):  # enough for all words: what a CNN keeps is for distinct ones
        arrays = jax.tree.leaves(jax.eval_shape(kept, variables, traced._batch(rows, 18)))
        assert fixed + rows * per_row == sum(
            a.size * a.dtype.itemsize for a in arrays if (a.shape, a.dtype) not in weights
        )


def test_less_is_kept_with_rematerialisation():
    """`elementwise` keeps fewer activations than `none`, and `all` fewer still."""
    kept = [
        make_plan(small(**{"body.remat": remat}), 122, 1).memory_per_device["activations"]
        for remat in ("none", "elementwise", "all")
    ]
    assert kept[1] < 0.7 * kept[0] and kept[2] < 0.7 * kept[1]


@pytest.mark.parametrize("layers", ["sm", "adp"])
def test_the_formula_counts_the_products_of_the_output(layers):
    """Scoring all words for 6 tokens visits every band 6 times; the cutoffs' cost is the same
    formula, three times.
    """
    model = build(small(layers), 122)
    bands, variables = traced.output_bands(model), traced.variables(model)
    scores = jax.make_jaxpr(
        lambda v, h: model.apply(v, h, method=lambda m, h: m.output.log_probs(h))
    )
    assert traced.product_flops(scores(variables, jnp.ones((6, 32))).jaxpr) == softmax_flops(
        bands, [6] * len(bands)
    )
    width, cuts = bands[0].table.shape[1], (20, 60) if len(bands) > 1 else ()
    workload = cutoffs.Workload(32, 4, width=width, least_rows=0)
    cost = cutoffs.cost(1 / np.arange(1, 123), cuts, workload)
    assert cost == pytest.approx(3 * softmax_flops(bands, zipf_visits(bands)))


def test_microbatches_as_large_as_memory_holds():
    """tokens_per_device=0: the fewest microbatches that fit with the margin, on as few devices
    a copy as 4,096 tokens need.
    """
    config = small(tokens_per_device=0)
    each = [make_plan(small(tokens_per_device=4096 // parts), 122, 1) for parts in (1, 2, 4, 8, 64)]
    for plan in each:
        enough = math.ceil(1.4 * plan.memory_per_device["total"])
        assert make_plan(config, 122, 1, enough) == plan
        assert make_plan(config, 122, 1, enough - 1).rows_per_device < max(plan.rows_per_device, 2)
    assert each[-1].rows_per_device == 1 and each[0].accumulation == 1
    assert make_plan(config, 122, 1).tokens_per_device == 4_096
    assert (
        make_plan(config, 122, 8).rows_per_device
        == 4_096 // config["batches"]["sequence_length"] // 8
    )
    wide, narrow = (make_plan(VERY_LARGE, 793_471, 8, memory=int(size)) for size in (80e9, 16e9))
    assert (wide.fsdp, wide.accumulation, wide.tokens_per_device) == (1, 1, 16_384)
    assert (narrow.fsdp, narrow.accumulation, narrow.tokens_per_device) == (8, 8, 2_048)


@pytest.mark.parametrize(
    "path, on", [("triton", ("gpu", "NVIDIA H100 80GB HBM3")), ("splash", ("tpu", "TPU v5 lite"))]
)
def test_a_plan_of_kernels_counts_the_same_products(path, on):
    """A config may name a kernel that only its device has."""
    rows = {"batches.sequence_length": 128, "body.attention_dropout": 0.0, "dtype": "bfloat16"}
    with tracing_for(*on):
        named, plain = (
            make_plan(small(**rows, **{"body.attention": name}), 122, 1)
            for name in (path, "chunked")
        )
    assert named.flops_per_token == plain.flops_per_token


def test_plans_for_many_accelerators():
    """As few devices as hold the model share its parameters; a message says what does not fit
    or divide.
    """
    plan = make_plan(VERY_LARGE | {"tokens_per_device": 2_048}, 793_471, 8, memory=int(16e9))
    assert (plan.fsdp, plan.accumulation, plan.rows_per_device) == (4, 8, 4)
    assert plan.parameters["total"] == sum(
        plan.parameters[part] for part in ("input", "body", "output")
    )
    halved = make_plan(VERY_LARGE | {"fsdp": 2}, 793_471, 8).memory_per_device
    assert 1.4 * plan.memory_per_device["total"] < 16e9 < 1.4 * halved["total"]
    replicated = make_plan(VERY_LARGE, 793_471, 8)
    assert replicated.fsdp == 1 and "gathered" not in replicated.memory_per_device
    assert plan.memory_per_device["state"] < 0.26 * replicated.memory_per_device["state"]

    lines = scale(VERY_LARGE | {"tokens_per_device": 2_048}, int(16e9))
    assert [line.split()[1] for line in lines] == ["8", "32", "64"]
    assert "8 x 4 rows on each, parameters sharded over 4" in lines[0] and "1 x 4 rows" in lines[2]
    assert "too little" not in lines[0]
    assert "replicated" in scale(VERY_LARGE, int(80e9), counts=(8,))[0]
    assert (
        "too little memory; lower tokens_per_device" in scale(VERY_LARGE, int(4e9), counts=(8,))[0]
    )
    assert (
        "cannot share the 24 rows"
        in scale(resolve(wikitext103.get_config("best")), int(80e9), counts=(32,))[0]
    )
    with pytest.raises(InputError, match=r"fsdp=3 does not divide the 8 device\(s\)"):
        make_plan(VERY_LARGE | {"fsdp": 3}, 793_471, 8)


def test_vectors_that_are_composed_take_memory():
    """A character CNN holds a table of the words of an update, or of all words if the output is
    tied to it, and its gradients.

    For all words, the products of its highway layer, of 80 columns, are kept.
    """
    config = small("cnn", tokens_per_update=64, tokens_per_device=64)
    assert make_plan(config, 122, 1).memory_per_device["composed"] == 3 * 4 * 64 * 32
    config["output"] |= {"name": "softmax", "table": small("sm_t")["output"]["table"]}
    assert (
        make_plan(config, 122, 1).memory_per_device["composed"] == 3 * 4 * 122 * 32 + 4 * 122 * 80
    )
    assert "composed" not in make_plan(small(), 122, 1).memory_per_device


def test_a_dry_run_says_what_it_does_not_know():
    """Without the size of the vocabulary: how an update is divided, and one line on the rest.
    Wrong settings are still found.
    """
    config = small(**{"data.vocabulary_size": 0})
    plan, lines = dry_run_lines(config, 2, int(16e9))
    assert plan is None and lines[0] == "update       4,096 tokens = 4 x 8 rows x 2 device(s)"
    assert len(lines) == 2 and "data.vocabulary_size, which is 0" in lines[1]
    with pytest.raises(InputError, match="take 4,096"):
        dry_run_lines(config | {"tokens_per_update": 4100}, 2, int(16e9))


@pytest.mark.parametrize(
    "key, value, says",
    [("break_mode", "sentence", "none, complete"), ("layout", "pack", 'mean "packed"')],
)
def test_ways_of_making_rows_are_checked_before_any_long_work(key, value, says):
    """The plan refuses a name that does not exist, with those that do."""
    config = small(**{f"batches.{key}": value})
    with pytest.raises(InputError, match=f"batches.{key}='{value}' is not one of .*{says}"):
        make_plan(config, 122, 1)


@pytest.mark.parametrize(
    "name, copies", [("nag", 2), ("sgd", 1), ("adam", 3), ("nt_asgd", 2), ("lion", 2)]
)
def test_the_state_of_every_optimizer_is_counted(config, name, copies):
    """Parameters and all that the optimizer keeps of them; a plan that leaves the state out
    promises memory that is not there.
    """
    settings = config() | {"optimizer": complete({"optimizer.name": name})["optimizer"]}
    plan = make_plan(settings, 122, 1)
    state = plan.memory_per_device["state"] - 4 * copies * plan.parameters["total"]
    assert 0 < state < 100  # counts and rates
