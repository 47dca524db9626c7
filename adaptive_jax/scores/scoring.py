"""Scores every token of a split after a chosen amount of context."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from adaptive_jax.data.batches.windows import ALONE, WindowBatch, Windows, windows
from adaptive_jax.data.vocabulary.words import pieces
from adaptive_jax.errors import InputError
from adaptive_jax.model.composition import Compose, compose_shared
from adaptive_jax.model.language_model import LanguageModel
from adaptive_jax.model.on_devices import local_model, on_devices
from adaptive_jax.parallel import sharding
from adaptive_jax.planning.plan import rows_to_score
from adaptive_jax.runs.run import Run

OOV = np.int32(-1)  # id of an input word for which the model has no vector
LOG_PROBS = 1 << 24  # largest number of log-probabilities in memory at once
OVERLAP = 8  # smallest ratio of a stream row's length to the tokens that two rows both read
# Takes batches and their number; yields the batches and shows progress
Progress = Callable[[Iterable, int], Iterable]


class Scored(NamedTuple):
    """Scores of some tokens of a split.

    Attributes:
        positions: int64 `[tokens]`, in the split.
        nll: float32 `[tokens]` in nats.
        hidden: the states that predicted the tokens, `[tokens, features]`; None unless requested.
    """

    positions: np.ndarray
    nll: np.ndarray
    hidden: np.ndarray | None = None


def scores(
    run: Run,
    ids: np.ndarray,
    settings: Windows,
    progress: Progress = lambda batches, count: batches,
    composed_once: tuple | None = None,
    **options: bool | float,
) -> Iterator[Scored]:
    """Scores every token of a split once, a batch of windows at a time.

    The model reads rows of `window` tokens and does not score the first `context` tokens of each.
    With window 512 and context 480, every token but the first few sees at least 480 tokens before
    it, at 16 times the work of context 0 (Baevski & Auli 2019, section 5.3 and Table 5). With
    break_mode "complete" a row scores whole sentences after this context (section 4.3). Examples of
    "complete_doc" and "eos" see nothing but themselves, as in training. With layout "streams" the
    body carries its state from batch to batch, so a token sees all tokens before it in its row. A
    body whose receptive field lies within the context is read as a stream too, see `as_stream`: the
    states of the context are computed once instead of window / (window − context) times.

    Args:
        ids: int32 `[tokens]`.
        settings: see `Windows`; `multiple` is set to the number of devices.
        composed_once: the result of `composed(run, ids)`, to score a split several times.
        options: `hidden` and `down_weight`, see `make_scorer`.

    Yields:
        Batches in order. The nll is infinite where the model's is not finite, and for words outside
        the model's vocabulary. As inputs, such words are vectors of zeros.

    Raises:
        InputError: see `windows`.
    """
    settings = as_stream(run.model, settings._replace(multiple=run.mesh.size), len(ids))
    count, batches = windows(ids, run.vocabulary.eos, settings)
    tables, rows = composed_once or composed(run, ids)

    def with_table_rows(batch):
        inputs = batch.batch.inputs
        in_vocabulary = inputs < run.model.input.vocabulary_size
        if rows is not None:
            inputs = rows[np.where(in_vocabulary, inputs, 0)]
        inputs = np.where(in_vocabulary, inputs, OOV)
        return batch._replace(batch=batch.batch._replace(inputs=inputs))

    start = functools.partial(first_carry, run, settings.layout)
    return Scorer(run, tables, start, **options)(
        (with_table_rows(batch), at, settings.context_columns)
        for batch, at in progress(batches, count)
    )


class Scorer:
    """Scores batches of rows with a run, one batch after another.

    Attributes:
        carry: the body's state after the last batch; None before the first.
    """

    def __init__(
        self, run: Run, tables: dict, start: Callable[[int], object], **options: bool | float
    ):
        """Arguments shared by all batches.

        tables: composed tables, as `composed` returns them; {} for a model that composes none.
            The inputs of batches are rows of them.
        start: from a number of rows to the body's initial state for them; () if no row continues
            another.
        options: `hidden` and `down_weight`, see `make_scorer`.
        """
        self.run, self.tables, self.options, self.start = run, tables, options, start
        self.carry = None

    def __call__(self, batches: Iterable[tuple[WindowBatch, np.ndarray, int]]) -> Iterator[Scored]:
        """Scores batches in order.

        batches: each a `WindowBatch`, the positions of the tokens that count, int64 `[tokens]`, and
            the number of columns of a row that do not count, see `Windows.context_columns`.
        """
        run, before = self.run, None
        words = run.num_known_words, len(run.vocabulary)
        for (batch, first), at, unscored in batches:
            if self.carry is None or (batch.reset is not None and batch.reset.any()):
                self.carry = self.start(len(first))
            scorer = make_scorer(run.model, run.mesh, unscored, *words, **self.options)
            window = WindowBatch(batch._replace(reset=None), first)
            on_devices = sharding.put_batch(run.mesh, window)
            results, self.carry = scorer(
                run.params, run.lexicon, self.tables, on_devices, self.carry
            )
            # Fetch a batch's results only once the next one has been dispatched.
            if before is not None:
                yield fetch(*before)
            before = results, window, at
        if before is not None:
            yield fetch(*before)


def fetch(results: tuple, batch: WindowBatch, positions: np.ndarray) -> Scored:
    """Fetches what a scorer of `make_scorer` returned for a batch. An nll that is NaN, inf or -inf
    becomes inf.

    positions: of the tokens that count, int64 `[tokens]`.
    """
    nll, states = jax.device_get(results)
    columns = batch.first[:, None] + np.arange(nll.shape[1])
    counts = np.take_along_axis(batch.batch.weights, columns, axis=1) > 0
    nll = np.nan_to_num(nll[counts], nan=np.inf, posinf=np.inf, neginf=np.inf)
    return Scored(positions, nll, states[counts] if len(states) else None)


def as_stream(model: LanguageModel, settings: Windows, tokens: int) -> Windows:
    """Settings with layout "streams", if the body gives the same scores when it carries its state.

    This holds for a gated convolution whose receptive field, with the reach of its input, lies
    within the context: its hidden states depend on the last inputs alone. No other body has a
    finite field. The state of an LSTM depends on everything it has read. In a transformer, a
    token's state depends on where the row begins, through attention to the whole row and, unless
    positions are relative, through the token's position in it; so one window cannot reuse the keys
    and values of another.

    tokens: of the split.
    """
    reach = getattr(model.body, "receptive_field", math.inf) - 1 + model.reach
    fixed = settings.layout == "streams" or settings.break_mode in ALONE
    if fixed or settings.context < max(reach, 1):
        return settings
    rows = min(settings.rows, max(settings.multiple, tokens // (OVERLAP * max(reach, 1))))
    context = reach if rows > 1 else 0
    longest = max(1, -(-(tokens - context) // rows)) + context
    # Windows of equal length need no padding.
    window = -(-longest // -(-longest // settings.window))
    return Windows(window, context, "none", "streams", rows, settings.multiple)


def score_split(
    run: Run,
    ids: np.ndarray,
    settings: Windows,
    progress: Progress,
    composed_once: tuple | None = None,
    **options: bool | float,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Results of `scores` in the order of the split; arguments as there.

    Returns:
        The nll, float32 `[tokens]` in nats, NaN for tokens of no example (the empty lines of
        "complete_doc"); and hidden states `[tokens, features]`, zero for those tokens, or None
        unless requested.
    """
    nll, hidden = np.full(len(ids), np.nan, np.float32), None
    for scored in scores(run, ids, settings, progress, composed_once, **options):
        nll[scored.positions] = scored.nll
        if scored.hidden is not None:
            if hidden is None:
                hidden = np.zeros((len(ids), scored.hidden.shape[1]), scored.hidden.dtype)
            hidden[scored.positions] = scored.hidden
    return nll, hidden


