"""N-best lists of speech recognisers and translation systems, rescored with a language model.

    0 ||| it is raining cats ||| -12.3        an id, a text and a score, higher is better;
    0 ||| it is training cats ||| -11.9       other fields may stand before the score

The total of a hypothesis is score + weight · (log-probability in nats) + word_bonus · (words).
`fit` chooses both on a list whose references are known, by exact line searches: the total is linear
in each of them, so the errors of the best hypotheses change only where two hypotheses of a list
cross (Och 2003, section 4).
"""

import collections
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from adaptive_jax.errors import InputError

SEPARATOR = "|||"
ROUNDS = 10  # of line searches over weight and bonus, at most
ORDERS = 4  # of n-grams that BLEU counts


class Hypothesis(NamedTuple):
    """A line of an n-best list.

    Attributes:
        fields: what stands between text and score.
        log_prob: what the model gives to the text, in nats; NaN before it has.
    """

    id: str
    text: str
    fields: tuple[str, ...]
    score: float
    log_prob: float = math.nan

    @property
    def words(self) -> int:
        """Words of the text as it is written."""
        return len(self.text.split())

    def total(self, weight: float, word_bonus: float) -> float:
        """Its total; see the module."""
        return self.score + weight * self.log_prob + word_bonus * self.words


class Fitted(NamedTuple):
    """What `fit` chose, the metric's value with it, and that of the list as it came."""

    weight: float
    word_bonus: float
    value: float
    before: float


def parse(line: str, number: int) -> Hypothesis:
    """A hypothesis from a line. Raises InputError with the line's number for anything else."""
    name, *others = (field.strip() for field in line.split(SEPARATOR))
    if len(others) >= 2:
        text, *fields, score = others
        try:
            if math.isfinite(value := float(score)):
                return Hypothesis(name, text, tuple(fields), value)
        except ValueError:
            pass
    raise InputError(
        f"line {number} of the n-best list, {line.strip()[:60]!r}, is none: give `id ||| text |||"
        " score`"
    )


def lists(hypotheses: Iterable[Hypothesis]) -> Iterator[list[Hypothesis]]:
    """The hypotheses of each id; those of one id follow each other."""
    for _, group in itertools.groupby(hypotheses, key=lambda hypothesis: hypothesis.id):
        yield list(group)


def rescored(
    hypotheses: Sequence[Hypothesis], weight: float, word_bonus: float
) -> list[tuple[float, Hypothesis]]:
    """The hypotheses of a list with their totals, best first; of equal ones the earlier."""
    totals = [(hypothesis.total(weight, word_bonus), hypothesis) for hypothesis in hypotheses]
    return sorted(totals, key=lambda pair: -pair[0])


def written(total: float, hypothesis: Hypothesis) -> str:
    """A line of an n-best list, with the total in place of the score."""
    return f" {SEPARATOR} ".join(
        [hypothesis.id, hypothesis.text, *hypothesis.fields, f"{total:.6g}"]
    )


def references_of(lines: Iterable[str], groups: Sequence[Sequence[Hypothesis]]) -> list[str]:
    """The reference of each list: `id ||| text`, or a line for each list in their order.

    Raises:
        InputError: a list without a reference, or another number of lines.
    """
    lines = list(lines)
    if lines and all(SEPARATOR in line for line in lines):
        known = {
            name.strip(): text.strip()
            for name, _, text in (line.partition(SEPARATOR) for line in lines)
        }
        for group in groups:
            if group[0].id not in known:
                raise InputError(
                    f"the references have none of id {group[0].id!r}: give `id ||| text` for"
                    " each id"
                )
        return [known[group[0].id] for group in groups]
    if len(lines) != len(groups):
        raise InputError(
            f"there are {len(lines):,} references and {len(groups):,} n-best lists: give one line"
            " for each"
        )
    return lines


def fit(groups: Sequence[Sequence[Hypothesis]], references: Sequence[str], metric: str) -> Fitted:
    """The weight, 0 or more, and the word bonus that are best on lists with references.

    Each is searched in turn, exactly, from 0 until neither helps. metric: a name of `METRICS`.
    """
    if not groups:
        raise InputError("there are no n-best lists to fit a weight on: give some")
    counts, value = METRICS[metric]
    statistics = [
        np.array([counts(each.text.split(), text.split()) for each in group])
        for group, text in zip(groups, references, strict=True)
    ]
    features = [
        np.array([(each.score, each.log_prob, each.words) for each in group]) for group in groups
    ]
    point, best = np.array([1.0, 0.0, 0.0]), math.inf
    before = value(
        sum(of[np.argmax(lines @ point)] for of, lines in zip(statistics, features, strict=True))
    )
    for _ in range(ROUNDS):
        found = best
        for axis, lowest in (1, 0.0), (2, -math.inf):
            rest = point.copy()
            rest[axis] = 0
            at, loss = search(
                [(lines @ rest, lines[:, axis]) for lines in features], statistics, value, lowest
            )
            if loss < best:
                point[axis], best = at, loss
        if best == found:
            break
    return Fitted(float(point[1]), float(point[2]), best, before)


