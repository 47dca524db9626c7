"""Surprisal of the words of text: lines that stand alone, or that follow each other.

scored = LineScorer(lines, Reader(run, tables, describe=False), Reading())
for line in scored(["the cat sat", "on the mat"]): print(line.text, line.log_prob)
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from adaptive_jax.data.vocabulary.subwords import Subwords
from adaptive_jax.data.vocabulary.words import EOS
from adaptive_jax.errors import InputError
from adaptive_jax.text.lines import Lines
from adaptive_jax.text.rows import Reader, Row, TokenScores, batched
from adaptive_jax.text.running import NOTHING, Carried, Reading, Windowed, cut, limits_of

# Lines of the first block and of the largest, and characters of a block
FIRST, MOST, LONGEST = 32, 8192, 1 << 20


class ScoredLine(NamedTuple):
    """A line of text and what the model says of its words, `[words]` each. The last word is
    `<eos>`.

    Attributes:
        text: the line as it was given.
        words: as the run's corpus has them.
        log_probs: float64, the log-probability of each word in nats; of a word of several units the
            sum of theirs.
        unseen: bool, whether the run does not know the word, so that `<unk>` is scored in its
            place. None for sub-words.
        frequencies: int64, occurrences in the training text, 0 of unseen words. None for sub-words,
            whose words nobody counted.
        ranks: int64, 1 for the most probable word; or None where they were not asked for.
        entropies: float64, in nats, of the distribution that the word is drawn from; or None
            likewise.
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
        """Of the line, a word."""
        return math.exp(min(700.0, -self.log_prob / max(1, len(self.words))))


class _Parsed(NamedTuple):
    """A line, its words, its tokens, and how many tokens each word has."""

    text: str
    words: list[str]
    ids: np.ndarray
    lengths: np.ndarray


