"""Surprisal of words in lines of text that stand alone or follow each other.

scorer = LineScorer(run, tables, lines, ScoreConfig())
for line in scorer(["the cat sat", "on the mat"]): print(line.text, line.log_prob)
"""

import functools
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import numpy as np

from adaptive_jax.config.options import check
from adaptive_jax.data.batches.layouts import scored_break_mode
from adaptive_jax.data.batches.windows import (
    ALONE,
    WindowReader,
    Windows,
    WindowSpans,
    ends_example,
    last_example,
    windows_after,
)
from adaptive_jax.data.corpora.line_files import TextLine
from adaptive_jax.data.vocabulary.lines import Lines
from adaptive_jax.data.vocabulary.places import places, word_numbers
from adaptive_jax.errors import InputError
from adaptive_jax.parallel import sharding
from adaptive_jax.planning.plan import rows_to_score
from adaptive_jax.runs.run import Run
from adaptive_jax.scores.distributions import predictive_stats
from adaptive_jax.scores.growing import GrowingText, Line
from adaptive_jax.scores.line_options import ScoreConfig
from adaptive_jax.scores.scores import Scores, perplexity, word_names
from adaptive_jax.scores.scoring import Scorer, first_carry

NO_TOKENS = np.zeros(0, np.int32)
# Lines in the first block and in the largest ones; tokens that fill a block
FIRST, MOST, LONGEST = 32, 8192, 1 << 18


class ScoredLine(NamedTuple):
    """A line of text and the scores of its words, arrays `[words]`. The last word is `<eos>`.

    Attributes:
        text: the line as passed to the scorer.
        words: split and normalised as in the run's corpus.
        log_probs: float64, the log-probability of each word in nats, summed over its units.
        unseen: bool, whether the word is not in the vocabulary, so that `<unk>` is scored in its
            place. None for sub-words.
        frequencies: int64, occurrences in the training text, 0 for unseen words. None for
            sub-words, which are counted as units, and for a list of words without counts.
        ranks: int64, 1 for the most probable word; None unless requested.
        entropies: float64, entropy in nats of the distribution that predicts each word; None unless
            requested.
        number: number of the line in its file, or of the row in its table, from 1.
        file: name of the file, "-" for standard input; empty for text from no file.
        columns: the other columns of the table.
        before: the beginning of the first word, if it stands in the text before the line.
    """

    text: str
    words: tuple[str, ...]
    log_probs: np.ndarray
    unseen: np.ndarray | None
    frequencies: np.ndarray | None
    ranks: np.ndarray | None = None
    entropies: np.ndarray | None = None
    number: int = 1
    file: str = ""
    columns: Mapping[str, str] = MappingProxyType({})
    before: str = ""

    @property
    def places(self) -> np.ndarray:
        """Characters of `text` at which each word starts and ends: int64 `[words, 2]`."""
        spans = places(self.before + self.text, self.words)
        return np.maximum(spans - len(self.before), 0)

    def by_word(self) -> "ScoredLine":
        """The line by white-space words, punctuation included, whose log-probabilities are the sums
        over their parts. `<eos>` stays a word. A word is unseen if one of its parts is.
        """
        if not self.words:
            return self
        spans = self.places
        numbers = word_numbers(self.text, spans)
        first = np.flatnonzero(np.append(True, (np.diff(numbers) != 0) | (numbers[1:] < 0)))
        starts, ends = spans[first, 0], spans[np.append(first[1:], len(spans)) - 1, 1]
        words = (
            self.text[a:b].rstrip() if a < b else self.words[i]
            for i, a, b in zip(first, starts, ends, strict=True)
        )
        unseen = None if self.unseen is None else np.logical_or.reduceat(self.unseen, first)
        return self._replace(
            words=tuple(words),
            log_probs=np.add.reduceat(self.log_probs, first),
            unseen=unseen,
            frequencies=None,
            ranks=None,
            entropies=None,
            before="" if spans[0, 1] else self.before,
        )

    @property
    def log_prob(self) -> float:
        """Log-probability of the line in nats, `<eos>` included."""
        return float(np.sum(self.log_probs))

    @property
    def perplexity(self) -> float:
        """Perplexity per word of the line, infinite where that overflows."""
        return perplexity(-self.log_prob / max(1, len(self.words)))