def search(
    groups: Sequence[tuple[np.ndarray, np.ndarray]],
    statistics: Sequence[np.ndarray],
    value: Callable,
    lowest: float,
) -> tuple[float, float]:
    """The t ≥ `lowest` for which the best hypotheses, by a + t · b, have the least value; and that
    value.

    Args:
        groups: of each list, a and b `[hypotheses]`.
        statistics: of each list, `[hypotheses, numbers]`; those of the best hypotheses are added
            up.
        value: of such a sum; less is better.
    """
    total, changes = 0.0, []
    for (a, b), counts in zip(groups, statistics, strict=True):
        envelope = upper_envelope(a, b, lowest)
        total = total + counts[envelope[0][1]]
        changes += [(t, counts[j] - counts[i]) for (_, i), (t, j) in itertools.pairwise(envelope)]
    changes.sort(key=lambda change: change[0])
    edges = [lowest, *(t for t, _ in changes), math.inf]
    sums = itertools.accumulate((change for _, change in changes), initial=total)
    intervals = [
        (value(counts), abs(t), t)
        for counts, low, high in zip(sums, edges[:-1], edges[1:], strict=True)
        if low < high
        for t in [_within(low, high)]
    ]
    loss, _, t = min(intervals)  # of several that are equal, the one that changes least
    return t, loss


def upper_envelope(a: np.ndarray, b: np.ndarray, lowest: float) -> list[tuple[float, int]]:
    """Which line a + t · b is the highest from which t on: pairs of t and its number, from t =
    `lowest`, in rising order.
    """
    envelope: list[tuple[float, int]] = []
    for number in np.lexsort((-np.arange(len(a)), a, b)):
        t = lowest
        while envelope:
            begin, before = envelope[-1]
            t = (
                (a[before] - a[number]) / (b[number] - b[before])
                if b[number] > b[before]
                else -math.inf
            )
            if t > begin:
                break
            envelope.pop()
            t = lowest
        envelope.append((float(t), int(number)))
    return envelope


def _within(low, high):
    """A number between two: 0 if that is, else their middle, or 1 beyond the one that is finite."""
    if low < 0 < high:
        return 0.0
    if math.isinf(low):
        return high - 1
    return low + 1 if math.isinf(high) else (low + high) / 2


def word_errors(words: Sequence[str], reference: Sequence[str]) -> tuple[int, int]:
    """Insertions, deletions and substitutions that make the words the reference, and the
    reference's words.
    """
    columns = np.arange(len(words) + 1)
    ids = {word: number for number, word in enumerate(words)}
    hypothesis, row = np.array([ids[word] for word in words], np.int64), columns.copy()
    for count, word in enumerate(reference, start=1):
        changed = np.minimum(row[1:] + 1, row[:-1] + (hypothesis != ids.get(word, -1)))
        row = np.minimum.accumulate(np.concatenate([[count], changed]) - columns) + columns
    return int(row[-1]), len(reference)


def ngrams(words: Sequence[str], reference: Sequence[str]) -> tuple[int, ...]:
    """What BLEU counts (Papineni et al. 2002): matches and n-grams of each order, words, and
    the reference's words.
    """
    found: list[int] = []
    for order in range(1, ORDERS + 1):
        own, other = (
            collections.Counter(zip(*(text[i:] for i in range(order)), strict=False))
            for text in (words, reference)
        )
        found += [sum((own & other).values()), max(0, len(words) - order + 1)]
    return *found, len(words), len(reference)


def error_rate(counts: np.ndarray) -> float:
    """Word errors a word of the references."""
    return float(counts[0] / max(1, counts[1]))


def without_bleu(counts: np.ndarray) -> float:
    """1 − BLEU of a corpus, without smoothing."""
    matches, total, (words, reference) = (
        counts[: 2 * ORDERS : 2],
        counts[1 : 2 * ORDERS : 2],
        counts[2 * ORDERS :],
    )
    if not matches.all():
        return 1.0
    return 1 - float(np.exp(min(0.0, 1 - reference / words) + np.mean(np.log(matches / total))))


METRICS = {"wer": (word_errors, error_rate), "bleu": (ngrams, without_bleu)}
