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
    """The model as one device sees it, and a function that gathers its parameters there; see
    `sharding.gathering`.
    """
    return sharding.gathering(model, parameter_shapes(model), mesh, by_words=by_words)


def on_devices(
    model: LanguageModel, mesh: Mesh, local: Callable, in_specs: tuple, out_specs: Any
) -> Callable:
    """`local(params, *others)`, which computes on one device, over all devices of a mesh, in full
    precision where the body asks for it. in_specs: of the others. out_specs: a tree of
    PartitionSpec.
    """
    return jax.shard_map(
        full_precision(local, model.body),
        mesh=mesh,
        in_specs=(sharding.parameter_specs(parameter_shapes(model), mesh, model), *in_specs),
        out_specs=out_specs,
        check_vma=False,
    )
