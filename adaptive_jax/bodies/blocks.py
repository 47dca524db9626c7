"""Parts that bodies share: affine maps, normalisation, rematerialisation, the fields of a batch
that they read, and the gathering of parameters.

A body whose parameters may be sharded over devices has a field `gather` and lists the groups of
parameters that it gathers in `parameter_groups`. Just before it uses a group, it calls
`gather(name, params)`, which turns the shards stored under `name` into the arrays to compute with.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from adaptive_jax.bodies.positions import positions_in_segments
from adaptive_jax.errors import InputError
from adaptive_jax.numerics.arrays import floats, whole_numbers
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.numerics.platforms import platform
from adaptive_jax.numerics.products import is_cpu_bfloat16, product

SAVED = "saved_for_backward"
LayerNorm = functools.partial(nn.LayerNorm, epsilon=1e-5)  # in float32, whatever its dtype


class Dense(nn.Module):
    """A matrix product that returns its bias separately, so that the caller can add it in a fused
    operation.

    Attributes:
        features: of the result.
        dtype: of the product; parameters are float32.
    """

    features: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the product `[..., features]` of `x [..., n]`, and the bias `[features]`,
        float32.
        """
        shape = x.shape[-1], self.features
        kernel = self.param("kernel", nn.initializers.xavier_uniform(), shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros_init(), shape[1:], jnp.float32)
        return product(x.astype(self.dtype), kernel), bias


class ParameterGroup(NamedTuple):
    """Parameters of a body that are gathered together.

    Attributes:
        names: top-level names of the parameters, or of the layers that have them.
        dtype: in which matrices are gathered.
        stacked: whether a leading axis stacks equal blocks, which are gathered one at a time.
    """

    names: tuple[str, ...]
    dtype: Any = jnp.float32
    stacked: bool = False


def as_stored(name: str, params: Any) -> Any:
    """Returns `params`: the `gather` of parameters that are replicated on every device."""
    return params


def gathered(layer: Callable, gather: Callable) -> Callable:
    """Wraps a module class, or a function of a module, so that it computes with `gather(params)`,
    a dict of the stored parameters.
    """

    def gather_variables(variables):
        # `variables` is empty where there are no parameters.
        return {collection: gather(params) for collection, params in variables.items()}

    return nn.map_variables(layer, "params", gather_variables)


def gathered_twice(layer: Callable, gather: Callable, *, looped: bool = False) -> Callable:
    """Like `gathered`, but gathers again in the backward pass and saves only what
    `save_for_backward` marks.

    looped: whether the layer runs inside a loop, where the compiler cannot undo the recomputation.
    """
    return nn.remat(gathered(layer, gather), policy=policy("elementwise"), prevent_cse=not looped)


def unrolled(x: jax.Array, train: bool) -> bool:
    """True if equal blocks are to be unrolled for these vectors instead of run in a loop.

    A loop copies what the backward pass needs of each block into one array. On a GPU these copies
    are a third of the memory traffic of an update outside of products; in bfloat16 on a CPU, XLA
    widens and narrows the whole array for each block.
    """
    return train and (platform() == "gpu" or is_cpu_bfloat16(x))


class Rows(NamedTuple):
    """Fields of a batch that a body reads.

    Attributes:
        ids: `[rows]`, the rows' numbers in the update, on which dropout masks depend.
        segment_ids: `[rows, time]`; None: every row is one segment.
        reset: bool `[rows]`, the rows that ignore the carry; None: none does.
    """

    ids: jax.Array
    segment_ids: jax.Array | None = None
    reset: jax.Array | None = None

    @classmethod
    def of(cls, batch: Batch | None, vectors: jax.Array, carry=()) -> "Rows":
        """Checks the fields of a batch that belongs to `vectors [rows, time, features]`. None:
        rows 0, 1, 2 … of one segment each.

        Raises:
            InputError: wrong shapes, floats for whole numbers, or segments together with a carry.
        """
        if batch is None:
            batch = Batch(None, None, None, None)
        rows, time = vectors.shape[:2]
        ids, segment_ids, reset = batch.row_ids, batch.segment_ids, batch.reset
        ids = jnp.arange(rows) if ids is None else whole_numbers("row_ids", ids, rows)
        if segment_ids is not None:
            segment_ids = whole_numbers("segment_ids", segment_ids, rows, time)
            if len(carry):
                raise InputError("batch.segment_ids must be None beside a carry: rows continue")
        if reset is not None:
            reset = floats("reset", reset, rows) != 0
        return cls(ids, segment_ids, reset)

    def positions(self) -> jax.Array | None:
        """The position of each token in its segment, `[rows, time]`; None if every row is one
        segment.
        """
        return None if self.segment_ids is None else positions_in_segments(self.segment_ids)


def continued(carry, start, rows: Rows):
    """Converts a carry to the structure and dtypes of `start`, an initial carry, and zeroes the
    rows that are reset.

    Raises:
        InputError: a carry whose arrays have other shapes.
    """
    arrays, (zeros, structure) = jax.tree.leaves(carry), jax.tree.flatten(start)
    shapes, expected = ([list(jnp.shape(a)) for a in leaves] for leaves in (arrays, zeros))
    if shapes != expected:
        raise InputError(
            f"carry must be () or made by body.initial_carry for {len(rows.ids)} rows, of shapes"
            f" {expected}, got {shapes}"
        )
    arrays = [floats("carry", a, ...).astype(b.dtype) for a, b in zip(arrays, zeros, strict=True)]
    if rows.reset is not None:
        arrays = [jnp.where(rows.reset.reshape(-1, *[1] * (a.ndim - 1)), 0, a) for a in arrays]
    return jax.tree.unflatten(structure, arrays)


def save_for_backward(x: jax.Array) -> jax.Array:
    """Marks `x` as worth its memory: under the policy "elementwise" the backward pass reads what
    is marked and recomputes the rest.

    A function with a custom gradient marks in its forward rule what the gradient reads.
    """
    return checkpoint_name(x, SAVED)


def _not_parameters(primitive, *inputs, **_):
    """Policy that recomputes gathers and casts of matrices in the backward pass; keeping them
    would store a copy for every block.
    """
    cast = primitive.name == "convert_element_type" and inputs[0].ndim == 2
    return not (primitive.name == "all_gather" or cast)


_POLICIES = {
    "none": _not_parameters,
    "elementwise": jax.checkpoint_policies.save_only_these_names(SAVED),
    "all": jax.checkpoint_policies.nothing_saveable,
}
REMAT = ("auto", *_POLICIES)


def policy(name: str):
    """The policy of `jax.checkpoint` for a name in `REMAT`; "auto" is "none" on a CPU and
    "elementwise" on accelerators.
    """
    if name == "auto":
        name = "none" if platform() == "cpu" else "elementwise"
    return _POLICIES[name]
