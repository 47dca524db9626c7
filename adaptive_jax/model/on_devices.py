"""Functions of a model, computed on every device of a mesh."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from adaptive_jax.model.language_model import LanguageModel, parameter_shapes
from adaptive_jax.numerics.products import full_precision
from adaptive_jax.parallel import sharding


def local_model(
    model: LanguageModel, mesh: Mesh, by_words: bool = False
) -> tuple[LanguageModel, Callable]:
    """The model for one device, and a function that gathers its parameters there; see
    `sharding.gathering`.
    """
    return sharding.gathering(model, parameter_shapes(model), mesh, by_words=by_words)


def on_devices(
    model: LanguageModel, mesh: Mesh, local: Callable, in_specs: tuple, out_specs: Any
) -> Callable:
    """Returns `local(params, *arrays)`, a function for one device, mapped over all devices of a
    mesh, with float32 products in full precision if the body's dtype is float32.

    in_specs: a PartitionSpec for each of `arrays`, or a tree of these.
    out_specs: a tree of PartitionSpec.
    """
    return jax.shard_map(
        full_precision(local, model.body),
        mesh=mesh,
        in_specs=(sharding.parameter_specs(parameter_shapes(model), mesh, model), *in_specs),
        out_specs=out_specs,
        check_vma=False,
    )
