"""What a loss is told: settings that are static, and tokens."""

import math
import numbers
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adaptive_jax.errors import (
    InputError,
    check_at_least,
    check_known,
    check_not_negative,
    check_rates,
)
from adaptive_jax.losses import reports


class Settings(NamedTuple):
    """Static settings of the core. The defaults give the plain negative log-likelihood.

    Attributes:
        tail_dropout: rate of dropout after the projection of every tail (Baevski & Auli 2019,
            section 5.4).
        label_smoothing: share of the target's probability that is spread evenly over the columns of
            each softmax the token visits (the head, and the tail of its word), hence over the whole
            vocabulary for a full softmax.
        z_loss: weight of the squared log-normaliser of each softmax the token visits; a number, or
            an array `[]` that has no gradient.
        chunk: tokens whose logits are alive at a time; None chooses a size for each softmax.
        soft_cap: every logit becomes `soft_cap · tanh(logit / soft_cap)` (Gemma 2, section 2); a
            number, an array `[]` that has no gradient, or None: it stays.
        axis_name: the axis of `jax.shard_map` that cuts the words of every band, see
            `adaptive_jax.losses.sharded`; None: none.
        gathers: whether the devices of `axis_name`, which may then be several axes, have tokens of
            their own, which every one of them computes for all with the words that it holds.
        words: words of every band, whose table may have rows behind them, on all devices, that are
            padding; None: no padding.
        ignore_index: a target that counts as one of weight 0; None: none does.
        reports: names of `adaptive_jax.losses.reports.REPORTS` to return for each token.
        top_k: how many words the report "top_k" has.
    """

    tail_dropout: float = 0.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk: int | None = None
    soft_cap: float | None = None
    axis_name: str | tuple[str, ...] | None = None
    gathers: bool = False
    words: tuple[int, ...] | None = None
    ignore_index: int | None = None
    reports: tuple[str, ...] = ()
    top_k: int = 0

    def of_numbers(self) -> "Settings":
        """The same with numbers for arrays `[]` of NumPy, which are as static."""
        given = {name: getattr(self, name) for name in ("z_loss", "soft_cap")}
        arrays = {
            name: a.item() for name, a in given.items() if isinstance(a, np.ndarray) and not a.ndim
        }
        return self._replace(**arrays)

    def check(self) -> None:
        """Checks the ranges of all settings.

        Raises:
            InputError: a rate or label_smoothing outside [0, 1), a z_loss that is negative or
                infinite, a chunk of no token, a soft_cap that is not above 0, an ignore_index
                that is no integer, an unknown report, or one of top_k and the report "top_k"
                without the other.
        """
        check_rates(self, "tail_dropout", "label_smoothing")
        cap, ignored = self.soft_cap, self.ignore_index
        if not _is_scalar(self.z_loss):
            check_not_negative(z_loss=self.z_loss)
        is_number = isinstance(cap, numbers.Real) and 0 < cap < math.inf
        if not (cap is None or is_number or _is_scalar(cap)):
            raise InputError(f"soft_cap={cap!r} must be a finite number above 0, or None")
        if ignored is not None and not isinstance(ignored, numbers.Integral):
            raise InputError(f"ignore_index={ignored!r} must be an integer or None")
        for name in self.reports:
            check_known(f"reports={name!r}", name, reports.REPORTS)
        if self.top_k and "top_k" not in self.reports:
            raise InputError(
                f"top_k={self.top_k} has no effect without the report 'top_k': pass both"
            )
        check_at_least(int("top_k" in self.reports), top_k=self.top_k)
        if self.chunk is not None:
            check_at_least(1, chunk=self.chunk)


PLAIN = Settings()


def used(setting: float | jax.Array | None) -> bool:
    """Whether a setting is neither None nor 0; an array, whose value only the program knows, is
    used.
    """
    return isinstance(setting, jax.Array) or bool(setting)


def _is_scalar(value):
    real = isinstance(value, jax.Array) and jnp.isdtype(value.dtype, ("integral", "real floating"))
    return real and value.shape == ()


class Tokens(NamedTuple):
    """Tokens that wait for a softmax, or a chunk of them.

    Attributes:
        hidden: `[tokens, features]`.
        column: `[tokens]`, the column of the target in the softmax; `[tokens, k]` of soft targets.
        weight: `[tokens]`.
        seeds: uint32 `[tokens, 2]`, the seeds of each token's tail dropout, or None.
        probs: `[tokens, k]`, probabilities of soft targets, or None.
        pulls: `[tokens, 4]`, cotangents of the loss, the nll, the logsumexp and the entropy, by
            which gradients are weighted; None: by `weight`.
    """

    hidden: jax.Array
    column: jax.Array
    weight: jax.Array
    seeds: jax.Array | None
    probs: jax.Array | None = None
    pulls: jax.Array | None = None
