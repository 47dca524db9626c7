"""The arrays of a call of the core, checked, and what is known of it when it is traced."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adaptive_jax.errors import InputError
from adaptive_jax.losses import partitioned, reports
from adaptive_jax.losses.groups import join, tiled
from adaptive_jax.losses.reports import DIFFERENTIABLE
from adaptive_jax.losses.settings import Settings
from adaptive_jax.losses.sharded import same_axes, words_of
from adaptive_jax.numerics.arrays import exists, floats, ids
from adaptive_jax.numerics.bands import Band
from adaptive_jax.numerics.products import sum_dtype


class Static(NamedTuple):
    """What is known of a loss when it is traced."""

    settings: Settings
    words: tuple[int, ...]  # of each band, on all devices
    masked: bool  # whether weights may be 0
    pulled: bool = False  # whether reports have gradients of their own
    # Rows of each band, by group; empty where a mesh may cut bands, which are laid out within.
    sizes: tuple[tuple[int, ...], ...] = ()


class Call:
    """The arrays of a call, checked, and on Explicit axes cut alike.

    Attributes:
        static: a `Static`.
        shape: of the tokens.
        hidden: `[..., features]`.
        softmax: bands, or groups of bands if `static.sizes` tells them, and clusters.
        numbers: z_loss and soft_cap that only the program knows, by name; None: it is in `static`.
        targets: `[...]`, or `[..., k]`; one that does not exist is 0.
        weights: `[...]`, 0 of targets that are ignored, NaN of those that do not exist.
        probs: `[..., k]`, 0 of targets that are ignored, or None.
        count: the sum of the weights, before they became NaN.
    """

    def __init__(self, hidden, targets, weights, bands, clusters, settings, probs):
        settings.check()
        hidden, bands, clusters = validate_bands(hidden, bands, clusters)
        self.shape, self._settings = hidden.shape[:-1], settings
        words = words_of(bands, settings.words, settings.axis_name)
        ignored, dtype = settings.ignore_index, sum_dtype(hidden.dtype)
        if settings.top_k > sum(words):
            raise InputError(f"top_k={settings.top_k} must be at most {sum(words)}, the words")
        more, checked = (), weights  # targets that count for nothing are not checked
        if probs is not None:
            probs = floats("target_probs", probs, *self.shape, "k").astype(dtype)
            probs = _without_gradient(probs)
            more = probs.shape[-1:]
            checked = probs if weights is None else probs * jnp.asarray(weights)[..., None]
        # Before weights that are known become an array of JAX.
        targets = ids(
            "targets", targets, sum(words), *self.shape, *more, weights=checked, ignored=ignored
        )
        masked = weights is not None or ignored is not None
        self.count = math.prod(self.shape)
        if weights is None:
            weights = jnp.ones(self.shape, dtype)
        else:
            weights = floats("weights", weights, *self.shape).astype(dtype)
        there = exists(targets, sum(words))
        if ignored is not None:
            counted = targets != ignored
            probs = None if probs is None else jnp.where(counted, probs, 0.0)
            counted = counted if probs is None else jnp.any(counted, axis=-1)
            weights = jnp.where(counted, weights, 0.0)
        self.count = jnp.sum(weights) if masked else self.count
        self._exist = there
        if probs is not None:
            self._exist = jnp.all(there | (probs == 0), axis=-1)
            probs = jnp.where(there, probs, 0.0)
        weights = jnp.where(self._exist | (weights == 0), weights, jnp.nan)
        numbers = {name: getattr(settings, name) for name in ("z_loss", "soft_cap")}
        numbers = {
            name: _without_gradient(value).astype(dtype) if isinstance(value, jax.Array) else None
            for name, value in numbers.items()
        }
        known = {name: 0.0 for name, value in numbers.items() if value is not None}
        known["reports"] = tuple(name for name in settings.reports if name != "nll")
        pulled = any(name in DIFFERENTIABLE for name in settings.reports)
        sizes = ()
        if not partitioned.cuts((hidden, targets, weights, bands, clusters)):
            sizes, (bands, clusters) = laid_out(settings, words, bands, clusters)
        self.static = Static(settings._replace(**known), words, masked, pulled, sizes)
        tokens = hidden, jnp.where(there, targets, 0), weights, probs, self._exist
        softmax = bands, clusters, numbers
        tokens, softmax = partitioned.aligned(tokens, softmax, by_words(softmax))
        *self.softmax, self.numbers = softmax
        self.hidden, self.targets, self.weights, self.probs, self._exist = tokens

    def arrays(self, weights):
        """What the two functions with gradients of `banded` take, where these are the weights."""
        hidden, softmax, weights, targets, probs, numbers = same_axes(
            self.static.settings.axis_name,
            self.hidden,
            self.softmax,
            weights,
            self.targets,
            self.probs,
            self.numbers,
        )
        return hidden, (*softmax, numbers), weights, targets, probs

    def report(self, nll, reported):
        """The `Report` of these results `[...]`."""
        nll = jnp.where(self._exist, nll, 0 * self.weights)
        return reports.report(self._settings, reported, nll, self.weights != 0)


@jax.custom_jvp
def _without_gradient(array):
    """The array, which may not be differentiated."""
    return array


@_without_gradient.defjvp
def _refuse_number(primals, tangents):
    raise InputError(
        "z_loss, soft_cap and target_probs have no gradient here: give jax.lax.stop_gradient of"
        " them"
    )


def by_words(softmax) -> tuple[bool, ...]:
    """For each array of `(bands, clusters, numbers)`, whether it has a row for each word."""
    bands, *others = softmax
    fields = [pair for band in bands for pair in zip(Band._fields, band, strict=True)]
    rows = [name != "projection" for name, array in fields if array is not None]
    return (*rows, *[False] * len(jax.tree.leaves(others)))


def laid_out(settings, words, bands, clusters):
    """Rows of each band by group, and `(groups, clusters)`: clusters are None where they stand
    in the head, behind its words.
    """
    sizes, groups = join(bands)
    if settings.axis_name is None:
        sizes, groups, clusters = tiled(words, groups, sizes, clusters)
    return sizes, (groups, clusters)


def validate_bands(
    hidden, bands: Sequence[Band], clusters: Band | None
) -> tuple[jax.Array, list[Band], Band | None]:
    """`hidden [..., features]`, bands and clusters as JAX arrays; see
    `adaptive_jax.losses.banded`.

    Raises:
        InputError: hidden states of another width than the bands take, or bands and clusters that
            do not fit together.
    """
    if not bands:
        raise InputError(f"bands={bands} must have at least one Band(table)")
    bands = [_band(f"bands[{i}]", band) for i, band in enumerate(bands)]
    tails, head = len(bands) - 1, bands[0]
    empty = tails and np.shape(head.table)[:-1] == (0,)  # a head of clusters alone
    head = _checked("bands[0]", head, "features", 0 if empty else "words")
    features = head.features
    others = enumerate(bands[1:], 1)
    bands = [head, *(_checked(f"bands[{i}]", band, features) for i, band in others)]
    if clusters is None and tails:
        raise InputError(
            f"clusters=None does not fit {len(bands)} bands: give a Band whose table has {tails}"
            " rows"
        )
    if clusters is not None:
        if not tails:
            raise InputError(
                "clusters=Band(...) does not fit one band, which has no tails: give clusters=None"
            )
        clusters = _band("clusters", clusters)._replace(projection=None)
        clusters = _checked("clusters", clusters, head.table.shape[1], tails)
    return floats("hidden", hidden, ..., features), bands, clusters


def _band(what, band):
    if not isinstance(band, Sequence) or not 1 <= len(band) <= 3:
        raise InputError(
            f"{what} of type {type(band).__name__} must be a Band(table, projection, bias)"
        )
    return Band(*band)


def _checked(what, band, features, words="words"):
    """A band whose hidden states, or for clusters those of the head, have this width."""
    table, projection, bias = band
    width = features if projection is None else "width"
    table = floats(f"{what}.table", table, words, width) if words else jnp.asarray(table)
    if projection is not None:
        projection = floats(f"{what}.projection", projection, table.shape[1], features)
    bias = None if bias is None or not words else floats(f"{what}.bias", bias, len(table))
    return Band(table, projection, bias)