class LineScorer:
    """Scores lines of text in order."""

    def __init__(self, run: Run, tables: dict, lines: Lines, config: ScoreConfig):
        """tables: composed tables of all words, see `composed`.

        Raises:
            InputError: settings that do not fit each other or the run.
        """
        batches = run.config["batches"]
        check(config, prefix="")
        follows = config.context_from == "previous"
        break_mode = scored_break_mode(run.config) if follows else batches["break_mode"]
        if follows and (break_mode == "eos" or (break_mode in ALONE and config.given)):
            unit = "sentences" if break_mode == "eos" else "documents"
            raise InputError(
                f"context_from='previous' does not fit this run, whose {unit} saw nothing before"
                f" them (break_mode={break_mode}): use 'none'"
            )
        if config.rank_and_entropy and lines.vocabulary.mark:
            raise InputError(
                "rank and entropy are of words, and this run has units of sub-words: leave them out"
            )
        self.run, self.tables, self.lines, self.config = run, tables, lines, config
        self.eos, self.carries = run.vocabulary.eos, batches["layout"] == "streams"
        window, context = config.window or batches["sequence_length"], config.context
        if context is None:
            context = 0 if self.carries or break_mode in ALONE else window // 2
        self.settings = Windows.of(run.config, window, context, break_mode)
        self.given, self._open_word, self._line_end = NO_TOKENS, "", lines.words("\n")
        if config.given:
            closed, self._open_word = lines.split_open_word(config.given)
            self.given = last_example(lines.encode(closed), self.eos, break_mode)
        self._reader = WindowReader(self.eos, self.settings.window, self._rows)
        self._scorer = functools.partial(Scorer, run, tables, hidden=config.rank_and_entropy)
        self._first = functools.partial(first_carry, run, batches["layout"])
        self._start = self._after_given if len(self.given) and self.carries else self._first

    def __call__(self, texts: Iterable[str | TextLine]) -> Iterator[ScoredLine]:
        """Yields the scores of texts, each one line, or several separated by line feeds; a line
        feed at the end of a text changes nothing.

        Texts are read as results are consumed, up to some thousand lines ahead.

        Raises:
            InputError: as `Lines.encode`; a single string in place of a list; or a text of several
                sentences or documents for a run that reads each alone.
        """
        if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
            raise InputError(
                f"lines must be a list of strings or an open file, got {texts!r:.40}: use [text]"
            )
        follows = self.config.context_from == "previous"
        blocks = _blocks(self._lines(texts), self.config.eager)
        scores = self._score_following(blocks) if follows else self._score_alone(blocks)
        return itertools.starmap(self._scored, scores)

    def _lines(self, texts):
        """Yields the lines to score, with marks where documents begin."""
        after_blank, follows = False, self.config.context_from == "previous"
        for number, text in enumerate(texts, start=1):
            source = text if isinstance(text, TextLine) else TextLine(text, number)
            begins = after_blank or source.number == 1
            line = self._line(source, self._open_word if begins or not follows else "")
            after_blank = self.config.documents == "blank" and not source.text.strip()
            if not after_blank:
                yield line._replace(begins=begins)

    def _line(self, source, before):
        """A line that continues `before`, an unfinished word that begins its first word."""
        text = source.text
        words = self.lines.words(before + text if before else text)
        if not text.endswith("\n"):
            words += self._line_end
        ids, _ = self.lines.tokens(words)
        break_mode = self.settings.break_mode
        if self.config.context_from != "previous" and break_mode in ALONE:
            ends = ends_example(ids, np.append(self.eos, ids[:-1]), self.eos, break_mode)
            if ends[:-1].any():
                unit = "sentence" if break_mode == "eos" else "document"
                raise InputError(
                    f"text={text!r:.40} must be one {unit}, got several, and this run's {unit}s saw"
                    f" nothing before them (break_mode={break_mode}): pass each by itself"
                )
        if self.lines.vocabulary.spells and self.lines.vocabulary.unit == "token":
            words = word_names(ids, self.lines.vocabulary)
        if not before:
            return Line(source, words, ids)
        context_tokens = self.lines.units_within(ids, before)
        if context_tokens and self.lines.vocabulary.unit == "token":
            # A token without letters shares its place with the character of a later one.
            spans = places(before, words[:context_tokens])
            before = before[spans[-1, int(words[context_tokens - 1] != "")] :]
        words = words[self.lines.vocabulary.ends_word[ids[:context_tokens]].sum() :]
        return Line(source, words, ids, context_tokens, before)

    def _score_alone(self, blocks):
        """Yields lines and their scores; each sees only `given` and itself."""
        window, context = self.settings.window, self.settings.context
        prefix = np.append(np.int32(self.eos), self.given)[-window - 1 :]
        scorer = self._scorer(self._start)
        for block in blocks:
            ids = np.concatenate([part for line in block for part in (prefix, line.ids)])
            lengths = np.array([len(line.ids) for line in block])
            ends = np.cumsum(lengths + len(prefix))
            context_tokens = np.array([line.context_tokens for line in block])
            begin = ends - lengths
            starts = begin + context_tokens
            if self.carries:
                batches = self._reader.carried(ids, WindowSpans(begin, starts, ends))
            else:
                shown = np.minimum(len(self.given) + context_tokens, window)  # before each line
                spans = windows_after(starts, ends, shown, window, context)
                batches = self._reader.similar(ids, spans)
            scores = Scores.unscored(ids, self.config.rank_and_entropy)
            self._store_scores(scores, scorer(batches))
            for line, start, end in zip(block, begin, ends, strict=True):
                yield line, scores.take(slice(start, end))

    def _score_following(self, blocks):
        """Yields lines and their scores. Windows are those in which evaluate.py reads a split, so
        the perplexity of a document is the same.
        """
        before = np.append(np.int32(self.eos), self.given)
        before = Scores.unscored(before, self.config.rank_and_entropy)
        scorer, texts = self._scorer(self._start), []
        for block in itertools.chain(blocks, [()]):
            texts = texts[-1:]  # the last document of the block before
            for lines in _documents(block):
                if lines[0].begins or not texts:
                    texts.append(GrowingText(before, self.eos, self.settings))
                texts[-1].extend(lines)
            if not texts:
                return
            scores = Scores.concatenated([text.scores for text in texts])
            ends = np.cumsum([len(text.scores.ids) for text in texts])
            starts, new = np.append(0, ends[:-1]), [not text.begun for text in texts]
            open_text = texts[-1] if block and not self.config.eager else None
            spans = [
                WindowSpans(*(start + np.stack(text.next_windows(text is not open_text))))
                for text, start in zip(texts, starts, strict=True)
            ]
            if self.carries:
                batches = self._streams(scores.ids, spans, new)
            else:
                spans = WindowSpans(*np.concatenate(spans, axis=1))
                batches = self._reader.similar(scores.ids, spans)
            self._store_scores(scores, scorer(batches))
            for text, start, end in zip(texts, starts, ends, strict=True):
                text.scores = scores.take(slice(start, end))
                yield from text.pop_complete_lines()

    def _streams(self, ids, spans, new):
        """Yields batches that read documents one after another; a new document resets the row."""
        for span, reset in zip(spans, new, strict=True):
            yield from self._reader.stream(ids, int(span.start[0]), int(span.end[0]), reset)

    def _rows(self, lines, time):
        """Rows of a batch: one per device if that is enough, else as many as the devices hold."""
        devices = self.run.mesh.size
        return devices if lines <= devices else rows_to_score(self.run.config, time) * devices

    def _after_given(self, rows):
        """The body's state of `rows` rows after `given`."""
        carry = jax.tree.map(lambda a: np.repeat(a, rows, axis=0), self._carry_of_given)
        return sharding.put_batch(self.run.mesh, carry)

    @functools.cached_property
    def _carry_of_given(self):
        scorer, ids = self._scorer(self._first), np.append(np.int32(self.eos), self.given)
        deque(scorer(self._reader.stream(ids, 1, len(ids))), maxlen=0)
        return jax.tree.map(lambda a: np.asarray(jax.device_get(a))[:1], scorer.carry)

    def _store_scores(self, scores, batches):
        """Fills in the scores of tokens, batch by batch."""
        for scored in batches:
            positions = scored.positions
            scores.nll[positions] = scored.nll
            if self.config.rank_and_entropy:
                targets = scores.ids[positions]
                stats = predictive_stats(self.run, self.tables, scored.hidden, targets, k=1)
                scores.rank[positions], scores.entropy[positions] = stats.rank, stats.entropy

    def _scored(self, line, scores):
        """The scored line from the scores of its tokens, without words of no example."""
        vocabulary, unseen, frequencies = self.lines.vocabulary, None, None
        scores = scores.take(slice(line.context_tokens, None)).words(vocabulary)
        counts = ~np.isnan(scores.nll)
        ids, nll, ranks, entropies, _ = scores.take(counts)
        words = tuple(itertools.compress(line.words, counts))
        if not vocabulary.mark:
            by_name = vocabulary.unit == "word"  # every token is in the vocabulary
            unseen = np.array([by_name and word not in vocabulary.index for word in words], bool)
            if vocabulary.has_counts:
                frequencies = np.where(unseen, 0, vocabulary.counts[ids])
        text, *source = line.source
        return ScoredLine(
            text, words, -nll, unseen, frequencies, ranks, entropies, *source, line.before
        )


def _documents(block):
    """Lists of the lines of a block, one for each document."""
    begins = [i for i, line in enumerate(block) if line.begins and i > 0]
    bounds = [0, *begins, len(block)]
    return [block[a:b] for a, b in itertools.pairwise(bounds)] if block else []


def _blocks(lines, eager):
    """Yields lists of lines; the first ones are short, so that the first results come soon."""
    block, size, most = [], 0, 1 if eager else FIRST
    for line in lines:
        block.append(line)
        size += len(line.ids)
        if len(block) >= most or size >= LONGEST:
            yield block
            block, size, most = [], 0, 1 if eager else min(MOST, 4 * most)
    if block:
        yield block