class Evaluation(NamedTuple):
    """Arguments of a scoring method besides its options.

    Attributes:
        ids: int32 `[tokens]` of the split.
        uniform, down_weight: see `Request`.
        train: `train(None)` returns the ids of the train split, `train(directory)` those of the
            train.txt in a directory.
        progress: `progress(label)` returns a `Progress`.
        tables: `tables()` returns `composed(run, ids)`, which is computed once.
        encode: `encode(other)` returns the ids of the split in another run's vocabulary.
    """

    run: Run
    ids: np.ndarray
    windows: Windows
    uniform: float
    down_weight: float
    train: Callable[[str | None], np.ndarray]
    progress: Callable[[str], Progress]
    tables: Callable[[], tuple]
    encode: Callable[[Run], np.ndarray]

    def by(self, other: Run, ids: np.ndarray) -> "Evaluation":
        """The evaluation of the same text by another run, with the window that it was trained with
        and, if it fits, the same context.

        ids: of the text, in the other run's vocabulary.
        """
        windows = Windows.of(other.config)
        if windows.layout != "streams":
            context = self.windows.context
            rows = rows_to_score(other.config, windows.window) * other.mesh.size
            fits = context < windows.window and windows.break_mode not in ALONE
            windows = windows._replace(context=context if fits else 0, rows=rows)
        tables = functools.cache(functools.partial(composed, other, ids))
        return self._replace(run=other, ids=ids, windows=windows, tables=tables)

    def score(self, hidden: bool = False) -> tuple[np.ndarray, np.ndarray | None]:
        """The model's own scores, mixed as in `with_uniform`, and hidden states if requested, see
        `score_split`.
        """
        options = {"hidden": hidden, "down_weight": self.down_weight}
        progress, tables = self.progress("scoring"), self.tables()
        nll, states = score_split(self.run, self.ids, self.windows, progress, tables, **options)
        return self.with_uniform(nll), states

    def counted(self, hidden: bool = True) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
        """The nll of `score`, and the hidden states and ids of the tokens that count, whose nll is
        not NaN.
        """
        nll, states = self.score(hidden)
        counts = ~np.isnan(nll)
        if states is not None and not counts.all():
            states = states[counts]
        return nll, states, self.ids[:][counts]

    def with_uniform(self, nll: np.ndarray) -> np.ndarray:
        """The nll `[tokens]` of the model mixed with the uniform distribution.

        Raises:
            InputError: a score of a word of the training vocabulary is not finite.
        """
        invalid = np.flatnonzero(np.isinf(nll))
        # New words may have probability 0.
        invalid = invalid[self.ids[:][invalid] < self.run.num_known_words]
        if len(invalid):
            total, step, dtype = np.sum(~np.isnan(nll)), self.run.step, self.run.config["dtype"]
            raise InputError(
                f"{len(invalid):,} of {total:,} scores are not finite, the first of token"
                f" {invalid[0]:,}: the model of step {step:,} diverged, is damaged or overflows in"
                f" {dtype}; use another --checkpoint"
            )
        return mixed_with_uniform(nll, self.uniform, len(self.run.vocabulary))


