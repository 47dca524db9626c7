"""Rows of tokens through a model: what it says of each token that counts."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from adaptive_jax.data.batches.windows import WindowBatch
from adaptive_jax.evaluation.distributions import expected
from adaptive_jax.evaluation.runs import Run
from adaptive_jax.evaluation.scoring import Extras, finite, initial_carry, make_scorer
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.parallel import sharding
from adaptive_jax.planning.plan import rows_to_score

SHORTEST = 8  # tokens of a row: shorter ones would need programs of their own, and save nothing


class Row(NamedTuple):
    """Tokens to read.

    Attributes:
        before: the token before the first one, which the body reads first.
        tokens: int32 `[tokens]`.
        scored: the last so many of them count; the others are context.
    """

    before: int
    tokens: np.ndarray
    scored: int


class Shape(NamedTuple):
    """The shape of a batch: rows, tokens of a row, and how many of them may count."""

    rows: int
    time: int
    scored: int


class TokenScores(NamedTuple):
    """What a model says of tokens.

    Attributes:
        nll: float32 `[tokens]` in nats; infinite where the model gave no number.
        rank: int32 `[tokens]`, 1 for the most probable word; or None.
        entropy: float32 `[tokens]` in nats, of the distribution of the word; or None.
    """

    nll: np.ndarray
    rank: np.ndarray | None = None
    entropy: np.ndarray | None = None

    @classmethod
    def joined(cls, parts: "Sequence[TokenScores]") -> "TokenScores":
        """Several, one after another; there must be one."""
        return cls(
            *(
                None if columns[0] is None else np.concatenate(columns)
                for columns in zip(*parts, strict=True)
            )
        )

    def part(self, begin: int, end: int) -> "TokenScores":
        """Those of some tokens."""
        return TokenScores(*(None if column is None else column[begin:end] for column in self))


class Reader:
    """A run that reads rows.

    Attributes:
        describe: whether to compute rank and entropy, from distributions over all words of a few
            tokens at a time.
    """

    def __init__(self, run: Run, tables: dict, describe: bool):
        """tables: the composed tables of all words in order, see `composed`; {} for a model
        that composes none.
        """
        self.run, self.tables, self.describe = run, tables, describe

    def shape(self, rows: int, time: int, scored: int, longest: int) -> Shape:
        """The shape for some rows of at most so many tokens: one of few, so that few programs are
        compiled.

        It has as many rows as the devices hold, or one row a device if that is enough. longest:
        tokens of a row at most.
        """
        devices = self.run.mesh.size
        time = _rounded(time, longest)
        most = rows_to_score(self.run.config, time) * devices
        return Shape(
            devices if rows <= devices else most, time, min(time, _rounded(scored, longest))
        )

    def read(self, batches: Iterable[tuple[Sequence[Row], Shape]]) -> Iterator[list[TokenScores]]:
        """The scores of each row, batch by batch. A batch may have fewer rows than its shape."""
        before = None
        for rows, shape in batches:
            started, _ = self._start(rows, shape, ())
            # Fetch a batch's results only once the next one has been dispatched.
            if before is not None:
                yield self._fetch(*before)
            before = rows, *started
        if before is not None:
            yield self._fetch(*before)

    def carry_on(
        self, rows: Sequence[Row], shape: Shape, carry: object
    ) -> tuple[list[TokenScores], object]:
        """The scores of rows that continue a carry, all of whose tokens count, and the carry after
        them.

        The carry is right for rows that fill the shape. The first is `start(rows)`.
        """
        started, carry = self._start(rows, shape, carry)
        return self._fetch(rows, *started), carry

    def start(self, rows: int) -> object:
        """The carry of so many rows before the first token."""
        return initial_carry(self.run.model, self.run.mesh, rows)()

    def repeated(self, carry: object, rows: int) -> object:
        """The carry of the first row for so many rows."""
        first = jax.tree.map(lambda a: np.asarray(jax.device_get(a))[:1], carry)
        return sharding.put_batch(
            self.run.mesh, jax.tree.map(lambda a: np.repeat(a, rows, axis=0), first)
        )

    def _start(self, rows, shape, carry):
        run = self.run
        batch, offsets = _filled(rows, shape, run.vocabulary.eos)
        how = run.known, len(run.vocabulary), Extras(hidden=self.describe)
        scorer = make_scorer(run.model, run.mesh, shape.time - shape.scored, how)
        results, carry = scorer(
            run.params, run.lexicon, self.tables, sharding.put_batch(run.mesh, batch), carry
        )
        return (results, offsets), carry

    def _fetch(self, rows, results, offsets):
        nll, hidden = jax.device_get(results)
        nll, found = finite(nll), []
        counts = [
            slice(offset, offset + row.scored) for row, offset in zip(rows, offsets, strict=True)
        ]
        if not self.describe:
            return [TokenScores(nll[number, columns]) for number, columns in enumerate(counts)]
        hidden = np.concatenate([hidden[number, columns] for number, columns in enumerate(counts)])
        targets = np.concatenate([row.tokens[len(row.tokens) - row.scored :] for row in rows])
        told, end = expected(self.run, self.tables, hidden, targets, k=1), 0
        for number, columns in enumerate(counts):
            begin, end = end, end + rows[number].scored
            found.append(
                TokenScores(nll[number, columns], told.rank[begin:end], told.entropy[begin:end])
            )
        return found


def _rounded(tokens, longest):
    """The next power of two, or the longest if that is less."""
    return min(longest, max(SHORTEST, 1 << (tokens - 1).bit_length()))


def _filled(rows, shape, eos):
    """The batch of rows, and for each row the first of the scorer's columns that counts."""
    inputs, targets = (np.full((shape.rows, shape.time), eos, np.int32) for _ in range(2))
    weights, first, offsets = np.zeros(inputs.shape, np.float32), np.zeros(shape.rows, np.int32), []
    for number, (before, tokens, scored) in enumerate(rows):
        length = len(tokens)
        inputs[number, 0] = before
        inputs[number, 1:length] = tokens[:-1]
        targets[number, :length] = tokens
        weights[number, length - scored : length] = 1
        first[number] = min(length - scored, shape.time - shape.scored)
        offsets.append(length - scored - int(first[number]))
    return (
        WindowBatch(Batch(inputs, targets, weights, np.arange(shape.rows, dtype=np.int32)), first),
        offsets,
    )


def batched(reader: Reader, rows: Sequence[Row], longest: int) -> list[TokenScores]:
    """The scores of rows that stand alone, in their order: rows of similar length are read
    together.
    """
    rounded = functools.partial(_rounded, longest=longest)
    kinds: dict[tuple[int, int], list[int]] = {}
    for number, row in enumerate(rows):
        kinds.setdefault((rounded(len(row.tokens)), rounded(row.scored)), []).append(number)
    jobs = []
    for (time, scored), numbers in sorted(kinds.items()):
        shape = reader.shape(len(numbers), time, scored, longest)
        jobs += [
            (numbers[begin : begin + shape.rows], shape)
            for begin in range(0, len(numbers), shape.rows)
        ]
    found: dict[int, TokenScores] = {}
    for (numbers, _), scores in zip(
        jobs, reader.read(([rows[i] for i in job], shape) for job, shape in jobs), strict=True
    ):
        found |= dict(zip(numbers, scores, strict=True))
    return [found[number] for number in range(len(rows))]
