"""Surprisal of the words of text: lines that stand alone, or that follow each other.

scorer = LineScorer(run, tables, lines, ScoreConfig())
for line in scorer(["the cat sat", "on the mat"]): print(line.text, line.log_prob)
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from adaptive_jax.data.batches.examples import examples
from adaptive_jax.data.batches.layouts import scored_break_mode
from adaptive_jax.data.batches.windows import (
    ALONE,
    Windows,
    check_windows,
    ends_example,
    last_example,
)
from adaptive_jax.data.vocabulary.subwords import Subwords
from adaptive_jax.data.vocabulary.words import EOS
from adaptive_jax.errors import InputError
from adaptive_jax.evaluation.distributions import expected
from adaptive_jax.evaluation.runs import Run
from adaptive_jax.evaluation.scores import perplexity
from adaptive_jax.evaluation.scoring import ScoreOptions, Scorer
from adaptive_jax.parallel import sharding
from adaptive_jax.planning.plan import rows_to_score
from adaptive_jax.text.line_batches import round_up, stream_batches, window_batches
from adaptive_jax.text.lines import Lines
from adaptive_jax.text.options import ScoreConfig

NO_TOKENS = np.zeros(0, np.int32)
# Lines of the first block and of the largest one, and tokens of a block
FIRST, MOST, LONGEST = 32, 8192, 1 << 18


class ScoredLine(NamedTuple):
    """A line of text and the model's scores of its words, `[words]` each. The last word is
    `<eos>`.

    Attributes:
        text: the line as it was given.
        words: as the run's corpus has them.
        log_probs: float64, the log-probability of each word in nats; that of a word of several
            units is the sum of theirs.
        unseen: bool, whether the run does not know the word and `<unk>` is scored in its place.
            None for sub-words.
        frequencies: int64, occurrences in the training text, 0 of unseen words. None for sub-words,
            which were counted as units.
        ranks: int64, 1 for the most probable word; None if not asked for.
        entropies: float64, in nats, of the distribution of each word; None if not asked for.
    """

    text: str
    words: tuple[str, ...]
    log_probs: np.ndarray
    unseen: np.ndarray | None
    frequencies: np.ndarray | None
    ranks: np.ndarray | None = None
    entropies: np.ndarray | None = None

    @property
    def log_prob(self) -> float:
        """Log-probability of the line in nats, that of `<eos>` included."""
        return float(np.sum(self.log_probs))

    @property
    def perplexity(self) -> float:
        """Perplexity per word of the line, infinite where that overflows."""
        return perplexity(-self.log_prob / max(1, len(self.words)))


class _Parsed(NamedTuple):
    """A line, its words, its tokens, and how many tokens each word has."""

    text: str
    words: list[str]
    ids: np.ndarray
    lengths: np.ndarray


class LineScorer:
    """Scores lines of text in order.

    Scores are columns float64 `[1 or 3, tokens]`: nll in nats and, if asked for, rank and entropy;
    NaN for tokens of no example, the empty lines of break mode "complete_doc".
    """

    def __init__(self, run: Run, tables: dict, lines: Lines, config: ScoreConfig):
        """tables: composed tables of all words, as `composed` returns them.

        Raises:
            InputError: settings that do not fit each other or the run.
        """
        batches = run.config["batches"]
        config.check()
        follows = config.context_from == "previous"
        break_mode = scored_break_mode(run.config) if follows else batches["break_mode"]
        if follows and (break_mode == "eos" or (break_mode in ALONE and config.given)):
            unit = "sentences" if break_mode == "eos" else "documents"
            raise InputError(
                f"context_from='previous' does not fit this run, whose {unit} saw nothing before"
                f" them (break_mode={break_mode}): use 'none'"
            )
        if config.rank_and_entropy and isinstance(lines.vocabulary, Subwords):
            raise InputError(
                "rank and entropy are of words, and this run has units of sub-words: leave them out"
            )
        self.run, self.tables, self.lines, self.config = run, tables, lines, config
        self.eos, self.break_mode = run.vocabulary.eos, break_mode
        self.carries = batches["layout"] == "streams"
        self.window = config.window or batches["sequence_length"]
        if self.carries and config.context:
            raise InputError(
                f"context={config.context} does not apply to this run, which carries its state: a"
                " word sees all before it; leave it out"
            )
        self.context = config.context
        if self.context is None:
            self.context = 0 if self.carries or break_mode in ALONE else self.window // 2
        check_windows(Windows(self.window, self.context, break_mode, batches["layout"], rows=1))
        self.given = lines.encode(config.given) if config.given else NO_TOKENS
        self.given = last_example(self.given, self.eos, break_mode)
        self._carry_of_given = None

    def __call__(self, texts: Iterable[str]) -> Iterator[ScoredLine]:
        """The scores of texts, each a line, or several with line feeds between them; a line feed at
        the end changes nothing.

        Texts are read as results are taken, up to some thousand lines ahead.

        Raises:
            InputError: as `Lines.encode`; one text instead of several; a text of several sentences
                or documents that the model reads alone.
        """
        if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
            raise InputError(
                f"lines must be a list of strings or an open file, got {texts!r:.40}: use [text]"
            )
        blocks = _blocks(map(self._parsed, texts), self.config.eager)
        if self.config.context_from == "previous":
            return self._following(blocks)
        return (
            scored
            for block in blocks
            for scored in map(self._scored, block, self._alone([line.ids for line in block]))
        )

    def _parsed(self, text):
        words = self.lines.words(text)
        if not text.endswith("\n"):
            words.append(EOS)
        ids, lengths = self.lines.tokens(words)
        if self.config.context_from != "previous":
            ends = ends_example(ids, np.append(self.eos, ids[:-1]), self.eos, self.break_mode)
            if ends[:-1].any():
                unit = "sentence" if self.break_mode == "eos" else "document"
                raise InputError(
                    f"text={text!r:.40} must be one {unit}, got several, and this run's {unit}s saw"
                    f" nothing before them (break_mode={self.break_mode}): pass each by itself"
                )
        return _Parsed(text, words, ids, lengths)

    def _alone(self, lines):
        """The columns of each of the lines, which see only themselves and what is given."""
        if self.carries:
            return self._alone_carried(lines)
        prefix = self.given[-self.window - 1 :]
        shown = min(len(self.given), self.window)  # tokens of `given` that a line may see
        first = self.window - min(len(self.given), self.context)
        windows, begin = [], 0
        for line in lines:
            begin += len(prefix)
            cuts = [0, *range(first, len(line), self.window - self.context), len(line)]
            windows += [
                (begin + max(-shown, end - self.window), begin + start, begin + end)
                for start, end in itertools.pairwise(cuts)
            ]
            begin += len(line)
        ids = np.concatenate([part for line in lines for part in (prefix, line)])
        columns, _ = self._read(ids, self._windows(ids, windows))
        columns = columns[:, ~np.isnan(columns[0])]
        return np.split(columns, np.cumsum([len(line) for line in lines[:-1]]), axis=1)

    def _alone_carried(self, lines):
        """As `_alone`, where the body carries its state: all lines of a batch are read on from
        window to window.
        """
        found = [None] * len(lines)
        order = sorted(range(len(lines)), key=lambda number: len(lines[number]))
        before = np.append(np.int32(self.eos), self.given)[-1:]
        while order:
            time = round_up(len(lines[order[-1]]), self.window)
            rows = self._rows(len(order), time)
            numbers, order = order[-rows:], order[:-rows]
            ids = np.concatenate([part for n in numbers for part in (before, lines[n])])
            ends = np.cumsum([1 + len(lines[n]) for n in numbers])
            lengths = np.array([len(lines[n]) for n in numbers])
            batches = stream_batches(ids, self.eos, ends - lengths, lengths, (rows, time))
            columns, _ = self._read(ids, batches, self._after_given(rows))
            for number, end, length in zip(numbers, ends, lengths, strict=True):
                found[number] = columns[:, end - length : end]
        return found

    def _following(self, blocks):
        """The scores of lines that follow each other: windows are cut as those of a split, so the
        perplexity is that of evaluate.py.
        """
        carry = self._after_given(self.run.mesh.size) if self.carries else ()
        history, pending = np.append(np.int32(self.eos), self.given), NO_TOKENS
        waiting, found = deque(), self._columns(0)
        scored = 0  # of the pending tokens, which the next line may make a longer example
        for block in itertools.chain(blocks, [None]):
            if block is not None:
                waiting.extend(block)
                pending = np.concatenate([pending, *(line.ids for line in block)])
            starts, lengths, closed = self._examples(pending)
            is_complete = block is None or self.config.eager
            done = len(pending) if is_complete else closed
            ids, offset = np.concatenate([history, pending[:done]]), len(history)
            if self.carries:
                batches = self._stream(ids, offset)
            else:
                spans = zip((offset + starts).tolist(), lengths.tolist(), strict=True)
                windows = [
                    (begin - min(self.context, begin - 1), max(begin, offset + scored), end)
                    for begin, end in ((begin, begin + length) for begin, length in spans)
                    if offset + scored < end <= offset + done
                ]
                batches = self._windows(ids, windows)
            columns, carry = self._read(ids, batches, carry)
            found = np.concatenate([found, columns[:, offset + scored :]], axis=1)
            closed = done if self.carries else closed
            history, pending = ids[: offset + closed][-self.window - 1 :], pending[closed:]
            scored = done - closed
            while waiting and len(waiting[0].ids) <= found.shape[1]:
                line = waiting.popleft()
                yield self._scored(line, found[:, : len(line.ids)])
                found = found[:, len(line.ids) :]

    def _examples(self, pending):
        """Starts and lengths of the examples of `pending` tokens, and how many tokens no further
        one can change: those before the last example, to which the next line may be added.
        """
        if self.carries:
            return NO_TOKENS, NO_TOKENS, len(pending) // self.window * self.window
        if not len(pending) or (self.break_mode in ALONE and (pending == self.eos).all()):
            return NO_TOKENS, NO_TOKENS, len(pending)
        longest = self.window - self.context
        starts, lengths = examples(pending, self.eos, self.break_mode, longest)
        begins = starts
        if self.break_mode != "none":  # a part of a long sentence must not look like a line
            begins = starts[(starts == 0) | (pending[starts - 1] == self.eos)]
        return starts, lengths, int(begins[-1])

    def _windows(self, ids, windows):
        return window_batches(ids, self.eos, windows, self.window, self._rows)

    def _stream(self, ids, begin):
        """Batches of one row that read the tokens from `begin` on. Rows are full, since a carry
        after padding would be wrong; the rest has powers of two, for few programs.
        """
        while begin < len(ids):
            left = len(ids) - begin
            time = self.window if left >= self.window else 1 << (left.bit_length() - 1)
            shape, one = (self.run.mesh.size, time), np.array([time])
            yield from stream_batches(ids, self.eos, np.array([begin]), one, shape)
            begin += time

    def _rows(self, lines, time):
        """Rows of a batch: what the devices hold, or one row a device if that is enough."""
        devices = self.run.mesh.size
        return devices if lines <= devices else rows_to_score(self.run.config, time) * devices

    def _after_given(self, rows):
        """The carry of so many rows after `given`."""
        if not len(self.given):
            return None
        if self._carry_of_given is None:
            ids = np.append(np.int32(self.eos), self.given)
            _, carry = self._read(ids, self._stream(ids, 1), None)
            self._carry_of_given = jax.tree.map(lambda a: np.asarray(jax.device_get(a))[:1], carry)
        return sharding.put_batch(
            self.run.mesh,
            jax.tree.map(lambda a: np.repeat(a, rows, axis=0), self._carry_of_given),
        )

    def _columns(self, tokens):
        return np.full((3 if self.config.rank_and_entropy else 1, tokens), np.nan)

    def _read(self, ids, batches, carry=()):
        """The columns of `ids` as the batches score them, and the carry after the last batch."""
        columns = self._columns(len(ids))
        options = ScoreOptions(hidden=self.config.rank_and_entropy)
        scorer = Scorer(self.run, self.tables, options, carry)
        for scored in scorer(batches):
            columns[0, scored.at] = scored.nll
            if self.config.rank_and_entropy:
                of = expected(self.run, self.tables, scored.hidden, ids[scored.at], k=1)
                columns[1:, scored.at] = of.rank, of.entropy
        return columns, scorer.carry

    def _scored(self, line, columns):
        """A line's words from its tokens, without those of no example."""
        words, vocabulary = line.words, self.lines.vocabulary
        nll = np.add.reduceat(columns[0], np.cumsum(line.lengths) - line.lengths)
        counts = ~np.isnan(nll)
        unseen = frequencies = ranks = entropies = None
        if not isinstance(vocabulary, Subwords):
            unseen = np.array([word not in vocabulary.index for word in words])
            frequencies = np.where(unseen, 0, vocabulary.counts[line.ids])[counts]
            unseen = unseen[counts]
        if self.config.rank_and_entropy:
            ranks, entropies = columns[1, counts].astype(np.int64), columns[2, counts]
        counted = tuple(itertools.compress(words, counts))
        return ScoredLine(line.text, counted, -nll[counts], unseen, frequencies, ranks, entropies)


def _blocks(lines, eager):
    """Lists of lines, the first ones short, so that results come soon."""
    block, size, most = [], 0, 1 if eager else FIRST
    for line in lines:
        block.append(line)
        size += len(line.ids)
        if len(block) >= most or size >= LONGEST:
            yield block
            block, size, most = [], 0, 1 if eager else min(MOST, 4 * most)
    if block:
        yield block