def mixed_with_uniform(nll: np.ndarray, uniform: float, words: int) -> np.ndarray:
    """−log((1 − u) p + u / V), float64 in nats: `nll` mixed with the uniform distribution over V
    words.
    """
    nll = nll.astype(np.float64)
    if not uniform:
        return nll
    with np.errstate(invalid="ignore"):  # of tokens that do not count
        return -np.logaddexp(np.log1p(-uniform) - nll, np.log(uniform / words))


def composed(run: Run, ids: np.ndarray) -> tuple[dict, np.ndarray | None]:
    """Tables composed once for a split, and each word's row in them, int32 `[V]`; None if rows are
    word ids.
    """
    composed_words = run.model.composed_words()
    if composed_words == "none":
        return {}, None
    needed = np.full(len(run.vocabulary), composed_words == "all")
    needed[run.vocabulary.eos] = True
    for piece in pieces(ids):
        needed[piece] = True
    needed = needed[: run.model.input.vocabulary_size]
    words = sharding.put(np.flatnonzero(needed).astype(np.int32), sharding.replicated(run.mesh))
    tables = _composer(run.model, run.mesh)(run.params, run.lexicon, words)
    return tables, None if composed_words == "all" else (np.cumsum(needed) - 1).astype(np.int32)


@functools.lru_cache(maxsize=8)
def _composer(model, mesh):
    compose = compose_shared(Compose(*local_model(model, mesh)), mesh)
    return jax.jit(on_devices(model, mesh, compose, (PartitionSpec(),) * 2, PartitionSpec()))


