"""Exports a program of StableHLO that scores tokens, and its arrays. It runs without this package.

The program has fixed shapes, and runs on CPUs, NVIDIA and AMD GPUs and TPUs.
"""

import contextlib
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from adaptive_jax.errors import check_at_least, of_extra
from adaptive_jax.model.composition import Compose
from adaptive_jax.model.language_model import build
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.numerics.platforms import tracing_for
from adaptive_jax.parallel import sharding
from adaptive_jax.runs.run import Run

PLATFORMS = "cpu", "cuda", "rocm", "tpu"


class Shape(NamedTuple):
    """Batch shape of a program: `rows` of `window` tokens; a window of None is that of training."""

    rows: int = 1
    window: int | None = None


def make_scorer(
    run: Run, params: Mapping, shape: Shape
) -> tuple[bytes, dict[str, np.ndarray], dict]:
    """Exports `program(arrays, carry, inputs, targets) -> (nll, carry)`.

    `inputs` and `targets` are token ids, int32 `[rows, window]`. `nll`, float32 `[rows, window]`,
    is the negative log-likelihood of each target in nats after the inputs up to its column. It is
    NaN for a target that does not exist, and may be NaN in a whole row with such an input. `carry`
    is a list of arrays: zeros where rows start, and the returned carry where they continue. It is
    empty for a body that keeps no state between rows.

    Args:
        params: of `run`, unsharded arrays on this host.

    Returns:
        The program, as bytes for `jax.export.deserialize`; the arrays that it reads, by name such
        as "params.input.table_0": parameters, vectors composed from them, and the lexicon, with
        bfloat16 as float32, because NumPy has no bfloat16; and its description: `rows`, `window`,
        and the `shape` and `dtype` of each array of the `carry`.

    Raises:
        InputError: a shape without rows or tokens.
        MissingPackage: flatbuffers is not installed.
    """
    with of_extra("export"):
        import flatbuffers  # noqa: F401 (jax.export imports it when it has the program)
    window = run.config["batches"]["sequence_length"] if shape.window is None else shape.window
    check_at_least(1, rows=shape.rows, window=window)
    model = build(run.config, len(run.vocabulary))
    lexicon = sharding.on_host(run.lexicon, run.mesh)
    variables = {"params": params, "lexicon": lexicon, "tables": _tables(model, params, lexicon)}
    leaves, structure = jax.tree.flatten_with_path(variables)
    arrays = {keystr(path, simple=True, separator="."): np.asarray(a) for path, a in leaves}
    carry, carried = jax.tree.flatten(jax.eval_shape(lambda: model.initial_carry(shape.rows)))
    narrow = getattr(model.body, "dtype", jnp.float32) != jnp.float32

    def score(arguments, carry, inputs, targets):
        def array(name):
            like = arrays[name]
            # Arrays that are no arguments are never read.
            if name not in arguments:
                return jnp.zeros_like(like)
            return arguments[name].astype(like.dtype)

        # By default, products on a TPU or an NVIDIA GPU have fewer digits.
        with contextlib.nullcontext() if narrow else jax.default_matmul_precision("highest"):
            variables = jax.tree.unflatten(structure, map(array, arrays))
            row_ids = jnp.arange(shape.rows, dtype=jnp.int32)
            batch = Batch(inputs, targets, jnp.ones(inputs.shape), row_ids)
            # The carry is stored as the difference from the initial carry, so zeros start a row.
            initial = model.initial_carry(shape.rows)
            carry = jax.tree.map(jnp.add, jax.tree.unflatten(carried, carry), initial)
            hidden, carry = model.apply(variables, batch, carry, method="hidden")
            carry = jax.tree.map(jnp.subtract, carry, initial)
            return model.apply(variables, hidden, targets, method="nll"), jax.tree.leaves(carry)

    def export(arguments):
        tokens = jax.ShapeDtypeStruct((shape.rows, window), jnp.int32)
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (arguments, carry))
        with tracing_for("cpu", "cpu"):  # a kernel for one platform would not run on others
            return jax.export.export(jax.jit(score), platforms=PLATFORMS)(*shapes, tokens, tokens)

    arguments = {
        name: a.astype(np.float32) if a.dtype == jnp.bfloat16 else a
        for name, a in sorted(arrays.items())  # the order of the program's arguments
    }
    arguments_read = {*export(arguments).module_kept_var_idx}
    arguments = {name: a for i, (name, a) in enumerate(arguments.items()) if i in arguments_read}
    about = {
        "rows": shape.rows,
        "window": window,
        "carry": [{"shape": a.shape, "dtype": a.dtype.name} for a in carry],
    }
    return bytes(export(arguments).serialize()), arguments, about


def _tables(model, params, lexicon):
    """The vectors of all words, if they are composed from other parameters."""
    if model.composed_words() == "none":
        return {}
    compose = jax.jit(Compose(model, lambda params: params).__call__)
    return jax.device_get(compose(params, lexicon, jnp.arange(model.input.vocabulary_size)))
