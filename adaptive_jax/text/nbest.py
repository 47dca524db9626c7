"""N-best lists of speech recognisers and translation systems, rescored with a language model.

    0 ||| it is raining cats ||| -12.3        an id, a text and a score, higher is better;
    0 ||| it is training cats ||| -11.9       other fields may stand before the score

The total of a hypothesis is score + weight · (log-probability in nats) + word_bonus · (words).
`fit` chooses both on lists whose references are known, by a search on a refined grid.
"""

import collections
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from adaptive_jax.errors import InputError

SEPARATOR = "|||"
ROUNDS = 3  # refinements of the grid of weights and bonuses
FINEST = 8  # the first grid has powers of two from 2^-8 to 2^8 times the scale
STEPS = np.linspace(-1, 1, 13)  # points of each axis of a refined grid, in radii
SMALLEST = 1e-3  # spread of scores below which they count as equal
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
        f"line {number} of the n-best list, {line.strip()[:60]!r}, must be `id ||| text ||| score`"
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


def fit(groups: Sequence[Sequence[Hypothesis]], references: Sequence[str], metric: str) -> Fitted:
    """The weight, 0 or more, and the word bonus that are best on lists with references.

    Both are searched together on a grid that is refined around the best point; of equally good
    points, the nearest to 0 is refined. metric: a name of `METRICS`.

    Raises:
        InputError: the references are not one for each list.
    """
    if len(references) != len(groups):
        raise InputError(
            f"there are {len(references):,} references and {len(groups):,} n-best lists: use one"
            " line for each"
        )
    counts, value = METRICS[metric]
    statistics = [
        np.array([counts(each.text.split(), text.split()) for each in group])
        for group, text in zip(groups, references, strict=True)
    ]
    features = [
        np.array([(each.score, each.log_prob, each.words) for each in group]) for group in groups
    ]

    def losses(points):
        """The metric of the best hypotheses at each of the points `[points, 2]`."""
        factors = np.concatenate([np.ones((len(points), 1)), points], axis=1).T
        chosen = zip(statistics, features, strict=True)
        return [value(sums) for sums in sum(of[np.argmax(x @ factors, 0)] for of, x in chosen)]

    spread = np.mean([np.ptp(x, axis=0) for x in features], axis=0)
    # One nat, and one word, count as much as the scores of a list differ.
    scale = np.maximum(spread[0], SMALLEST) / np.maximum(spread[1:], SMALLEST)
    powers = 2.0 ** np.arange(-FINEST, FINEST + 1)
    weights = scale[0] * np.append(0, powers)
    bonuses = scale[1] * np.concatenate([-powers, [0], powers])
    [before] = losses(np.zeros((1, 2)))
    best, point = before, np.zeros(2)
    for number in range(1 + ROUNDS):
        points = np.stack(np.meshgrid(weights, bonuses), axis=-1).reshape(-1, 2)
        points = points[np.argsort(np.abs(points / scale).sum(axis=1), kind="stable")]
        found = np.array(losses(points))
        least = points[found == found.min()]
        if found.min() < best:
            best, point = float(found.min()), least[0]
        elif number and found.min() == best < before:
            point = least[len(least) // 2]  # off the edge of those that are equally good
        radius = np.maximum(np.abs(point), scale / 4) / 2 / 4**number
        weights = np.unique(np.maximum(0, point[0] + radius[0] * STEPS))
        bonuses = point[1] + radius[1] * STEPS
    return Fitted(float(point[0]), float(point[1]), best, before)


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
