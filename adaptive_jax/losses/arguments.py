"""Settings, checked arrays and trace-time constants of one loss call."""

import functools
import math
import numbers
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adaptive_jax.errors import InputError, check_at_least, check_known, check_rates, check_within
from adaptive_jax.losses import partitioned
from adaptive_jax.losses.groups import lay_out
from adaptive_jax.losses.logit_scale import scaled_logits
from adaptive_jax.losses.reports import REPORTS
from adaptive_jax.losses.sharded import same_axes, words_of
from adaptive_jax.numerics.arrays import exists, floats, ids
from adaptive_jax.numerics.bands import Band
from adaptive_jax.numerics.meshes import axes_of, vary_alike
from adaptive_jax.numerics.products import sum_dtype

ADAPTIVE_REPORTS = "nll", "z_loss", "correct"  # of the one tail that a token visits
NO_GRADIENT = (
    "z_loss, soft_cap and target_probs have no gradient here: use jax.lax.stop_gradient of them"
)


class Settings(NamedTuple):
    """Static settings of a softmax loss. The defaults give the plain negative log-likelihood.

    Attributes:
        tail_dropout: rate of dropout after the projection of every tail (Baevski & Auli 2019,
            section 5.4).
        label_smoothing: share of the target's probability that is spread evenly over the columns of
            each softmax the token visits (the head, and the tail of its word), hence over the whole
            vocabulary for a full softmax.
        z_loss: weight of the squared log-normaliser of each softmax the token visits; a number, or
            an array `[]` that has no gradient.
        chunk: tokens whose logits exist at a time; None: chosen by `adaptive_jax.losses.plans`.
        soft_cap: every logit becomes `soft_cap · tanh(logit / soft_cap)` (Gemma 2, section 2); a
            number, an array `[]` that has no gradient, or None for no cap.
        axis_name: the axis of `jax.shard_map` over which the words of every band are sharded, see
            `adaptive_jax.losses.sharded`; None: none.
        gathers: True if each device of `axis_name`, which may then be several axes, has tokens of
            its own. Every device then computes the tokens of all devices with its own words.
        words: words of every band, on all devices; the other rows of its table are padding. None:
            no padding.
        ignore_index: target id whose tokens get weight 0, or None.
        reports: names of `adaptive_jax.losses.reports.REPORTS` to return for each token.
        top_k: number of words in the report "top_k".
        target_log_probs: whether to report the log-probability of each of several targets, for
            `linear_log_probs`.
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
    target_log_probs: bool = False

    def checked(self) -> "Settings":
        """The settings, with Python numbers in place of NumPy's scalars and arrays `[]`.

        Raises:
            InputError: a rate or label_smoothing outside [0, 1), a z_loss that is negative or
                infinite, a chunk below 1, a soft_cap that is not above 0, an ignore_index that is
                not an integer, an unknown report, or one of top_k and the report "top_k" without
                the other.
        """
        rates = "tail_dropout", "label_smoothing"
        scalars = {
            name: _python_number(getattr(self, name)) for name in (*rates, "z_loss", "soft_cap")
        }
        settings = self._replace(**scalars)
        check_rates(settings, *rates)
        if not _is_scalar_array(settings.z_loss):
            check_within("[0, inf)", z_loss=settings.z_loss)
        if settings.soft_cap is not None and not _is_scalar_array(settings.soft_cap):
            check_within("(0, inf)", soft_cap=settings.soft_cap)
        if not isinstance(self.ignore_index, numbers.Integral | None):
            raise InputError(f"ignore_index={self.ignore_index!r} must be an integer or None")
        for name in self.reports:
            check_known(f"reports={name!r}", name, REPORTS)
        if "top_k" in self.reports:
            check_at_least(1, top_k=self.top_k)
        elif self.top_k:
            raise InputError(
                f"top_k={self.top_k} has no effect without the report 'top_k': pass both"
            )
        if self.chunk is not None:
            check_at_least(1, chunk=self.chunk)
        return settings


def _python_number(value):
    """Converts a NumPy scalar to a Python number, which does not promote float32 under x64."""
    return value.item() if isinstance(value, np.generic | np.ndarray) and not value.ndim else value


PLAIN = Settings()


def used(setting: float | jax.Array | None) -> bool:
    """True for a setting that is neither None nor 0. An array counts as used."""
    return isinstance(setting, jax.Array) or bool(setting)


def _is_scalar_array(value):
    """True for a real array `[]`, whose value the program alone may know."""
    is_scalar = isinstance(value, jax.Array) and value.shape == ()
    return is_scalar and jnp.isdtype(value.dtype, ("integral", "real floating"))


class Static(NamedTuple):
    """Trace-time constants of a loss call."""

    settings: Settings
    words: tuple[int, ...]  # of each band, on all devices
    masked: bool  # whether weights may be 0
    # Rows of each band, by group; empty where bands may be sharded: they are grouped on the device.
    sizes: tuple[tuple[int, ...], ...]
    dtype: jnp.dtype  # of matrix products


class Targets(NamedTuple):
    """Targets of tokens and their weights.

    Attributes:
        ids: `[...]`, or `[..., k]` for k targets per token; 0 for ids outside the vocabulary.
        probs: `[..., k]`, the probabilities of k targets, 0 for ignored ones; or None.
        weights: `[...]`, 0 for ignored tokens, NaN where a target is outside the vocabulary.
        in_vocabulary: bool `[...]`.
        count: the sum of the weights before those of targets outside the vocabulary become NaN.
    """

    ids: jax.Array
    probs: jax.Array | None
    weights: jax.Array
    in_vocabulary: jax.Array
    count: jax.Array | int


def token_targets(targets, weights, probs, shape, words: int, ignored, dtype) -> Targets:
    """Checked targets of tokens of this shape.

    Args:
        targets: `[...]`, or with probs `[..., k]`.
        weights: `[...]`, or None: all 1.
        probs: `[..., k]`, the targets' probabilities; or None.
        ignored: target id whose tokens get weight 0, or None.
        dtype: of weights and probabilities.

    Raises:
        InputError: mismatched shapes, or concrete ids outside the vocabulary.
    """
    checked_weights, target_shape = weights, shape
    if weights is not None:
        array = floats("weights", weights, *shape).astype(dtype)
    if probs is not None:
        probs = floats("target_probs", probs, *shape, "k").astype(dtype)
        probs = not_differentiable(probs, NO_GRADIENT)
        target_shape = *shape, probs.shape[-1]
        checked_weights = probs
        if weights is not None:
            checked_weights = jnp.where((array != 0)[..., None], probs, 0.0)
    targets = ids(
        "targets", targets, words, *target_shape, weights=checked_weights, ignored=ignored
    )
    weights = jnp.ones(shape, dtype) if weights is None else array
    if ignored is not None:
        span = jnp.iinfo(targets.dtype)
        if not span.min <= ignored <= span.max:
            raise InputError(
                f"ignore_index={ignored} must fit {targets.dtype}, the dtype of the targets"
            )
        counts = targets != ignored
        if probs is not None:
            probs, counts = jnp.where(counts, probs, 0.0), jnp.any(counts, axis=-1)
        weights = jnp.where(counts, weights, 0.0)
    count = jnp.sum(weights)
    in_vocabulary = valid = exists(targets, words)
    if probs is not None:
        probs = jnp.where((weights != 0)[..., None], probs, 0.0)  # which may be NaN
        in_vocabulary = jnp.all(valid | (probs == 0), axis=-1)
        probs = jnp.where(valid, probs, 0.0)
    weights = jnp.where(in_vocabulary | (weights == 0), weights, jnp.nan)
    return Targets(jnp.where(valid, targets, 0), probs, weights, in_vocabulary, count)


class Arguments(NamedTuple):
    """Checked arguments of a loss; on Explicit axes, all tokens have the same sharding.

    Attributes:
        static: a `Static`.
        hidden: `[..., features]`.
        softmax: bands, or groups of bands if `static.sizes` is not empty, clusters, and a dict of
            the settings that are arrays, such as {"z_loss": array}; `static` has 0 in their place.
        targets: a `Targets`.
    """

    static: Static
    hidden: jax.Array
    softmax: tuple
    targets: Targets

    def varying(self, weights):
        """`(hidden, softmax, weights, ids, probs)`, cast to vary over the same axes of
        `jax.shard_map`, as functions with custom gradients require.
        """
        arrays = self.hidden, self.softmax, weights, self.targets.ids, self.targets.probs
        if self.static.settings.gathers:
            return vary_alike(arrays)
        return same_axes(self.static.settings.axis_name, *arrays)


def loss_arguments(
    hidden, targets, weights, bands, clusters, settings, probs=None, logit_scale=None
) -> Arguments:
    """Converts and checks the arguments of `adaptive_jax.losses.banded.reduced`.

    Raises:
        InputError: as `reduced`.
    """
    settings = settings.checked()
    hidden, bands, clusters = validate_bands(hidden, bands, clusters)
    refused = [name for name in settings.reports if name not in ADAPTIVE_REPORTS]
    if clusters is not None and refused:
        raise InputError(
            f"reports must be among {', '.join(ADAPTIVE_REPORTS)} with several bands, got"
            f" {refused[0]!r}: a token visits one tail; log_probs gives those of all words"
        )
    products, dtype = hidden.dtype, sum_dtype(hidden.dtype)
    # Gradients are averaged or scaled in float32 and rounded to float16 last.
    hidden, bands, clusters = jax.tree.map(
        lambda a: a.astype(jnp.float32) if a.dtype == jnp.float16 else a,
        (hidden, bands, clusters),
    )
    if logit_scale is not None:
        hidden, bands, clusters = scaled_logits(logit_scale, hidden, bands, clusters)
    if settings.axis_name in axes_of(hidden):
        settings = settings._replace(gathers=True)
    words = words_of(bands, settings.words, settings.axis_name)
    if settings.top_k > sum(words):
        raise InputError(f"top_k={settings.top_k} must be at most {sum(words)}, the words")
    ignored, shape = settings.ignore_index, hidden.shape[:-1]
    masked = weights is not None or ignored is not None
    targets = token_targets(targets, weights, probs, shape, sum(words), ignored, dtype)
    if not masked:
        targets = targets._replace(count=math.prod(shape))
    sizes, arrays = (), (hidden, targets.ids, targets.weights, bands, clusters)
    mesh = partitioned.mesh_of(arrays)
    if mesh is None:
        sizes, bands, clusters = lay_out(bands, clusters, words, settings.axis_name)
    array_settings = {
        name: not_differentiable(getattr(settings, name), NO_GRADIENT).astype(dtype)
        for name in ("z_loss", "soft_cap")
        if isinstance(getattr(settings, name), jax.Array)
    }
    static = Static(
        settings._replace(**dict.fromkeys(array_settings, 0.0)), words, masked, sizes, products
    )
    softmax = bands, clusters, array_settings
    if mesh is not None:
        tokens = hidden, targets._replace(count=None)
        tokens, softmax = partitioned.aligned(tokens, softmax, by_words(softmax))
        hidden, targets = tokens[0], tokens[1]._replace(count=targets.count)
    return Arguments(static, hidden, softmax, targets)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def not_differentiable(arrays, message: str):
    """Returns the arrays; raises an `InputError` with this message if they are differentiated."""
    return arrays


@not_differentiable.defjvp
def _refuse(message, primals, tangents):
    raise InputError(message)


def by_words(softmax) -> tuple[bool, ...]:
    """For each array of `(bands, clusters, array settings)`, True if it has a row per word."""
    bands, *rest = softmax
    fields = [pair for band in bands for pair in zip(Band._fields, band, strict=True)]
    rows = [name != "projection" for name, array in fields if array is not None]
    return (*rows, *[False] * len(jax.tree.leaves(rest)))


def validate_bands(
    hidden, bands: Sequence[Band], clusters: Band | None
) -> tuple[jax.Array, list[Band], Band | None]:
    """`hidden [..., features]`, bands and clusters as JAX arrays; see
    `adaptive_jax.losses.banded`. A `Table` in place of bands is the one band of a full softmax;
    errors then say "table" and "bias".

    Raises:
        InputError: mismatched shapes or dtypes of hidden states, bands and clusters.
    """
    if isinstance(bands, Table):
        band = _checked_band(Band(bands.table, None, bias=bands.bias), "features", "words", "")
        if (shape := np.shape(hidden)) and shape[-1] == len(band.table) != band.features:
            raise InputError(
                f"table must have shape [words, {len(band.table)}], got {list(band.table.shape)}:"
                " transpose it"
            )
        return floats("hidden", hidden, ..., band.features), [band], None
    listed = isinstance(bands, Iterable) and not isinstance(bands, jax.Array | np.ndarray)
    bands, kind = (list(bands), "none") if listed else ([], type(bands).__name__)
    if not bands:
        raise InputError(f"bands must be a list of one Band(table) or more, got {kind}")
    bands = [_band(f"bands[{i}]", band) for i, band in enumerate(bands)]
    tails, head = len(bands) - 1, bands[0]
    if (clusters is None) == bool(tails):
        raise InputError(
            f"clusters={'None' if clusters is None else 'Band(...)'} does not fit {tails + 1}"
            " bands: use a Band whose table has a row for every band but the first; None with one"
        )
    empty = tails and np.shape(head.table)[:-1] == (0,)  # a head of clusters alone
    head = _checked_band(head, "features", 0 if empty else "words", "bands[0].")
    features = head.features
    tables = enumerate(bands[1:], 1)
    bands = [head, *(_checked_band(band, features, "words", f"bands[{i}].") for i, band in tables)]
    if tails:
        clusters = _band("clusters", clusters)
        if clusters.projection is not None:
            raise InputError(
                "clusters.projection must be None: clusters read what the table of bands[0] reads"
            )
        clusters = _checked_band(clusters, head.table.shape[1], tails, "clusters.")
    return floats("hidden", hidden, ..., features), bands, clusters


class Table(NamedTuple):
    """Table and bias of a full softmax."""

    table: jax.Array  # [words, width]
    bias: jax.Array | None = None  # [words]


def _band(name, band):
    if not isinstance(band, Sequence) or not 1 <= len(band) <= 3:
        raise InputError(
            f"{name} of type {type(band).__name__} must be a Band(table, projection, bias)"
        )
    return Band(*band)


def _checked_band(band, features, words, prefix):
    """Converts and checks a band for states of width `features`, errors naming it by `prefix`."""
    table, projection, bias = band
    width = features if projection is None else "width"
    dtype = getattr(table, "dtype", jnp.float32)
    if not jnp.issubdtype(dtype, jnp.floating):  # such as a quantized table
        raise InputError(
            f"{prefix}table must have a float dtype, got {dtype}: multiply by its scales first"
        )
    table = floats(f"{prefix}table", table, words, width) if words else jnp.asarray(table)
    if projection is not None:
        projection = floats(f"{prefix}projection", projection, table.shape[1], features)
    bias = None if bias is None or not words else floats(f"{prefix}bias", bias, len(table))
    return Band(table, projection, bias)
