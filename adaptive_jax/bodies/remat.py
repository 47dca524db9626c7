"""What the backward pass of a block reads from the forward pass, and what it computes again."""

import jax
from jax.ad_checkpoint import checkpoint_name

from adaptive_jax.numerics.platforms import platform

KEPT = "kept"


def keep(x: jax.Array) -> jax.Array:
    """`x`, marked as worth its memory: where `elementwise` rules, the backward pass reads it and
    what is not marked is recomputed.

    A function with its own gradient marks what the gradient reads in its forward rule.
    """
    return checkpoint_name(x, KEPT)


def _not_parameters(primitive, *inputs, **_):
    """Recompute gathers and casts of matrices in the backward pass; keeping them would store
    every block's copy.
    """
    return not (
        primitive.name == "all_gather"
        or (primitive.name == "convert_element_type" and inputs[0].ndim == 2)
    )


_POLICIES = {
    "none": _not_parameters,
    "elementwise": jax.checkpoint_policies.save_only_these_names(KEPT),
    "all": jax.checkpoint_policies.nothing_saveable,
}
REMAT = ("auto", *_POLICIES)


def policy(name: str):
    """The policy of `jax.checkpoint` for one of `REMAT`; "auto" is "none" on a CPU and
    "elementwise" on accelerators.
    """
    if name == "auto":
        name = "none" if platform() == "cpu" else "elementwise"
    return _POLICIES[name]