@functools.lru_cache(maxsize=32)  # lines of many lengths have as many values of `unscored`
def make_scorer(
    model: LanguageModel,
    mesh: Mesh,
    unscored: int,
    trained_words: int,
    words: int,
    hidden: bool = False,
    down_weight: float = 1.0,
) -> Callable:
    """Returns `scorer(params, lexicon, tables, batch, carry) -> ((nll, hidden), carry)`, see
    `scores`.

    unscored: number of columns of a row whose targets do not count, see `Windows`.
    trained_words, words: sizes of the training vocabulary and of the vocabulary to score over.
    hidden: return hidden states, too.
    down_weight: factor of the probabilities of new words; all probabilities are then normalised
        again.
    """
    one_model, gather = local_model(model, mesh, by_words=down_weight == 1)
    has_oov = model.input.vocabulary_size < words

    def local(params, lexicon, tables, window: WindowBatch, carry):
        variables = {"params": gather(params), "lexicon": lexicon, "tables": tables}
        batch, first = window
        columns = first[:, None] + jnp.arange(batch.inputs.shape[1] - unscored)[None]
        targets, in_vocabulary = jnp.take_along_axis(batch.targets, columns, axis=1), None
        if has_oov:
            in_vocabulary = batch.inputs != OOV
            batch = batch._replace(inputs=jnp.maximum(batch.inputs, 0))
        states, carry = one_model.apply(
            variables, batch, carry, in_vocabulary=in_vocabulary, method="hidden"
        )
        states = jnp.take_along_axis(states, columns[..., None], axis=1)
        last = model.input.vocabulary_size - 1  # further words cannot be predicted
        nll = one_model.apply(variables, states, jnp.minimum(targets, last), method="nll")
        nll = jnp.where(targets > last, jnp.inf, nll)
        if down_weight != 1:
            mass = _mass_of_new(one_model, variables, states, trained_words)
            nll += jnp.log1p(mass * (down_weight - 1)) - jnp.where(
                targets < trained_words, 0.0, math.log(down_weight)
            )
        return (nll, states if hidden else ()), carry

    replicated, rows = PartitionSpec(), sharding.batch_spec(0)
    mapped = on_devices(model, mesh, local, (replicated, replicated, rows, rows), rows)
    # Results are replicated, so that every host can read all of them.
    return jax.jit(mapped, out_shardings=(sharding.replicated(mesh), NamedSharding(mesh, rows)))


def _mass_of_new(model, variables, hidden, trained_words):
    """The total probability of the words from id `trained_words` on, `[rows, time]`."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    part = min(len(flat), max(1, LOG_PROBS // model.input.vocabulary_size))

    def mass(states):
        log_probs = model.apply(
            variables, states, method=lambda model, states: model.output.log_probs(states)
        )
        return jnp.sum(jnp.exp(log_probs[:, trained_words:]), axis=1)

    parts = jnp.pad(flat, [(0, -len(flat) % part), (0, 0)]).reshape(-1, part, flat.shape[1])
    return jax.lax.map(mass, parts).reshape(-1)[: len(flat)].reshape(hidden.shape[:-1])


@functools.lru_cache(maxsize=8)
def initial_carry(model: LanguageModel, mesh: Mesh, rows: int) -> Callable:
    """Returns a function that makes the body's state of `rows` rows before the first token."""
    by_rows = NamedSharding(mesh, sharding.batch_spec(0))
    return jax.jit(functools.partial(model.initial_carry, rows), out_shardings=by_rows)


def first_carry(run: Run, layout: str, rows: int) -> object:
    """The body's state of `rows` rows before the first token; () if no row continues another."""
    return initial_carry(run.model, run.mesh, rows)() if layout == "streams" else ()
