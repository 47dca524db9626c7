"""N-best lists: read, rescored, and weights that are fitted to references."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_jax.errors import InputError
from adaptive_jax.text import nbest
from adaptive_jax.text.nbest import Hypothesis, fit, lists, parse, rescored, written


def test_lines_come_back_in_their_new_order():
    text = ["s1 ||| the cat ||| -2.5", "s1 ||| the hat ||| am=1 lm=2 ||| -2", "s2 ||| ||| 1e1"]
    groups = list(lists(parse(line, 1) for line in text))
    assert [[each.text for each in group] for group in groups] == [["the cat", "the hat"], [""]]
    first = [
        each._replace(log_prob=log_prob)
        for each, log_prob in zip(groups[0], (-4.0, -6.0), strict=True)
    ]
    assert [written(*pair) for pair in rescored(first, 0.5, 1.0)] == [
        "s1 ||| the cat ||| -2.5",
        "s1 ||| the hat ||| am=1 lm=2 ||| -3",
    ]
    assert [each.text for _, each in rescored(first, 0.0, 0.0)] == ["the hat", "the cat"]
    assert [parse(written(1.5, each), 1)[:4] for each in first] == [
        (*each[:3], 1.5) for each in first
    ]


@pytest.mark.parametrize(
    "line", ["the cat", "a ||| b", "a ||| b ||| c", "a ||| b ||| nan", "", "a ||| b ||| 1 ||| x"]
)
def test_what_is_no_line_of_a_list(line):
    with pytest.raises(InputError, match="line 7 of the n-best list"):
        parse(line, 7)


def distance(words, reference):
    """Levenshtein's recursion."""
    if not words or not reference:
        return len(words) + len(reference)
    return min(
        distance(words[1:], reference) + 1,
        distance(words, reference[1:]) + 1,
        distance(words[1:], reference[1:]) + (words[0] != reference[0]),
    )


@settings(deadline=None, max_examples=50)
@given(st.text("abc", max_size=5), st.text("abcd", max_size=5))
def test_word_errors_are_the_distance(words, reference):
    assert nbest.word_errors(list(words), list(reference)) == (
        distance(words, reference),
        len(reference),
    )


def test_bleu():
    """By hand: 5 of 6 words, 3 of 5, 2 of 4 and 1 of 3 n-grams match, and one word is missing."""
    counts = nbest.ngrams(
        *(text.split() for text in ("the cat sat on the hat", "the cat sat on a big mat the"))
    )
    assert counts == (5, 6, 3, 5, 2, 4, 1, 3, 6, 8)
    bleu = math.exp(1 - 8 / 6) * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25
    assert nbest.without_bleu(np.array(counts)) == pytest.approx(1 - bleu)
    assert nbest.without_bleu(np.array(nbest.ngrams(["a"], ["b"]))) == 1


@pytest.mark.parametrize("metric", ["wer", "bleu"])
def test_fit_finds_weight_and_bonus(metric):
    """The first list needs a weight above 2, the second a bonus above 3 times the weight."""
    groups = [
        [Hypothesis("a", "w x y z", (), 0.0, -3.0), Hypothesis("a", "v x y z", (), 2.0, -4.0)],
        [Hypothesis("b", "a b c d e", (), 0.0, -9.0), Hypothesis("b", "a b c e", (), 0.0, -6.0)],
    ]
    references = ["w x y z", "a b c d e"]
    found = fit(groups, references, metric)
    assert found.value == pytest.approx(0) and found.before > 0
    assert found.weight > 2 and found.word_bonus > 3 * found.weight
    assert [
        rescored(group, found.weight, found.word_bonus)[0][1].text for group in groups
    ] == references
    with pytest.raises(InputError, match="1 references and 2"):
        fit(groups, references[:1], metric)


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_fit_is_as_good_as_a_dense_search(scale):
    """Whatever the unit of the scores: 30 lists of random hypotheses, against 40,000 points."""
    random = np.random.default_rng(1)
    groups, references = [], []
    for number in range(30):
        texts = [" ".join(random.choice(list("abc"), random.integers(1, 6))) for _ in range(8)]
        errors = np.array([nbest.word_errors(text.split(), texts[0].split())[0] for text in texts])
        nats = -3.0 * errors - 2 * np.array([len(text.split()) for text in texts])
        nats += random.normal(0, 1.5, 8)
        scores = scale * random.normal(0, 5, 8)
        fields = zip(texts, scores.tolist(), nats.tolist(), strict=True)
        groups.append([Hypothesis(str(number), text, (), *pair) for text, *pair in fields])
        references.append(texts[0])
    found = fit(groups, references, "wer")
    grid = scale * np.stack(
        np.meshgrid(np.linspace(0, 40, 200), np.linspace(-20, 60, 200)), axis=-1
    ).reshape(-1, 2)
    errors, words = 0, 0
    for group, text in zip(groups, references, strict=True):
        pairs = [nbest.word_errors(each.text.split(), text.split()) for each in group]
        totals = np.array([each.total(*grid.T) for each in group])
        errors = errors + np.array(pairs)[np.argmax(totals, axis=0), 0]
        words += len(text.split())
    assert found.before > found.value
    assert found.value <= (min(errors) + 1) / words
