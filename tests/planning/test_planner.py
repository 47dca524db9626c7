"""The work of bands and its minimum, against brute force; what a vocabulary keeps of a text;
and the report of both.
"""

import itertools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.losses import plans
from adaptive_jax.outputs.softmax import Softmax
from adaptive_jax.outputs.tables import OwnTable
from adaptive_jax.planning import cutoffs as planner
from adaptive_jax.planning import report
from adaptive_jax.planning.cutoffs import Workload, cost, propose

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
        found = cost([6, 2, 1, 1], cutoffs, workload._replace(**changes))
        assert found == pytest.approx(expected)


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
        found, flops = propose(counts, bands, workload, smallest)
        assert flops == pytest.approx(least, rel=1e-12)
        assert every[found] == pytest.approx(least, rel=1e-12)
        assert sizes[found] >= smallest
        proposals.add(found)
    assert bands == 1 or least_rows > 32 or len(proposals) > 3  # else one answer would do for all


@pytest.mark.parametrize("factor", [1, 2])
def test_a_grid_is_nearly_as_good_as_every_position(monkeypatch, factor):
    """A vocabulary too long for every position: at most 1% above the minimum, and never above
    the cost of `also`.
    """
    counts, workload = zipf(2_000), Workload(features=64, factor=factor, tokens=512)
    sparse = [propose(counts, bands, workload)[1] for bands in (2, 3, 4)]
    monkeypatch.setattr(planner, "ALL_POSITIONS", 2_000)
    best, exact = zip(*(propose(counts, bands, workload) for bands in (2, 3, 4)), strict=True)
    assert all(least <= near <= 1.01 * least for least, near in zip(exact, sparse, strict=True))
    assert sparse[0] > exact[0]  # else the grid was not used
    monkeypatch.undo()
    assert propose(counts, 2, workload, also=best[0])[1] == exact[0]
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
    costs = [propose(counts, bands, workload, also=PAPER)[1] for bands in (1, 2, 3, 4, 5)]
    assert costs[0] == full
    assert costs == sorted(costs, reverse=True)
    assert costs[2] < paper / 2
    best, flops = propose(counts, 3, workload, smallest=20_000)
    assert best[0] == 20_000
    assert 0.99 * paper < flops < 1.01 * paper
    assert planner.smallest_band(267_735) == 10_000
    best, flops = propose(counts, 3, workload, smallest=10_000)
    assert best[0] == 10_000
    assert flops < cost(counts, (10_000, 70_000), workload) < 0.65 * paper


@pytest.mark.parametrize(
    "cutoffs, features, width", [((), 16, 0), ((), 16, 8), ((10, 30), 16, 0), ((10, 30), 24, 16)]
)
def test_parameters_are_those_of_the_layer(cutoffs, features, width):
    """Counted from shapes of the softmax itself."""
    softmax = Softmax(OwnTable(50, features, cutoffs, factor=4, width=width))
    shapes = jax.eval_shape(
        lambda: softmax.init(
            jax.random.key(0), jnp.ones((2, features)), jnp.zeros(2, jnp.int32), method="nll"
        )
    )
    real = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert planner.parameters(50, cutoffs, Workload(features, factor=4, width=width)) == real


def test_the_least_rows_are_the_chunk_of_a_tail():
    """The planner does not import it, so it has a copy."""
    assert planner.LEAST_ROWS == plans.TAIL_CHUNK == Workload().least_rows


@pytest.mark.parametrize(
    "corpus, words, cutoffs",
    [
        ("wikitext103", 267_735, PAPER),
        ("billion_word", 793_471, (60_000, 160_000)),
        ("text_files", 267_735, PAPER),
        ("wikitext103", 60_000, (4_482, 13_446)),
        ("text_files", 7, (1, 2)),
        ("text_files", 6, None),
    ],
)
def test_the_papers_cutoffs(corpus, words, cutoffs):
    """Those of Section 4.2 where they fit, else in proportion, else none."""
    assert planner.paper_cutoffs(corpus, words) == cutoffs


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: propose([3, 2, 1], 4, Workload()), "bands=4 of smallest=1 .*3 words.*bands=3"),
        (lambda: propose([3, 2, 1], 2, Workload(), 2), "smallest=2 .*3 words .*bands=1"),
        (lambda: propose([3, 2, 1], 2, Workload(), 4), "smallest=4 .*3 words .*most smallest=3"),
        (lambda: propose([3, 2, 1], 0, Workload()), "bands=0"),
        (lambda: propose([3, 2, 1], 2, Workload(), smallest=0), "smallest=0"),
        (lambda: propose([3, 2, 1], 3, Workload(features=8)), "3 bands of factor 4.* 8"),
        (lambda: cost([3, 2, 1], (3,), Workload()), "cutoff 3 .*vocabulary size 3"),
        (lambda: cost([3, 2, 1], (), Workload(tokens=0)), "tokens=0"),
        (lambda: cost([3, 2, 1], (), Workload(least_rows=-1)), "least_rows=-1"),
        (lambda: cost([3, 2, 1], (2, 1), Workload()), "increase"),
        (lambda: cost([3, 1, 2], (), Workload()), "counts must not rise, got 1 and then 2 at id 2"),
        (lambda: cost([3, float("nan"), 1], (), Workload()), "counts must not rise, got 3 and"),
        (lambda: cost([0, 0], (), Workload()), "counts must be .* not all 0"),
        (lambda: cost([[3, 2]], (), Workload()), "counts must be one row"),
    ],
)
def test_what_cannot_be_planned(call, says):
    """One line with the value and the cure."""
    with pytest.raises(InputError, match=says) as error:
        call()
    assert "\n" not in str(error.value)


