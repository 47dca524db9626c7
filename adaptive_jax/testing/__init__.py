"""Checks of losses and layers of any package, which raise AssertionError."""

from adaptive_jax.testing.cross_entropy import CASES, Case, Result, check_cross_entropy
from adaptive_jax.testing.layers import check_body, check_input, check_output

__all__ = [
    "CASES",
    "Case",
    "Result",
    "check_body",
    "check_cross_entropy",
    "check_input",
    "check_output",
]
