"""The work of bands and its minimum, against brute force; what a vocabulary keeps of a text, and
the lines of a dry run about both.
"""

import collections
import itertools
import re

import numpy as np
import pytest

from adaptive_jax.config.keys import resolve
from adaptive_jax.data.corpora.load import load
from adaptive_jax.losses import plans
from adaptive_jax.model.language_model import build
from adaptive_jax.planning import coverage
from adaptive_jax.planning import cutoffs as planner
from adaptive_jax.planning.cutoffs import Workload, cost, propose
from adaptive_jax.training.dry_run import dry_run
from tests import refuses

PAPER = (20_000, 60_000)
COUNTS = {
    "steep": [512 // 2**i for i in range(9)],
    "zipf": [5040 / r for r in range(1, 13)],
    "flat": [3] * 8,
    "stairs": [90, 90, 31, 30, 30, 8, 8, 8, 8, 1, 1, 1, 0, 0],
    "one word": [1000, 1, 1, 1, 1, 1, 1, 1, 1, 1],
}


def slow_cost(counts, cutoffs, workload):
    """FLOPs per token, from a list of matrix products, each counted once forward and twice
    backward.
    """
    products = []
    edges = [0, *cutoffs, len(counts)]
    for band in range(len(edges) - 1):
        inside = list(counts[edges[band] : edges[band + 1]])
        width = (workload.width or workload.features) // workload.factor**band
        share = 1 if band == 0 else sum(inside) / sum(counts)
        rows = max(workload.tokens * share, workload.least_rows)
        if band > 0 or width != workload.features:
            products.append((rows, workload.features, width))
        products.append((rows, width, len(inside) + len(cutoffs) * (band == 0)))
    return sum(3 * 2 * a * b * c for a, b, c in products) / workload.tokens


def zipf(words):
    return 1 / np.arange(1, words + 1)


def test_a_cost_computed_by_hand():
    """10 tokens, 2 words and a cluster of width 8, then 2 of the tokens, 2 words of width 2 and
    a projection from 8.
    """
    head, tail = 10 * 8 * (2 + 1), 2 * (2 + 8)
    workload = Workload(features=8, factor=4, tokens=10, least_rows=0)
    for cutoffs, changes, expected in (
        ((2,), {}, 6 * (head + 2 * tail) / 10),
        ((2,), {"least_rows": 5}, 6 * (head + 5 * tail) / 10),
        ((2,), {"least_rows": 20}, 6 * 2 * (head + 10 * tail) / 10),
        ((), {}, 6 * 8 * 4),
        ((), {"width": 3}, 6 * 3 * (4 + 8)),
    ):
        work = cost([6, 2, 1, 1], cutoffs, workload._replace(**changes))
        assert work == pytest.approx(expected)


@pytest.mark.parametrize("least_rows", [0, 5, 40])
@pytest.mark.parametrize("bands", [1, 2, 3, 4])
def test_against_brute_force(bands, least_rows):
    """No cutoffs at all cost less, and every one of them costs what the slow count says."""
    proposals = set()
    for counts, (factor, width, smallest) in itertools.product(
        COUNTS.values(), [(1, 0, 1), (2, 0, 1), (2, 12, 1), (2, 0, 2)]
    ):
        workload = Workload(16, factor, width, tokens=32, least_rows=least_rows)
        every = {}
        for cutoffs in itertools.combinations(range(1, len(counts)), bands - 1):
            every[cutoffs] = slow_cost(counts, cutoffs, workload)
            assert cost(counts, cutoffs, workload) == pytest.approx(every[cutoffs], rel=1e-12)
        sizes = {cutoffs: np.diff([0, *cutoffs, len(counts)]).min() for cutoffs in every}
        least = min(flops for cutoffs, flops in every.items() if sizes[cutoffs] >= smallest)
        proposed, flops = propose(counts, bands, workload, smallest)
        assert flops == pytest.approx(least, rel=1e-12)
        assert every[proposed] == pytest.approx(least, rel=1e-12)
        assert sizes[proposed] >= smallest
        proposals.add(proposed)
    assert bands == 1 or least_rows > 32 or len(proposals) > 3  # else one answer would do for all


@pytest.mark.parametrize("factor", [1, 2])
def test_a_grid_is_nearly_as_good_as_every_position(monkeypatch, factor):
    """A vocabulary too long for every position: at most 1% above the minimum."""
    counts, workload = zipf(2_000), Workload(features=64, factor=factor, tokens=512)
    sparse = [propose(counts, bands, workload, 1)[1] for bands in (2, 3, 4)]
    monkeypatch.setattr(planner, "ALL_POSITIONS", 2_000)
    exact = [propose(counts, bands, workload, 1)[1] for bands in (2, 3, 4)]
    assert all(least <= near <= 1.01 * least for least, near in zip(exact, sparse, strict=True))
    assert sparse[0] > exact[0]  # else the grid was not used
    monkeypatch.undo()
    # Where nothing but bands of one size will do, they are found.
    assert propose(zipf(3 * 1_999), 3, workload, 1_999)[0] == (1_999, 2 * 1_999)


def test_wikitext103():
    """267,735 words. The paper's bands need at most a tenth of a full softmax, and other bands
    less. With the paper's head its bands are within 1% of the best; with the smallest band that it
    found as good, the best bands are near its own.
    """
    counts, workload = zipf(267_735), Workload()
    paper, full = cost(counts, PAPER, workload), cost(counts, (), workload)
    assert full == pytest.approx(6 * 267_735 * 1024)
    assert 0.05 < paper / full < 0.1
    costs = [propose(counts, bands, workload, 1)[1] for bands in (1, 2, 3, 4, 5)]
    assert costs[0] == full
    assert costs == sorted(costs, reverse=True)
    assert costs[2] < paper / 2
    best, flops = propose(counts, 3, workload, smallest=20_000)
    assert best[0] == 20_000
    assert 0.99 * paper < flops < 1.01 * paper
    assert planner.smallest_band(267_735) == 10_000
    best, flops = propose(counts, 3, workload)
    assert best[0] == 10_000
    assert flops < cost(counts, (10_000, 70_000), workload) < 0.65 * paper


def test_the_least_rows_are_the_chunk_of_a_tail():
    """The planner does not import it, so it has a copy."""
    assert planner.LEAST_ROWS == plans.TAIL_CHUNK == Workload().least_rows


@pytest.mark.parametrize(
    "call, names",
    [
        (lambda: propose([3, 2, 1], 3, Workload(features=8)), "bands factor 8"),
        (lambda: cost([3, 2, 1], (3,), Workload()), "cutoff vocabulary 3"),
        (lambda: cost([3, 2, 1], (), Workload(tokens=0)), "tokens 0"),
        (lambda: cost([3, 2, 1], (), Workload(least_rows=-1)), "least_rows -1"),
        (lambda: cost([3, 2, 1], (2, 1), Workload()), "cutoffs"),
    ],
)
def test_impossible_plans(call, names):
    """A wrong size or cutoff is an error that names it, not a plan of something else."""
    with refuses(*names.split()):
        call()


@pytest.fixture
def dry_run_lines(text, config, tmp_path, capsys, own_cache):
    """`dry_run_lines(**changes)`: words and cutoffs that a dry run of the small model prints."""

    def dry_run_lines(prepare=True, **changes):
        changes = {"data.path": str(text)} | changes
        small = resolve(config(**changes))
        if prepare:
            load(small["data"])
        dry_run(small, tmp_path / "run")
        head, *_ = capsys.readouterr().out.partition("parameters")
        return head.splitlines()

    return dry_run_lines


def test_a_dry_run_covers_a_prepared_corpus(dry_run_lines, text):
    """The vocabulary of the config and others, as counted word by word; the work of its cutoffs and
    of the cheapest ones. Nothing where the corpus is not prepared: a dry run reads no text.
    """
    assert dry_run_lines(prepare=False) == []
    with refuses("cutoff 60", "52"):
        dry_run_lines(**{"data.threshold": 20})
    lines = dry_run_lines(**{"data.threshold": 20, "input.cutoffs": (10, 20)})
    texts = {name: (text / f"{name}.txt").read_text() for name in ("train", "valid", "test")}
    tokens = {name: content.replace("\n", " <eos> ").split() for name, content in texts.items()}
    counts = collections.Counter(tokens["train"])
    kept = {word for word, n in counts.items() if n >= 20}
    lost = [np.mean([word not in kept for word in words]) for words in tokens.values()]
    assert lines[0].startswith(f"words        of the config, threshold 20: {len(kept) + 1} words; ")
    assert re.findall(r"[\d.]+%", lines[0]) == [f"{share:.2%}" for share in lost]
    assert lines[1].startswith(f"{'':13}threshold 1: {len(counts)} words; 0.00% of train, ")
    lines = [line[13:] for line in dry_run_lines()]
    counts = np.array(sorted(counts.values(), reverse=True))
    first = [line.startswith("of the config: ") for line in lines].index(True)
    assert lines[first + 1 :] == cheapest(counts, (2, 3), Workload(features=32))


def cheapest(counts, bands, load):
    """The lines of a dry run for the cheapest cutoffs of each number of bands."""
    lines = []
    for n in bands:
        cutoffs, flops = propose(counts, n, load)
        ends = itertools.pairwise((0, *cutoffs, len(counts)))
        shares = " ".join(f"{counts[a:b].sum() / counts.sum():.1%}" for a, b in ends)
        work = flops / cost(counts, (), load)
        lines.append(
            f"cheapest of {n} bands: {', '.join(map(str, cutoffs))}; tokens {shares};"
            f" {work:.1%} of the full softmax's work"
        )
    return lines


@pytest.mark.parametrize(
    "layers",
    [
        {"input.cutoffs": (), "output.table.name": "own"}
        | {"body.name": "lstm", "body.features": 8, "body.widths": (32,)},
        {"input.name": "groc", "input.width": 8, "output.table.name": "tied"},
    ],
    ids=["lstm", "groc"],
)
def test_widths_are_those_of_the_softmax(layers, with_layers, text, tmp_path, capsys, own_cache):
    """The `features` of an LSTM are those of its input, and GroC's `width` is that of a letter."""
    tokens = (text / "train.txt").read_text().replace("\n", " <eos> ").split()
    counts = np.array(sorted(collections.Counter(tokens).values(), reverse=True))
    small = with_layers(layers | {"data.path": str(text)})
    load(small["data"])
    dry_run(small, tmp_path / "run")
    lines = [line[13:] for line in capsys.readouterr().out.splitlines() if "cheapest of" in line]
    bands, factor = ((2, 3), 4) if "body.name" in layers else ((2, 3, 4, 5), 1)
    assert lines == cheapest(counts, bands, Workload(features=32, factor=factor))


def test_lines_that_a_dry_run_leaves_out(dry_run_lines, config, text, tmp_path):
    """Coverage of sub-words, which spell every word, and of a list of words; cutoffs where bands
    are clusters, those of the input where the output has one band, and more bands than the width of
    the first allows, which may be less than the body's.
    """
    lines = dry_run_lines(**{"input.width": 8, "input.cutoffs": (20,)})
    assert re.findall(r"cheapest of (\d) bands", "".join(lines)) == ["2"]
    whole = {"output.name": "softmax", "output.table.name": "own", "input.cutoffs": (20,)}
    assert "of the config: " not in "".join(dry_run_lines(**whole))
    assert dry_run_lines(**{"data.codes": 30}) == []
    words = {"data.words": str(tmp_path / "words.txt")}
    (tmp_path / "words.txt").write_text("the\n")
    [line] = dry_run_lines(**words, **{"input.cutoffs": (1,)})
    assert line == f"words        1 of data.words={tmp_path / 'words.txt'}"
    dry_run_lines()
    places = {"data.path": str(text)}
    small = config(**places)
    lines = coverage.describe(small, build(small, 122), by_frequency=False).splitlines()
    assert lines[0].startswith("words") and not any("cheapest" in line for line in lines)