TRAIN = ["a a a a b b b c c d", "a b c e", "f"]
OTHER = ["a z d", "b <unk> f f", "zz"]


@pytest.mark.parametrize("lines", [TRAIN, [*TRAIN, "a <unk> <unk>"]], ids=["open", "with <unk>"])
def test_a_cut_is_what_the_vocabulary_would_be(tmp_path, lines):
    """Size, coverage and lost tokens as counted word by word on the vocabulary that is really
    built.
    """
    for name, content in ("train", lines), ("valid", OTHER):
        (tmp_path / f"{name}.txt").write_text("\n".join(content) + "\n")
    data = {"corpus": "text_files", "path": str(tmp_path)}
    splits, words = report.count(data)
    assert list(splits) == ["train", "validation"]  # there is no test split
    counts = {}
    for word in " <eos> ".join([*lines, ""]).split():
        counts[word] = counts.get(word, 0) + 1

    def lost(content, known):
        tokens = " <eos> ".join([*content, ""]).split()
        return sum(word not in known for word in tokens) / len(tokens)

    for threshold, limit in (1, 0), (2, 0), (3, 0), (99, 0), (1, 3), (1, 5), (1, 7), (1, 8), (2, 4):
        built = Vocabulary.build(counts, threshold, limit)
        known = set(built.words) - {"<unk>"}
        found = report.cut(splits, words, threshold, limit)
        assert found.size == len(built)
        assert found.unknown["train"] == pytest.approx(lost(lines, known))
        assert found.unknown["validation"] == pytest.approx(lost(OTHER, known))
        assert lost(OTHER, known) >= 3 / 11


@pytest.fixture
def reported(text, capsys):
    """`reported(bands=2)`: what the command prints about the small corpus with these flags, and
    the corpus's settings.
    """

    def reported(corpus="text_files", **flags):
        given = {"path": str(text), "tokeniser": "none", "lower": False}
        given |= {"threshold": 1, "limit": 0}
        given |= {"width": 64, "factor": 4, "bands": 0, "smallest": 0}
        report.print_report(corpus, types.SimpleNamespace(**given | flags))
        return capsys.readouterr().out

    return reported


def columns(line):
    return re.split(r"  +", line.strip("* \n"))


def line_of(out, name):
    [line] = [line for line in out.splitlines() if line.strip("* ").startswith(name + "  ")]
    return line


def test_the_report(reported, text):
    """Both tables for a corpus whose numbers are known."""
    out = reported()
    data = {"corpus": "text_files", "path": str(text)}
    splits, words = report.count(data)
    first = columns(line_of(out, "threshold 1"))
    assert first == ["threshold 1", "122", "0.00%", "0.00%", "0.00%"]
    assert line_of(out, "threshold 1").startswith("* ")
    size, unknown = report.cut(splits, words, 20)
    shares = [f"{share:.2%}" for share in unknown.values()]
    assert columns(line_of(out, "threshold 20"))[1:] == [str(size), *shares]

    counts, workload = words.counts[:-1], Workload(features=64)
    assert words.words[-1] == "<unk>"
    cutoffs = {"full softmax": (), "as paper's": (9, 27)}
    for bands in 2, 3, 4:
        cutoffs[f"{bands} bands"], _ = propose(counts, bands, workload, smallest=5)
    flops = {name: cost(counts, cuts, workload) for name, cuts in cutoffs.items()}
    for name, cuts in cutoffs.items():
        line = columns(line_of(out, name))
        ends = itertools.pairwise((0, *cuts, len(counts)))
        shares = [f"{counts[a:b].sum() / counts.sum():.1%}" for a, b in ends]
        assert line[1:3] == [" ".join(map(str, cuts)) or "-", " ".join(shares)]
        of_full = flops[name] / flops["full softmax"]
        assert line[3:5] == [f"{flops[name] / 1e6:.2f}", f"{of_full:.1%}"]
    assert "5 bands" not in out  # of width 64, no width is left for them
    least = min(flops, key=flops.get)
    assert [name for name in flops if line_of(out, name).startswith("* ")] == [least]
    assert "--smallest=5 words" in out  # 3.7% of 122


def test_the_report_of_a_smaller_vocabulary(reported):
    """--threshold and --limit make the vocabulary that is planned, --bands and --smallest the
    plan.
    """
    out = reported(threshold=2, limit=40, bands=2, smallest=15)
    assert columns(line_of(out, "threshold 2 limit 40"))[1] == "40"
    assert "softmax of 40 words" in out
    assert "3 bands" not in out
    assert 15 <= int(columns(line_of(out, "2 bands"))[1]) <= 25


def test_the_command(quick_command, text, tmp_path):
    """It prints the report, and says what the other splits cannot encode."""
    (tmp_path / "train.txt").write_text((text / "train.txt").read_text())
    (tmp_path / "test.txt").write_text("the zebra the\n")
    place = f"--path={tmp_path}"
    done = quick_command("-m", "adaptive_jax", "plan", "text_files", place, "--width=64")
    assert (done.returncode, done.stderr) == (0, "")
    assert columns(line_of(done.stdout, "threshold 1")) == ["threshold 1", "122", "0.00%", "25.00%"]
    assert "no <unk>" in done.stdout
