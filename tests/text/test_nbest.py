"""N-best lists: read, rescored, and weights that are the best there are."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_jax.errors import InputError
from adaptive_jax.text import nbest
from adaptive_jax.text.nbest import (
    Hypothesis,
    fit,
    lists,
    parse,
    references_of,
    rescored,
    search,
    upper_envelope,
    written,
)

NUMBERS = st.lists(
    st.tuples(st.integers(-5, 5), st.integers(-3, 3), st.integers(0, 4)), min_size=1, max_size=6
)


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


@settings(deadline=None, max_examples=100)
@given(NUMBERS, st.sampled_from([0.0, -math.inf]))
def test_the_envelope_is_the_highest_line(lines, lowest):
    a, b, _ = np.array(lines, float).T
    found = upper_envelope(a, b, lowest)
    assert found[0][0] == lowest and all(
        low < high for (low, _), (high, _) in itertools.pairwise(found)
    )
    for (low, number), high in zip(found, [*(t for t, _ in found[1:]), math.inf], strict=True):
        t = nbest._within(low, high)
        assert number == np.flatnonzero(np.isclose(a + t * b, (a + t * b).max()))[0]


@settings(deadline=None, max_examples=100)
@given(st.lists(NUMBERS, min_size=1, max_size=4), st.sampled_from([0.0, -math.inf]))
def test_a_search_finds_the_least_errors(groups, lowest):
    """As trying a t between any two crossings."""
    arrays = [np.array(group, float).T for group in groups]
    crossings = {
        (a[i] - a[j]) / (b[j] - b[i])
        for a, b, _ in arrays
        for i in range(len(a))
        for j in range(len(a))
        if b[i] != b[j]
    }
    edges = sorted({-20.0, 20.0, 0.0} | crossings)
    tried = [
        (low + high) / 2 for low, high in itertools.pairwise(edges) if (low + high) / 2 > lowest
    ]
    errors = [
        sum(counts[np.argmax(np.round(a + t * b, 9))] for a, b, counts in arrays) for t in tried
    ]
    statistics = [counts[:, None] for *_, counts in arrays]
    t, loss = search(
        [(a, b) for a, b, _ in arrays], statistics, lambda counts: float(counts[0]), lowest
    )
    assert loss == min(errors) and t >= lowest
    assert loss == sum(counts[np.argmax(np.round(a + t * b, 9))] for a, b, counts in arrays)


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


@pytest.mark.parametrize("metric, value", [("wer", 0.0), ("bleu", 0.0)])
def test_fit_finds_weight_and_bonus(metric, value):
    """The first list needs a weight above 2, the second a bonus above 3 times the weight."""
    groups = [
        [Hypothesis("a", "w x y z", (), 0.0, -3.0), Hypothesis("a", "v x y z", (), 2.0, -4.0)],
        [Hypothesis("b", "a b c d e", (), 0.0, -9.0), Hypothesis("b", "a b c e", (), 0.0, -6.0)],
    ]
    references = references_of(["w x y z", "a b c d e"], groups)
    found = fit(groups, references, metric)
    assert found.value == pytest.approx(value) and found.before > 0
    assert found.weight > 2 and found.word_bonus > 3 * found.weight
    assert [
        rescored(group, found.weight, found.word_bonus)[0][1].text for group in groups
    ] == references
    assert references_of(["b ||| y", "a ||| x"], groups) == ["x", "y"]
    for lines, says in (["x"], "1 references and 2"), (["a ||| x"], "none of id 'b'"):
        with pytest.raises(InputError, match=says):
            references_of(lines, groups)
