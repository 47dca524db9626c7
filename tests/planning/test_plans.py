"""Plans of updates: how they are divided, their work by formula and by jaxpr, devices that share
parameters.
"""

import math

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.config.keys import complete, resolve
from adaptive_jax.model.language_model import build, variable_shapes
from adaptive_jax.numerics.bands import softmax_flops
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.planning import cutoffs
from adaptive_jax.planning.plan import check_memory, choose_fsdp, describe
from adaptive_jax.training.dry_run import dry_run
from configs import billion_word, papers, quickstart, wikitext103
from tests import refuses
from tests.toys import TEXT, plan_of

VERY_LARGE = resolve(billion_word.get_config("very_large"))
LAYERS = papers.layers(
    cutoffs=(20, 60),
    width=16,
    narrow=8,
    characters={"width": 8, "filters": ((1, 16), (3, 24)), "length": 10},
)


def small(layers="adp_t", **changes):
    """The quickstart's config with 122 words, as `rows.config` changes it."""
    body = {"body.features": 32, "body.heads": 2, "body.feed_forward": 64}
    words = {"data.vocabulary_size": 122, "tokens_per_update": 4096, "tokens_per_device": 512}
    return complete(quickstart.SETTINGS, LAYERS[layers], body | words, changes)


def product_flops(jaxpr):
    """FLOPs of all matrix products in a jaxpr; the body of a scan counts as often as it runs."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            depth = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * math.prod(equation.outvars[0].aval.shape) * depth
        inner = sum(map(product_flops, jax.extend.core.jaxprs_in_params(equation.params)))
        total += inner * equation.params.get("length", 1)
    return total


@pytest.mark.parametrize(
    "held, devices, division",
    [(512, 1, (8, 8)), (512, 8, (1, 8)), (512, 32, (1, 2)), (0, 1, (1, 64))],
)
def test_an_update_is_divided_over_devices_and_microbatches(held, devices, division):
    """Rows of 64 tokens; 4,096 tokens a device where the config leaves that open."""
    plan = plan_of(small(tokens_per_device=held), 122, devices)
    assert (plan.accumulation, plan.rows_per_device) == division
    text = describe(plan, TEXT, steps=10**9)
    assert f"= {plan.accumulation} x {plan.rows_per_device} rows x {devices} " in text
    hours = plan.flops_per_token * plan.tokens_per_update * 1e9 / (0.4 * 989e12) / 3600
    assert f"bfloat16 at 40% of its peak (not measured): {hours:,.1f} H100," in text


@pytest.mark.parametrize(
    "layers, body", [("sm", {}), ("sm_t", {"body.name": "lstm", "body.widths": (32,)})]
)
def test_the_formula_counts_the_products_of_a_model(layers, body):
    """A trace of one row has the FLOPs of the plan; the output's are those of its formula."""
    config = complete(quickstart.SETTINGS, LAYERS[layers], body or {"body.layers": 2})
    length, model = config["batches"]["sequence_length"], build(config, 122)
    shapes = variable_shapes(model)
    ids, row = jax.ShapeDtypeStruct((1, length), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    batch = Batch(ids, ids, jax.ShapeDtypeStruct((1, length), jnp.float32), row)
    carry = model.body.initial_carry(1)
    jaxpr = jax.make_jaxpr(lambda v, b: model.apply(v, b, carry, method="hidden"))(shapes, batch)
    bands = jax.eval_shape(lambda v: model.apply(v, method=lambda m: m.output.bands()), shapes)
    token = product_flops(jaxpr.jaxpr) / length + softmax_flops(bands)
    assert plan_of(config, 122, 1).flops_per_token == pytest.approx(3 * token, rel=1e-3)


@pytest.mark.parametrize("layers", ["sm", "adp"])
def test_the_work_of_the_output_is_that_of_the_cutoffs(layers):
    """Scoring all words for 6 tokens visits every band 6 times; the cutoffs' cost is the same
    formula, three times.
    """
    model = build(small(layers), 122)
    variables = variable_shapes(model)
    bands = jax.eval_shape(lambda v: model.apply(v, method=lambda m: m.output.bands()), variables)
    scores = jax.make_jaxpr(
        lambda v, h: model.apply(v, h, method=lambda m, h: m.output.log_probs(h))
    )
    products = product_flops(scores(variables, jnp.ones((6, 32))).jaxpr)
    assert products == softmax_flops(bands, [6] * len(bands))
    width, cuts = bands[0].table.shape[1], (20, 60) if len(bands) > 1 else ()
    workload = cutoffs.Workload(32, 4, width=width, least_rows=0)
    cost = cutoffs.cost(1 / np.arange(1, 123), cuts, workload)
    assert cost == pytest.approx(3 * softmax_flops(bands))


def test_as_few_devices_as_hold_the_model_share_it():
    """With the optimizer's state and gradients in training, parameters alone in evaluation; or as
    many as the config says.
    """
    plans = [plan_of(VERY_LARGE, 793_471, 8, memory=int(size)) for size in (80e9, 16e9, 1e9)]
    assert [plan.fsdp for plan in plans] == [1, 4, 8]
    total, *parts = plans[0].parameters.values()
    assert total == sum(parts) and len(parts) == 3
    assert plans[1].state_bytes < 0.26 * plans[0].state_bytes
    assert plan_of(VERY_LARGE | {"fsdp": 2}, 793_471, 8).fsdp == 2
    with refuses("fsdp=3", "8"):
        plan_of(VERY_LARGE | {"fsdp": 3}, 793_471, 8)
    with refuses("8.2 GB", "8.0 GB"):
        check_memory(plans[0], int(8e9))
    model = build(VERY_LARGE, 793_471)
    memories = None, int(40e9), int(5e9), int(1e9)
    shares = [choose_fsdp(VERY_LARGE, model, 8, memory) for memory in memories]
    assert shares == [1, 1, 2, 8]
    some = [choose_fsdp(VERY_LARGE | {"fsdp": n}, model, 8, int(1e9)) for n in (2, 3, 16)]
    assert some == [2, 1, 8]


def test_a_dry_run_plans_for_the_memory_that_is_there(tmp_path, monkeypatch):
    """As training does: it said that all is well of models that do not fit."""
    monkeypatch.setattr("adaptive_jax.parallel.accelerators.memory", lambda: 10_000)
    with refuses("0.0 GB"):
        dry_run(small(), tmp_path / "run")


def test_stored_tables_are_state():
    """Every device has those of `compose_share` below 1; a bias of the words is no table."""
    tied = {"output.name": "softmax", "output.table.name": "tied", "output.table.bias": True}
    configs = [small("cnn", **tied, compose_share=share) for share in (1.0, 0.5)]
    dense, sparse = (plan_of(config, 122, 1) for config in configs)
    assert sparse.state_bytes - dense.state_bytes == 4 * 122 * 32 + 4  # and a count


def test_bytes_that_a_device_holds_and_gathers():
    """An eighth of GCNN-14, whose widths 8 does not divide, and of the momentum. At once it has the
    tables whole in bfloat16, and in float32 the tails' projections, the clusters and the largest
    block: the last, a convolution of width 4 and a projection.
    """
    config = resolve(wikitext103.get_config("gcnn_14")) | {"tokens_per_update": 32_768}
    one, eight = (plan_of(config | {"fsdp": n}, 267_735, 8) for n in (1, 8))
    assert one.gathered_bytes == 0 and "gathered" not in describe(one, TEXT)
    assert eight.state_bytes < 1.003 * one.state_bytes / 8
    parameters = eight.parameters
    largest = 4 * 1024 * 4096 + 1024 * 2048
    matrices = 2048 * (512 + 128 + 32 + 3)
    tables = parameters["input"] + parameters["output"] - matrices
    assert eight.gathered_bytes == 4 * (matrices + largest) + 2 * tables
    assert f"gathered     {eight.gathered_bytes / 1e9:.2f} GB a device" in describe(eight, TEXT)


def test_bytes_gathered_where_words_are_sharded():
    """The projections and a block; without fsdp a line says that nothing is cut."""
    config = resolve(wikitext103.get_config("adp_t")) | {"tokens_per_update": 32_768}
    one, eight = (plan_of(config | {"fsdp": n, "shard_words": True}, 267_735, 8) for n in (1, 8))
    matrices = 1024 * (1024 + 256 + 64) + 2 * 1024
    block = 4 * 1024 * 1024 + 2 * 1024 * 4096
    assert eight.gathered_bytes == 4 * matrices + 2 * block  # blocks in bfloat16
    assert "and tables of which 8 divides neither size; others stay where" in describe(eight, TEXT)
    assert "shard_words has no effect without fsdp" in describe(one, TEXT)


@pytest.mark.parametrize(
    "name, copies", [("nag", 2), ("sgd", 1), ("adam", 3), ("nt_asgd", 2), ("lion", 2)]
)
def test_the_state_of_every_optimizer_is_counted(config, name, copies):
    """Parameters and all that the optimizer keeps of them; a plan that leaves the state out
    promises memory that is not there.
    """
    settings = config() | {"optimizer": complete({"optimizer.name": name})["optimizer"]}
    plan = plan_of(settings, 122, 1)
    assert 0 < plan.state_bytes - 4 * copies * plan.parameters["total"] < 100  # counts and rates
