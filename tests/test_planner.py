"""The work of bands and where it is least, against brute force; what a cut vocabulary keeps; and the command, run for real."""

import itertools
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.outputs import banded
from adaptive_jax.outputs.adaptive import AdaptiveSoftmax
from adaptive_jax.outputs.tables import OwnTable
from adaptive_jax.plans import cutoffs as planner
from adaptive_jax.plans import report as vocabulary_report
from adaptive_jax.plans.cutoffs import Layer, cost, propose

PAPER = (20_000, 60_000)
COUNTS = {
    "steep": [512 // 2**i for i in range(9)],
    "zipf": [5040 / r for r in range(1, 13)],
    "flat": [3] * 8,
    "stairs": [90, 90, 31, 30, 30, 8, 8, 8, 8, 1, 1, 1, 0, 0],
    "one word": [1000, 1, 1, 1, 1, 1, 1, 1, 1, 1],
}


def slow_cost(counts, cutoffs, layer):
    """FLOP a token, from a list of matrix products, each forward once and backward twice."""
    products = []
    edges = [0, *cutoffs, len(counts)]
    for band in range(len(edges) - 1):
        inside = list(counts[edges[band] : edges[band + 1]])
        width = (layer.width if layer.width else layer.features) // layer.factor**band
        if band == 0:
            rows, columns = layer.tokens, len(inside) + len(cutoffs)
        else:
            rows, columns = layer.tokens * sum(inside) / sum(counts), len(inside)
        if rows < layer.floor:
            rows = layer.floor
        if band > 0 or width != layer.features:
            products.append((rows, layer.features, width))
        products.append((rows, width, columns))
    return sum(3 * 2 * a * b * c for a, b, c in products) / layer.tokens


def zipf(words):
    return 1 / np.arange(1, words + 1)


def test_a_cost_worked_out_by_hand():
    """10 tokens, 2 words and a cluster of width 8, then 2 of the tokens, 2 words of width 2 and a projection from 8."""
    head, tail = 10 * 8 * (2 + 1), 2 * (2 + 8)
    layer = Layer(features=8, factor=4, tokens=10, floor=0)
    assert cost([6, 2, 1, 1], (2,), layer) == pytest.approx(6 * (head + 2 * tail) / 10)
    assert cost([6, 2, 1, 1], (2,), layer._replace(floor=5)) == pytest.approx(6 * (head + 5 * tail) / 10)
    assert cost([6, 2, 1, 1], (2,), layer._replace(floor=20)) == pytest.approx(6 * 2 * (head + 10 * tail) / 10)
    assert cost([6, 2, 1, 1], (), layer) == pytest.approx(6 * 8 * 4)
    assert cost([6, 2, 1, 1], (), layer._replace(width=3)) == pytest.approx(6 * 3 * (4 + 8))


@pytest.mark.parametrize("floor", [0, 5, 40])
@pytest.mark.parametrize("bands", [1, 2, 3, 4])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_against_brute_force(counts, bands, floor):
    """No cutoffs at all cost less, and every one of them costs what the slow count says."""
    for factor, width, smallest in (1, 0, 1), (2, 0, 1), (2, 12, 1), (2, 0, 2):
        layer = Layer(features=16, factor=factor, width=width, tokens=32, floor=floor)
        every = {}
        for cutoffs in itertools.combinations(range(1, len(counts)), bands - 1):
            every[cutoffs] = slow_cost(counts, cutoffs, layer)
            assert cost(counts, cutoffs, layer) == pytest.approx(every[cutoffs], rel=1e-12)
        edges = {cutoffs: np.diff([0, *cutoffs, len(counts)]) for cutoffs in every}
        least = min(flops for cutoffs, flops in every.items() if edges[cutoffs].min() >= smallest)
        found, flops = propose(counts, bands, layer, smallest)
        assert flops == pytest.approx(least, rel=1e-12)
        assert every[found] == pytest.approx(least, rel=1e-12)
        assert edges[found].min() >= smallest


def test_the_small_cases_differ():
    """Brute force would prove little if the same cutoffs were best whatever the floor, the counts and the factor."""
    found = {(name, floor, factor): propose(counts, 3, Layer(features=16, factor=factor, tokens=32, floor=floor))[0]
             for name, counts in COUNTS.items() for floor in (0, 5, 40) for factor in (1, 2)}
    assert len({found["zipf", floor, 1] for floor in (0, 5, 40)}) == 3
    assert len({found[name, 0, 1] for name in COUNTS}) == len(COUNTS)
    assert found["zipf", 0, 1] != found["zipf", 0, 2]


@pytest.mark.parametrize("factor", [1, 2])
def test_a_grid_is_nearly_as_good_as_every_position(monkeypatch, factor):
    """A vocabulary too long for every position: at most 1% dearer than the best there is, and never dearer than `also`."""
    counts, layer = zipf(2_000), Layer(features=64, factor=factor, tokens=512)
    sparse = [propose(counts, bands, layer)[1] for bands in (2, 3, 4)]
    monkeypatch.setattr(planner, "ALL_POSITIONS", 2_000)
    best, exact = zip(*(propose(counts, bands, layer) for bands in (2, 3, 4)), strict=True)
    assert all(least <= near <= 1.01 * least for least, near in zip(exact, sparse, strict=True))
    assert sparse[0] > exact[0]  # else the grid was not used
    monkeypatch.undo()
    assert propose(counts, 2, layer, also=best[0])[1] == exact[0]


def test_candidates_named_are_used():
    """Where only the cutoffs given in `also` meet `smallest`, they are found."""
    smallest = 1_999
    found, _ = propose(zipf(3 * smallest + 1), 3, Layer(), smallest, also=(smallest, 2 * smallest + 1))
    assert found in ((smallest, 2 * smallest), (smallest, 2 * smallest + 1))
    monotone = propose(zipf(3 * smallest), 3, Layer(), smallest)[0]
    assert monotone == (smallest, 2 * smallest)


def test_wikitext103():
    """267,735 words: cheaper than the paper's bands, which are a tenth of a full softmax or less; at the paper's head, its very
    bands are within 1% of the best, and with the smallest that it found as good, bands near its own."""
    counts, layer = zipf(267_735), Layer()
    paper, full = cost(counts, PAPER, layer), cost(counts, (), layer)
    assert full == pytest.approx(6 * 267_735 * 1024)
    assert 0.05 < paper / full < 0.1
    costs = [propose(counts, bands, layer, also=PAPER)[1] for bands in (1, 2, 3, 4, 5)]
    assert costs[0] == full
    assert costs == sorted(costs, reverse=True)
    assert costs[2] < paper / 2
    best, flops = propose(counts, 3, layer, smallest=20_000)
    assert best[0] == 20_000
    assert 0.99 * paper < flops < 1.01 * paper
    assert planner.smallest_band(267_735) == 10_000
    best, flops = propose(counts, 3, layer, smallest=10_000)
    assert best[0] == 10_000
    assert flops < cost(counts, (10_000, 70_000), layer) < 0.65 * paper


def test_what_makes_work_dearer():
    """A higher floor, wider states and a smaller factor; flat counts, which send more tokens to the tails."""
    counts, layer = zipf(400), Layer(features=64, tokens=256, floor=32)
    here = propose(counts, 3, layer)[1]
    for dearer in {"floor": 128}, {"features": 128}, {"factor": 2}, {"tokens": 64}:
        assert propose(counts, 3, layer._replace(**dearer))[1] > here
    assert propose(np.ones(400), 3, layer)[1] > here
    assert cost(7 * counts, (40, 90), layer) == pytest.approx(cost(counts, (40, 90), layer))
    # With rows that cost what they are, the batch does not matter.
    assert cost(counts, (40, 90), Layer(64, tokens=9, floor=0)) == pytest.approx(cost(counts, (40, 90), Layer(64, floor=0)))


@pytest.mark.parametrize("cutoffs, features, width", [((), 16, 0), ((), 16, 8), ((10, 30), 16, 0), ((10, 30), 24, 16)])
def test_parameters_are_those_of_the_layer(cutoffs, features, width):
    """Counted from shapes of the softmax itself."""
    softmax = AdaptiveSoftmax(OwnTable(50, features, cutoffs, factor=4, width=width))
    shapes = jax.eval_shape(lambda: softmax.init(
        jax.random.key(0), jnp.ones((2, features)), jnp.zeros(2, jnp.int32), method="nll"))
    real = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert planner.parameters(50, cutoffs, Layer(features, factor=4, width=width)) == real


def test_shares():
    """Of tokens, not of words; they add up to one."""
    assert planner.band_shares([6, 2, 1, 1], (1, 2)) == pytest.approx([0.6, 0.2, 0.2])
    assert planner.band_shares([6, 2, 1, 1], ()) == [1.0]


def test_the_floor_is_the_chunk_of_a_tail():
    """The planner may not import it, so it has a copy."""
    assert planner.FLOOR == banded.TAIL_CHUNK == Layer().floor


@pytest.mark.parametrize("corpus, words, cutoffs", [
    ("wikitext103", 267_735, PAPER), ("billion_word", 793_471, (60_000, 160_000)), ("text_files", 267_735, PAPER),
    ("wikitext103", 60_000, (4_482, 13_446)), ("penn_treebank", 10_000, (747, 2_241)), ("text_files", 7, (1, 2)),
    ("text_files", 6, None)])
def test_the_papers_cutoffs(corpus, words, cutoffs):
    """Those of Section 4.2 where they fit, else in proportion, else none."""
    assert planner.paper_cutoffs(corpus, words) == cutoffs


@pytest.mark.parametrize("call, says", [
    (lambda: propose([3, 2, 1], 4, Layer()), ["bands=4", "3 words", "3 or fewer"]),
    (lambda: propose([3, 2, 1], 2, Layer(), smallest=2), ["smallest=2", "3 there are", "smallest=1"]),
    (lambda: propose([3, 2, 1], 0, Layer()), ["bands=0"]),
    (lambda: propose([3, 2, 1], 2, Layer(), smallest=0), ["smallest=0"]),
    (lambda: propose([3, 2, 1], 3, Layer(features=8)), ["3 bands of factor 4", "8"]),
    (lambda: propose([1, 2, 3], 2, Layer()), ["rise from 1 to 2 at id 1", "most first"]),
    (lambda: propose([], 1, Layer()), ["counts"]),
    (lambda: cost([0, 0], (1,), Layer()), ["not all 0"]),
    (lambda: cost([2, -1], (1,), Layer()), ["0 or more"]),
    (lambda: cost([2, float("nan")], (1,), Layer()), ["0 or more"]),
    (lambda: cost([3, 2, 1], (3,), Layer()), ["cutoff 3", "vocabulary size 3"]),
    (lambda: cost([3, 2, 1], (), Layer(tokens=0)), ["tokens=0"]),
    (lambda: cost([3, 2, 1], (), Layer(floor=-1)), ["floor=-1"]),
    (lambda: planner.band_shares([3, 2, 1], (2, 1)), ["increase"])])
def test_what_cannot_be_planned(call, says):
    """One line with the value and the cure."""
    with pytest.raises(InputError) as error:
        call()
    assert "\n" not in str(error.value)
    assert all(part in str(error.value) for part in says), error.value


TRAIN = ["a a a a b b b c c d", "a b c e", "f"]
OTHER = ["a z d", "b <unk> f f", "zz"]


@pytest.mark.parametrize("threshold, limit", [(1, 0), (2, 0), (3, 0), (99, 0), (1, 3), (1, 5), (1, 7), (1, 8), (2, 4)])
@pytest.mark.parametrize("lines", [TRAIN, [*TRAIN, "a <unk> <unk>"]], ids=["open", "with <unk>"])
def test_a_cut_is_what_the_vocabulary_would_be(tmp_path, lines, threshold, limit):
    """Size, coverage and lost tokens as counted word by word on the vocabulary that is really built."""
    text = {"train": lines, "valid": OTHER}
    for name, content in text.items():
        (tmp_path / f"{name}.txt").write_text("\n".join(content) + "\n")
    whole, times = vocabulary_report.count("text_files", str(tmp_path), cache=str(tmp_path / "cache"))
    assert list(times) == ["validation"]  # there is no test split
    counts = {}
    for line in lines:
        for word in (*line.split(), "<eos>"):
            counts[word] = counts.get(word, 0) + 1
    built = Vocabulary.build(counts, threshold, limit)
    known = set(built.words) - {"<unk>"}

    def lost(content):
        words = [word for line in content for word in (*line.split(), "<eos>")]
        return sum(word not in known for word in words) / len(words)

    found = vocabulary_report.cut(whole, times, threshold, limit)
    assert found.size == len(built)
    assert found.coverage == pytest.approx(1 - lost(lines))
    assert found.lost == {"validation": pytest.approx(lost(OTHER))}
    assert lost(OTHER) >= 3 / 11


def columns(line):
    return re.split(r"  +", line.strip("* \n"))


def line_of(out, name):
    [line] = [line for line in out.splitlines() if line.strip("* ").startswith(name + "  ")]
    return line


def test_the_command(command, text, tmp_path):
    """Both tables for a corpus whose numbers are known, and the same from both of its names."""
    open_text = shutil.copytree(text, tmp_path / "text")
    (open_text / "test.txt").write_text("the zebra the\n")
    arguments = ["text_files", f"--path={open_text}", f"--cache={tmp_path / 'cache'}", "--width=64", "--batch=256"]
    done = command("-m", "adaptive_jax.data.vocabulary_report", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert columns(line_of(done.stdout, "threshold 1")) == ["threshold 1", "122", "100.00%", "0.00%", "25.00%"]
    assert line_of(done.stdout, "threshold 1").startswith("* ")
    assert "no <unk>" in done.stdout
    size, kept = columns(line_of(done.stdout, "threshold 20"))[1:3]
    assert 2 < int(size) < 122 and 50 < float(kept.rstrip("%")) < 100

    vocabulary, _ = vocabulary_report.count("text_files", str(open_text), cache=str(tmp_path / "cache"))
    counts, layer = vocabulary.counts[:-1], Layer(features=64, tokens=256)
    assert vocabulary.words[-1] == "<unk>"
    cutoffs = {"full softmax": (), "as paper's": (9, 27)}
    cutoffs |= {f"{bands} bands": propose(counts, bands, layer, smallest=5)[0] for bands in (2, 3, 4)}
    flops = {name: cost(counts, cuts, layer) for name, cuts in cutoffs.items()}
    for name, cuts in cutoffs.items():
        line = columns(line_of(done.stdout, name))
        assert line[1] == (" ".join(map(str, cuts)) or "-")
        against = flops["full softmax"], flops["as paper's"]
        assert line[3:6] == [f"{flops[name] / 1e6:.2f}", *(f"{flops[name] / other:.1%}" for other in against)]
    assert "5 bands" not in done.stdout  # of width 64, no width is left for them
    best = min(flops, key=flops.get)
    assert [name for name in flops if line_of(done.stdout, name).startswith("* ")] == [best]
    assert "--smallest=5 words" in done.stdout  # 3.7% of 122

    again = command("-m", "adaptive_jax.data.vocabulary", *arguments)
    assert (again.returncode, again.stdout, again.stderr) == (0, done.stdout, "")


def test_the_command_with_a_cut(command, text, tmp_path):
    """--threshold and --limit cut the vocabulary that is planned, --bands and --smallest the plan."""
    done = command("-m", "adaptive_jax.data.vocabulary_report", "text_files", f"--path={text}", f"--cache={tmp_path}",
                   "--threshold=2", "--limit=40", "--bands=2", "--smallest=15")
    assert (done.returncode, done.stderr) == (0, "")
    assert columns(line_of(done.stdout, "threshold 2 limit 40"))[1] == "40"
    assert "softmax of 40 words" in done.stdout
    assert "3 bands" not in done.stdout
    assert 15 <= int(columns(line_of(done.stdout, "2 bands"))[1]) <= 25


def test_the_command_splits_words_as_training_does(command, text, tmp_path):
    """--tokeniser and --lower change the words that are counted."""
    for split, line in ("train", "The hat, the cat."), ("valid", "the cat, The"):
        (tmp_path / f"{split}.txt").write_text(f"{line}\n")
    sizes = {"": "5", "--lower": "4", "--tokeniser=moses": "7", "--tokeniser=moses --lower": "6"}
    for flags, size in sizes.items():
        done = command("-m", "adaptive_jax.data.vocabulary", "text_files", f"--path={tmp_path}", f"--cache={tmp_path}/cache",
                       *flags.split())
        assert (done.returncode, done.stderr) == (0, "")
        assert columns(line_of(done.stdout, "threshold 1"))[1] == size


@pytest.mark.parametrize("arguments, says", [
    (["text_fils"], ["'text_fils'", 'Did you mean "text_files"']),
    ([], ["CORPUS is missing"]),
    (["text_files", "--path={text}", "--bands=200", "--factor=1"], ["bands=200", "122 words"]),
    (["text_files", "--path={text}", "--bands=3", "--smallest=50"], ["smallest=50", "122", "smallest=40"]),
    (["text_files", "--path={text}", "--tokeniser=mose"], ["mose", "moses"]),
    (["text_files", "--path={text}", "--bands=3", "--width=8"], ["3 bands of factor 4", "width of 8"]),
    (["text_files", "--path={text}", "--threshold=0"], ["threshold=0"])])
def test_the_command_with_bad_input(command, text, tmp_path, arguments, says):
    """One clear line and status 2."""
    given = [argument.format(text=text) for argument in arguments]
    done = command("-m", "adaptive_jax.data.vocabulary_report", *given, f"--cache={tmp_path}")
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"error: .+\n", done.stderr), done.stderr
    assert all(part in done.stderr for part in says), done.stderr


def test_help(command):
    """--help of the short name shows the command's flags and words."""
    done = command("-m", "adaptive_jax.data.vocabulary", "--help")
    assert "Traceback" not in done.stdout + done.stderr
    assert "python -m adaptive_jax.data.vocabulary penn_treebank" in done.stdout
    assert all(f"  --{name}:" in done.stdout for name in ("path", "threshold", "limit", "width", "bands", "batch", "floor"))
