"""The arrays of a call of the core, checked, and what is known of it when it is traced."""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adaptive_jax.errors import InputError
from adaptive_jax.losses import partitioned
from adaptive_jax.losses.groups import join, tiled
from adaptive_jax.losses.reports import DIFFERENTIABLE, Report
from adaptive_jax.losses.settings import Settings
from adaptive_jax.losses.sharded import same_axes, words_of
from adaptive_jax.numerics.arrays import exists, floats, ids
from adaptive_jax.numerics.bands import Band
from adaptive_jax.numerics.meshes import axes_of, vary_alike
from adaptive_jax.numerics.products import sum_dtype

NO_GRADIENT = (
    "z_loss, soft_cap and target_probs have no gradient here: use jax.lax.stop_gradient of them"
)


class Static(NamedTuple):
    """What is known of a loss when it is traced."""

    settings: Settings
    words: tuple[int, ...]  # of each band, on all devices
    masked: bool  # whether weights may be 0
    pulled: bool  # whether reports have gradients of their own
    # Rows of each band, by group; empty where a mesh may cut bands, which are laid out within.
    sizes: tuple[tuple[int, ...], ...]
    products: jnp.dtype  # the dtype that products run in


class Call:
    """The arrays of a call, checked, and on Explicit axes cut alike.

    Attributes:
        static: a `Static`.
        shape: of the tokens.
        hidden: `[..., features]`.
        softmax: bands, or groups of bands if `static.sizes` tells them, clusters, and a dict of the
            settings that are arrays, such as {"z_loss": array}; `static` has 0 in their place.
        targets: `[...]`, or `[..., k]`; one that does not exist is 0.
        weights: `[...]`, 0 of targets that are ignored, NaN of those that do not exist.
        probs: `[..., k]`, 0 of targets that are ignored, or None.
        count: the sum of the weights, before they became NaN.
    """

    def __init__(self, hidden, targets, weights, bands, clusters, settings, probs):
        settings = settings.of_numbers()
        settings.check()
        hidden, bands, clusters = validate_bands(hidden, bands, clusters)
        products = hidden.dtype
        hidden, bands, clusters = jax.tree.map(_widened, (hidden, bands, clusters))
        if settings.axis_name in axes_of(hidden):
            settings = settings._replace(gathers=True)
        words = words_of(bands, settings.words, settings.axis_name)
        if settings.top_k > sum(words):
            raise InputError(f"top_k={settings.top_k} must be at most {sum(words)}, the words")
        self._settings, self.shape = settings, hidden.shape[:-1]
        ignored, dtype = settings.ignore_index, sum_dtype(hidden.dtype)
        more, checked = (), weights  # targets that count for nothing are not checked
        if probs is not None:
            probs = floats("target_probs", probs, *self.shape, "k").astype(dtype)
            probs = without_derivative(probs, NO_GRADIENT)
            more = probs.shape[-1:]
            checked = probs
            if weights is not None:
                weights = floats("weights", weights, *self.shape).astype(dtype)
                checked = jnp.where((weights != 0)[..., None], probs, 0.0)
        # Before weights that are known become an array of JAX.
        targets = ids(
            "targets", targets, sum(words), *self.shape, *more, weights=checked, ignored=ignored
        )
        masked = weights is not None or ignored is not None
        if weights is None:
            weights = jnp.ones(self.shape, dtype)
        else:
            weights = floats("weights", weights, *self.shape).astype(dtype)
        if ignored is not None:
            span = jnp.iinfo(targets.dtype)
            if not span.min <= ignored <= span.max:
                raise InputError(
                    f"ignore_index={ignored} must fit {targets.dtype}, the dtype of the targets"
                )
            counted = targets != ignored
            if probs is not None:
                probs = jnp.where(counted, probs, 0.0)
                counted = jnp.any(counted, axis=-1)
            weights = jnp.where(counted, weights, 0.0)
        if probs is not None:
            probs = jnp.where((weights != 0)[..., None], probs, 0.0)  # which may be NaN
        self.count = jnp.sum(weights) if masked else math.prod(self.shape)
        exist = there = exists(targets, sum(words))
        if probs is not None:
            exist = jnp.all(there | (probs == 0), axis=-1)
            probs = jnp.where(there, probs, 0.0)
        weights = jnp.where(exist | (weights == 0), weights, jnp.nan)
        sizes = ()
        if not partitioned.cuts((hidden, targets, weights, bands, clusters)):
            sizes, (bands, clusters) = laid_out(settings, words, bands, clusters)
        others = tuple(name for name in settings.reports if name != "nll")
        pulled = any(name in DIFFERENTIABLE for name in settings.reports)
        numbers = {
            name: without_derivative(getattr(settings, name), NO_GRADIENT).astype(dtype)
            for name in ("z_loss", "soft_cap")
            if isinstance(getattr(settings, name), jax.Array)
        }
        known = settings._replace(reports=others, **dict.fromkeys(numbers, 0.0))
        self.static = Static(known, words, masked, pulled, sizes, products)
        tokens = hidden, jnp.where(there, targets, 0), weights, probs, exist
        softmax = bands, clusters, numbers
        tokens, self.softmax = partitioned.aligned(tokens, softmax, by_words(softmax))
        self.hidden, self.targets, self.weights, self.probs, self._exist = tokens

    def arrays(self, weights):
        """What the two functions with gradients of `banded` take, where these are the weights."""
        arrays = self.hidden, self.softmax, weights, self.targets, self.probs
        if self.static.settings.gathers:
            return vary_alike(arrays)
        return same_axes(self.static.settings.axis_name, *arrays)

    def report(self, nll, reported):
        """The `Report` of tokens, from their nll `[...]` and the sums of `reports.observed` over
        the softmaxes that each token visits.
        """
        fields = dict(reported)
        if "nll" in self._settings.reports:
            fields["nll"] = jnp.where(self._exist, nll, 0 * self.weights)
        if "correct" in fields:
            fields["correct"] = self._exist & (self.weights != 0) & (fields["correct"] == 0)
        return Report(**fields)


def _widened(array):
    """An array of float16 in float32: of its gradient, the mean of many tokens or a scale of the
    loss come first, and the range of float16 last.
    """
    return array.astype(jnp.float32) if array.dtype == jnp.float16 else array


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def without_derivative(arrays, message: str):
    """The arrays; differentiating them is an `InputError` with this message."""
    return arrays


@without_derivative.defjvp
def _refuse(message, primals, tangents):
    raise InputError(message)


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
    listed = isinstance(bands, Iterable) and not isinstance(bands, jax.Array | np.ndarray)
    given = "none" if listed else type(bands).__name__
    bands = list(bands) if listed else []
    if not bands:
        raise InputError(f"bands must be a list of one Band(table) or more, got {given}")
    bands = [_band(f"bands[{i}]", band) for i, band in enumerate(bands)]
    tails, head = len(bands) - 1, bands[0]
    if (clusters is None) == bool(tails):
        raise InputError(
            f"clusters={'None' if clusters is None else 'Band(...)'} does not fit {tails + 1}"
            " bands: use a Band whose table has a row for every band but the first; None with one"
        )
    empty = tails and np.shape(head.table)[:-1] == (0,)  # a head of clusters alone
    head = _checked("bands[0]", head, "features", 0 if empty else "words")
    features = head.features
    others = enumerate(bands[1:], 1)
    bands = [head, *(_checked(f"bands[{i}]", band, features) for i, band in others)]
    if tails:
        clusters = _band("clusters", clusters)
        if clusters.projection is not None:
            raise InputError(
                "clusters.projection must be None: clusters read what the table of bands[0] reads"
            )
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