class LineScorer:
    """Scores lines of text, in order and one by one, whatever their number.

    Raises:
        InputError: settings that do not fit the run; see `Reading`.
    """

    def __init__(self, lines: Lines, reader: Reader, reading: Reading):
        self.lines, self.reader, self.reading = lines, reader, reading
        self.limits = limits_of(reader.run.config, reading)
        if reader.describe and isinstance(lines.vocabulary, Subwords):
            raise InputError(
                "rank and entropy are of words, and this run has units of sub-words: leave them out"
            )
        self.given = lines.encode(reading.given) if reading.given else NOTHING
        self._start = None  # the carry after `given`

    def __call__(self, texts: Iterable[str]) -> Iterator[ScoredLine]:
        """The scores of texts, each a line, or several with a line feed between them; one at the
        end changes nothing.

        Texts are read as results are taken, up to some thousand lines ahead.

        Raises:
            InputError: as `Lines.encode`; one text where there should be several.
        """
        if isinstance(texts, str):
            raise InputError(
                f"score takes lines, and {texts[:40]!r} is one text: give [text], or"
                " text.splitlines()"
            )
        blocks = (
            [self._parsed(text) for text in block] for block in _blocks(texts, self.reading.eager)
        )
        return self._alone(blocks) if self.reading.context_from == "none" else self._running(blocks)

    def _parsed(self, text):
        first, *others = (self.lines.words(line) for line in text.removesuffix("\n").split("\n"))
        words = [*first, EOS]
        for line in others:
            words += [*line, EOS]
        ids, lengths = self.lines.tokens(words)
        return _Parsed(text, words, ids, lengths)

    def _alone(self, blocks):
        """Lines that see nothing but themselves and what is given."""
        for block in blocks:
            yield from map(
                self._scored,
                block,
                self._carried(block) if self.limits.carries else self._in_windows(block),
            )

    def _in_windows(self, block):
        rows = [cut(self.given, line.ids, self.limits, self.lines.vocabulary.eos) for line in block]
        scores = iter(
            batched(self.reader, [row for of_line in rows for row in of_line], self.limits.window)
        )
        return [TokenScores.joined([next(scores) for _ in of_line]) for of_line in rows]

    def _carried(self, block):
        """As `_in_windows`, where the body carries its state: all lines of a batch are read on
        from window to window.
        """
        found: list[list[TokenScores]] = [[] for _ in block]
        order = sorted(range(len(block)), key=lambda number: len(block[number].ids))
        before = int(self.given[-1]) if len(self.given) else self.lines.vocabulary.eos
        while order:
            longest = len(block[order[-1]].ids)
            time = min(longest, self.limits.window)
            shape = self.reader.shape(len(order), time, time, self.limits.window)
            numbers, carry = order[-shape.rows :], self._after_given(shape.rows)
            del order[-shape.rows :]
            for begin in range(0, longest, shape.time):
                parts = [
                    block[number].ids[max(0, begin - 1) : begin + shape.time] for number in numbers
                ]
                parts = [np.insert(part, 0, before) if not begin else part for part in parts]
                rows = [
                    (
                        Row(int(part[0]), part[1:], len(part) - 1)
                        if len(part) > 1
                        else Row(before, NOTHING, 0)
                    )
                    for part in parts
                ]
                scores, carry = self.reader.carry_on(rows, shape, carry)
                for number, score in zip(numbers, scores, strict=True):
                    found[number].append(score)
        return [TokenScores.joined(parts) for parts in found]

    def _after_given(self, rows):
        if not len(self.given):
            return self.reader.start(rows)
        if self._start is None:
            self._start = Carried(self.reader, self.limits, self.given).carry
        return self.reader.repeated(self._start, rows)

    def _running(self, blocks):
        """Lines of one text."""
        running = (Carried if self.limits.carries else Windowed)(
            self.reader, self.limits, self.given
        )
        waiting, parts = deque(), []
        for block in blocks:
            waiting.extend(block)
            parts.append(
                running.read(np.concatenate([line.ids for line in block]), self.reading.eager)
            )
            yield from self._complete(waiting, parts)
        parts.append(running.read(NOTHING, True))
        yield from self._complete(waiting, parts)

    def _complete(self, waiting, parts):
        """The lines that wait all of whose tokens are in `parts`, which keeps the scores of
        others.
        """
        scores, done = TokenScores.joined(parts), 0
        while waiting and done + len(waiting[0].ids) <= len(scores.nll):
            line = waiting.popleft()
            yield self._scored(line, scores.part(done, done + len(line.ids)))
            done += len(line.ids)
        parts[:] = [scores.part(done, len(scores.nll))]

    def _scored(self, line, scores):
        """A line's words from its tokens; without those of no example."""
        words, vocabulary = line.words, self.lines.vocabulary
        starts = np.cumsum(line.lengths) - line.lengths
        nll = np.add.reduceat(scores.nll.astype(np.float64), starts)
        counts = ~np.isnan(nll)
        unseen = frequencies = None
        if not isinstance(vocabulary, Subwords):
            unseen = np.array([word not in vocabulary.index for word in words])
            frequencies = np.where(unseen, 0, vocabulary.counts[line.ids])[counts]
            unseen = unseen[counts]
        kept = tuple(word for word, count in zip(words, counts, strict=True) if count)
        ranks, entropies = (
            None if column is None else column[counts] for column in (scores.rank, scores.entropy)
        )
        ranks = None if ranks is None else ranks.astype(np.int64)
        entropies = None if entropies is None else entropies.astype(np.float64)
        return ScoredLine(line.text, kept, -nll[counts], unseen, frequencies, ranks, entropies)


def _blocks(texts, eager):
    """Lists of texts, the first ones short, so that results come soon."""
    block, size, most = [], 0, 1 if eager else FIRST
    for text in texts:
        block.append(text)
        size += len(text)
        if len(block) >= most or size >= LONGEST:
            yield block
            block, size, most = [], 0, 1 if eager else min(MOST, 4 * most)
    if block:
        yield block
