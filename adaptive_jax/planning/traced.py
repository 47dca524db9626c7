"""What tracing tells about a model, without any array: shapes, FLOPs and activations. A model
is traced once.
"""

import functools
import itertools
import math

import jax
import jax.extend.core
import jax.numpy as jnp

from adaptive_jax.model.language_model import LanguageModel
from adaptive_jax.model.language_model import variable_shapes as variables
from adaptive_jax.numerics.bands import Band
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.numerics.platforms import platform, tracing_for
from adaptive_jax.outputs.differentiated import Differentiated
from adaptive_jax.outputs.sampled import Sampled
from adaptive_jax.planning.flops import band_flops, softmax_flops, zipf_visits


def once(function):
    """Keeps the results of a function of hashable arguments, of each platform that it traces
    for.
    """
    kept = functools.lru_cache(maxsize=8)(lambda _, *given: function(*given))
    called = functools.wraps(function)(lambda *given: kept(platform(), *given))
    called.cache_clear = kept.cache_clear
    return called


@once
def output_bands(model: LanguageModel) -> list[Band]:
    """The shapes of the output's bands."""
    return jax.eval_shape(
        lambda v: model.apply(v, method=lambda m: m.output.bands()), variables(model)
    )


@once
def forward_flops(model: LanguageModel, length: int) -> float:
    """FLOPs per token of the forward pass, in a row of `length` tokens, without
    `composed_flops`.
    """

    def hidden(variables, batch):
        return model.apply(variables, batch, model.body.initial_carry(1), method="hidden")

    given = variables(model) | {"tables": _composed(model, "input")}, _batch(1, length)
    # Attention may name a kernel: its products cannot be seen, and a CPU refuses it.
    if hasattr(model.body, "attention"):
        model = model.clone(body=model.body.clone(attention="auto"))
    with tracing_for("cpu", "cpu"):
        jaxpr = jax.make_jaxpr(hidden)(*given).jaxpr
    bands = output_bands(model)
    return product_flops(jaxpr) / length + output_flops(model.output, bands)


@once
def composed_flops(model: LanguageModel) -> float:
    """FLOPs of the vectors of all words, composed once an update; 0 where rows compose vectors of
    their own words, or none do.

    Every word counts as a long one.
    """
    total, words = 0.0, jnp.arange(model.input.vocabulary_size)
    for name, layer in ("input", model.input), ("table", model.output.table):
        if model.composed_words() == "all" and hasattr(layer, "compose"):
            given = variables(model) | {
                "tables": _composed(model, "input") if name == "table" else {}
            }
            jaxpr = jax.make_jaxpr(functools.partial(_compose, model, name))(given, words).jaxpr
            chunk = getattr(getattr(layer, "cnn", layer), "chunk", len(words))
            total += product_flops(jaxpr, -(-len(words) // chunk))
    return total


def _composed(model, name):
    """The shapes of a layer's vectors of all words, as the collection "tables" has them; none
    where an update composes some.
    """
    if model.composed_words() != "all" or not hasattr(model.input, "compose"):
        return {}
    words = jnp.arange(model.input.vocabulary_size)
    return jax.eval_shape(functools.partial(_compose, model, name), variables(model), words)


def _compose(model, name, given, words):
    def method(model, words):
        return (model.input if name == "input" else model.output.table).compose(words)

    return model.apply(given, words, method=method, mutable=["tables"])[1]["tables"]


def output_flops(output, bands: list[Band]) -> float:
    """FLOPs per token of the forward pass of an output on `bands`, as it trains; words occur by
    Zipf's law.
    """
    if isinstance(output, Sampled):
        [(table, projection, _)] = bands
        return band_flops(
            1, table.shape[1], output.samples + 1, 0 if projection is None else projection.shape[1]
        )
    if isinstance(output, Differentiated):
        return sum(softmax_flops([band], [1]) for band in bands)
    return softmax_flops(bands, zipf_visits(bands))


@once
def activations(model: LanguageModel, length: int) -> tuple[int, int]:
    """Bytes that the forward pass of input and body keeps for the backward pass: fixed, and for
    each row of `length` tokens.

    One trace tells both: its number of rows has no factor in common with any other size, so the
    arrays that grow with the rows are those whose size it divides.
    """
    shapes = variables(model) | {"tables": _composed(model, "input")}
    sizes = {length, *(size for a in jax.tree.leaves(shapes) for size in a.shape)}
    rows = next(n for n in itertools.count(61) if all(math.gcd(n, size) == 1 for size in sizes))

    def kept(variables, batch):
        def hidden(params):
            rngs, carry = {"dropout": jax.random.key(0)}, model.body.initial_carry(rows)
            return model.apply(
                variables | {"params": params}, batch, carry, train=True, method="hidden", rngs=rngs
            )

        return jax.vjp(hidden, variables["params"])[1]

    arrays = jax.tree.leaves(jax.eval_shape(kept, shapes, _batch(rows, length)))
    weights = {(a.shape, a.dtype) for a in jax.tree.leaves((shapes["params"], shapes["tables"]))}
    found = [
        (a.size, a.size * a.dtype.itemsize) for a in arrays if (a.shape, a.dtype) not in weights
    ]
    grow = sum(size for count, size in found if count % rows == 0)
    return sum(size for _, size in found) - grow, grow // rows


def product_flops(jaxpr, trips: int = 1) -> float:
    """FLOPs of all matrix products in a jaxpr. The body of a scan counts as often as it runs.

    Of the loops of unknown length, only the most expensive counts, and it counts `trips` times: of
    the character CNN, a chunk of long words.
    """
    total, loops = 0, [0]
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            depth = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * math.prod(equation.outvars[0].aval.shape) * depth
        inner = sum(
            product_flops(inner, trips)
            for inner in jax.extend.core.jaxprs_in_params(equation.params)
        )
        if equation.primitive.name == "while":
            loops.append(inner * trips)
        else:
            total += inner * (equation.params["length"] if equation.primitive.name == "scan" else 1)
    return total + max(loops)


def _batch(rows, length):
    ids, row_ids = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, length), (rows,)))
    return Batch(ids, ids, jax.ShapeDtypeStruct((rows, length), jnp.float32), row_ids)
