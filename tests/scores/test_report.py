"""The report: its numbers, its files, and the page as a browser shows it."""

import csv
import dataclasses
import html
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers

from adaptive_jax.data.batches.windows import Windows
from adaptive_jax.data.corpora.load import load
from adaptive_jax.data.vocabulary.subwords import Subwords
from adaptive_jax.data.vocabulary.token_ids import TokenIds
from adaptive_jax.data.vocabulary.tokenizer import Tokenizer
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.runs.settings import read_config, read_words
from adaptive_jax.runs.start import write_published
from adaptive_jax.scores import distributions
from adaptive_jax.scores.evaluate import Request, evaluate
from adaptive_jax.scores.frequency import Bin, Words
from adaptive_jax.scores.report import charts, page, passage
from adaptive_jax.scores.report.drawing import VARIABLES, draw, line_style
from adaptive_jax.scores.report.page import sample
from adaptive_jax.scores.report.passage import Token, spelled
from adaptive_jax.scores.report.report import ReportOptions, _title, names_of, report
from adaptive_jax.scores.report.runs import RunReport, difference, read_runs
from tests import chromium, refuses
from tests.toys import misplaced_labels

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install matplotlib")

NAME = "<b>small</b> & $x$"


@pytest.fixture(scope="module")
def made(trained, tmp_path_factory):
    """A report of the small run and of its first checkpoint, with a context besides, and the
    copies of the run that it is of.
    """
    directory = tmp_path_factory.mktemp("report")
    for name in "one", "two":
        shutil.copytree(trained, directory / name, ignore=shutil.ignore_patterns("eval"))
    shutil.rmtree(directory / "two" / "checkpoints" / "240")
    write_published(
        directory / "two",
        read_config(directory / "two"),
        {"row": "adp_t", "table": "Table 3", "validation": 19.79, "test": 20.51},
        ("steps", "body.layers"),
    )
    evaluate(directory / "one", Request(context=8))
    for name in "one", "two":
        evaluate(directory / name, Request(sample_from=20, sample_words=30))
    job = ReportOptions(str(directory / "page.html"), (NAME, "_two"), (10, 100), 20, 30)
    # A figure of one's own is a function, named in FIGURES.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "FIGURES", [*charts.FIGURES, toy])
        runs, passages = report([directory / "one", directory / "two"], job)
    return directory, runs, passages[NAME]


def toy(scores):
    """Updates of each run."""
    lines = [charts.Line(run.name, [(1, run.result["step"])]) for run in scores.runs]
    columns, section = ("number", "updates"), charts.TRAINING
    return charts.Chart("toy", "Toy", "A note.", section, columns, lines, "number", "updates")


def lines_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_numbers(made):
    """The CSV files have what evaluate.py and the vocabulary say, and each word stands in the
    bin of its count.
    """
    directory, (one, two), _ = made
    files = directory / "page_files"
    lines = lines_of(files / "runs.csv")
    assert [each["run"] for each in lines] == [NAME, "_two"]
    for each, file in zip(lines, ("one/eval/test-16-0-240", "two/eval/test-16-0-200"), strict=True):
        result = json.loads((directory / f"{file}.json").read_text())
        assert float(each["perplexity"]) == pytest.approx(result["perplexity"], rel=1e-9)
        assert (int(each["words"]), int(each["updates"])) == (result["words"], result["step"])
    assert (one.result["step"], two.result["step"]) == (240, 200)
    columns = "published_validation_perplexity", "published_perplexity"
    numbers = [[each[column] for column in columns] for each in lines]
    assert numbers == [["", ""], ["19.79", "20.51"]]
    text = (directory / "page.html").read_text()
    assert "<td>19.79</td><td>20.51</td>" in text
    assert "<p>_two differs from the paper&#x27;s row in steps, body.layers.</p>" in text
    assert [each["changed_keys"] for each in lines] == ["", "steps, body.layers"]
    assert ">0.0M<" not in text and "<td>0.00</td>" not in text  # of a small and short run
    vocabulary = read_words(directory / "one")
    counts = vocabulary.counts[load(one.config["data"]).ids["test"]]
    before = np.concatenate([[vocabulary.counts[vocabulary.eos]], counts[:-1]])
    nll = one.nll.astype(float), two.nll.astype(float)
    for chart, values, frequency in (
        ("by_word", nll[1], counts),
        ("by_previous", nll[1], before),
        ("difference", nll[1] - nll[0], counts),
    ):
        inside = [frequency <= 10, (frequency > 10) & (frequency <= 100), frequency > 100]
        inside = [each for each in inside if each.any()]
        for statistic, twin in ("mean", np.mean), ("median", np.median):
            rows = lines_of(files / f"{statistic}_{chart}.csv")
            rows = [each for each in rows if each["run"] == "_two"]
            assert [int(each["words"]) for each in rows] == [each.sum() for each in inside]
            found = [float(each[statistic]) for each in rows]
            np.testing.assert_allclose(found, [twin(values[each]) for each in inside], rtol=1e-6)
    contexts = lines_of(files / "contexts.csv")
    shown = [(each["run"], each["window"], each["context"]) for each in contexts]
    assert shown == [(NAME, "16", "0"), (NAME, "16", "8")]
    logged = map(json.loads, (directory / "one" / "metrics.jsonl").read_text().splitlines())
    expected = [(e["step"], e["validation/nll"]) for e in logged if "validation/nll" in e]
    curves = [
        (int(each["updates"]), float(each["nll"]))
        for each in lines_of(files / "curves.csv")
        if (each["run"], each["split"]) == (NAME, "validation")
    ]
    assert curves == expected
    assert [each["updates"] for each in lines_of(files / "toy.csv")] == ["240", "200"]


def test_files(made):
    """Each figure of the page is there as a PNG, and the page holds all it shows: one file, no
    script, nothing from elsewhere.
    """
    directory, *_ = made
    text = (directory / "page.html").read_text()
    names = {path.stem for path in (directory / "page_files").glob("*.png")}
    assert names == {
        "perplexity_by_word",
        "mean_by_word",
        "mean_by_previous",
        "median_by_word",
        "median_by_previous",
        "mean_difference",
        "median_difference",
        "curves",
        "contexts",
        "toy",
    }
    assert all(
        (directory / "page_files" / f"{name}.png").read_bytes()[:4] == b"\x89PNG" for name in names
    )
    for name in names:
        assert (directory / "page_files" / f"{name}.pdf").read_bytes()[:5] == b"%PDF-"
    assert text.count("<svg") == len(names)
    assert text.count("> _two</text>") >= len(names) - 1  # a legend leaves out "_two"
    assert NAME not in text and html.escape(NAME) in text
    assert not re.search(r"<script|<link (?!rel=\"icon\" href=\"data:,\")|<img|@import|src=", text)
    assert not re.search(r"url\((?!#)", text)
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert {f"#{each}" for each in ids} >= set(re.findall(r'href="(#[^"]+)"', text)) | set(
        re.findall(r"url\((#[^)]+)\)", text)
    )
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        assert not any(colour in svg for colour in VARIABLES)  # all by the style sheet


def test_labels_of_figures_do_not_overlap(tmp_path, monkeypatch):
    """Seven bins, whose ticks say "1-10", and runs of long names."""
    figure_class, figures = pytest.importorskip("matplotlib.figure").Figure, []
    save = figure_class.savefig
    monkeypatch.setattr(
        figure_class,
        "savefig",
        lambda self, *a, **k: (figures.append(self), save(self, *a, **k))[1],
    )
    random, counts = np.random.default_rng(0), np.repeat([0, *5 * 10 ** np.arange(7)], 175)
    words = Words(*[np.arange(1_400)] * 3, 9, counts)
    names = "adaptive_input_tied", "character_cnn_adaptive", "lookup_and_softmax"
    curve = [(100 * step, 7 - 0.01 * step) for step in range(99)]
    runs = [
        SimpleNamespace(
            name=name,
            words=words,
            nll=random.gamma(5.0, size=1_400),
            contexts=[(0, 30.0, 64), (512, 28.0, 64)],
            curve=lambda split: curve,
        )
        for name in names
    ]
    scores = charts.FigureData(runs, (10, 100, 1_000, 10_000, 100_000, 1_000_000), "word")
    drawn = charts.charts_of(scores)
    assert [*drawn[0].ticks][:4] == ["new", "1-10", "11-100", "101-1K"] and len(drawn) == 9
    for chart in drawn:
        draw(chart, dict(zip(names, range(3), strict=True)), tmp_path / "a.png")
        assert not misplaced_labels(figures[-1]), chart.name


def test_tables_for_a_paper():
    """In Markdown and LaTeX, rounded, with the signs of both escaped."""
    lines = [
        dict.fromkeys(page.COLUMNS) | {"run": "a|b_1", "perplexity": 12.3456, "unknown": 0.05},
        dict.fromkeys(page.COLUMNS) | {"run": "c", "perplexity": 3.4e250},
    ]
    table = page.table_of_runs(lines, "test", "word")
    assert page.markdown(table).splitlines() == [
        "| Run | Test | <unk> |",
        "| --- | ---: | ---: |",
        r"| a\|b_1 | 12.35 | 5.0% |",
        "| c | 3.4e+250 |  |",
    ]
    assert page.latex(table).splitlines()[2:6] == [
        r"Run & Test & \textless{}unk\textgreater{} \\",
        r"\midrule",
        r"a|b\_1 & \textbf{12.35} & 5.0\% \\",
        r"c & 3.4e+250 &  \\",
    ]


def test_the_passage(made):
    """Its surprisal, rank and alternatives are those of the model's distributions."""
    directory, (one, _), tokens = made
    ids, nll = one.words.ids[20:50], one.nll[20:50]
    words = read_words(directory / "one").words
    assert [token.text for token in tokens] == [words[i] for i in ids]
    np.testing.assert_allclose([token.bits for token in tokens], nll / math.log(2), rtol=1e-6)
    for token in tokens:
        likely, bits = dict(token.expected), token.bits
        assert list(likely.values()) == sorted(likely.values(), reverse=True) and len(likely) == 8
        if token.rank <= 8:
            assert likely[token.text] == pytest.approx(2**-bits, rel=1e-4)
            assert list(likely.values())[token.rank - 1] == likely[token.text]
        else:
            assert token.text not in likely and 2**-bits <= min(likely.values())
    assert {token.rank for token in tokens} != {1}
    assert len(lines_of(directory / "page_files" / "sample.csv")) == 60


def test_a_passage_without_distributions(made, monkeypatch):
    """It is coloured all the same; a token of no example, such as the empty line with which a text
    of documents begins, is shown and not scored.
    """
    _, (one, _), tokens = made
    before, *others = passage.read_passage(one, 19, 31)
    assert others == tokens and before.rank is None and before.bits > 0
    assert "rank" not in sample([before]) and "in training." in sample([before])
    # Of a converted list of words each was said to stand in training once.
    of_list = Vocabulary(read_words(one.workdir).words, np.ones(122, np.int64))
    monkeypatch.setattr(passage, "read_words", lambda workdir: of_list)
    assert "in training" not in sample(passage.read_passage(one, 19, 1))
    # Of ids none of which ends a line the most frequent one did.
    of_ids = TokenIds.of_counts(np.ones(122, np.int64))
    monkeypatch.setattr(passage, "read_words", lambda workdir: of_ids)
    assert not any(token.line_end for token in passage.read_passage(one, 19, 31))
    one = dataclasses.replace(one)
    vars(one)["nll"] = np.full(426, np.nan)
    assert math.isnan(passage.read_passage(one, 20, 1)[0].bits)
    none = SimpleNamespace(positions=np.zeros(0, int), hidden=np.zeros((0, 8), "f"))
    monkeypatch.setattr(distributions, "scores", lambda *_, **__: [none])
    windows = Windows(16, 0, "none", "packed", 1)
    assert distributions.passage_stats(None, np.arange(9), windows, ({}, None), 0, 1).keys() == {
        "at"
    }


def test_results_that_a_report_reads(made, tmp_path):
    """Of a run the newest of the model alone, of a text that all runs have; or the one that is
    named. What has no words beside it is evaluated first, by a command that is told.
    """
    workdirs = [shutil.copytree(made[0] / name, tmp_path / name) for name in ("one", "two")]
    one, two = workdirs
    chosen = lambda *places: [run.path.stem for run in read_runs(places, [*map(str, places)])]
    assert chosen(one, two) == ["test-16-0-240", "test-16-0-200"]
    assert chosen(one / "eval" / "test-16-8-240.json", two) == ["test-16-8-240", "test-16-0-200"]
    evaluate(one, Request(window=10))
    evaluate(one, Request(method="cache"))
    with refuses("--sample_words", "--method=cache"):
        evaluate(one, Request(method="cache", sample_words=3))
    infinite = one / "eval" / "test-16-8-240.json"  # JSON has no number for it
    infinite.write_text(json.dumps(json.loads(infinite.read_text()) | {"perplexity": None}))
    [run] = read_runs([infinite], ["one"])
    assert [context for context, *_ in run.contexts] == [0]
    evaluate(one, Request("validation"))
    assert chosen(one) == ["validation-16-0-240"]
    assert chosen(one, two) == ["test-10-0-240", "test-16-0-200"]
    shutil.rmtree(one / "checkpoints")  # no model is opened
    [cached] = one.glob("eval/*cache*.json")
    [run], _ = report([cached], ReportOptions(f"{tmp_path}/a.html"))
    assert run.result["settings"]["method"] == "cache" and run.about()["hours"] is None
    validation = one / "eval" / "validation-16-0-240.json"
    with refuses("409", "426"):
        chosen(validation, two)
    again = f"run evaluate again: python evaluate.py --workdir={one} --split=validation --window=16"
    for content in b"no arrays", None:
        arrays = validation.with_suffix(".npz")
        arrays.write_bytes(content) if content else arrays.unlink()
        with refuses(".npz", again):
            chosen(validation, two)
    losses = validation.with_suffix(".npy")
    content = bytearray(losses.read_bytes())
    content[len(content) // 2] ^= 1
    losses.write_bytes(content)
    with pytest.raises(InputError, match=f"lacks its .npy, or it is damaged: {again}$"):
        _ = RunReport("one", validation, json.loads(validation.read_text())).nll
    shutil.rmtree(two / "eval")
    (two / "eval").mkdir()
    older = json.loads((made[0] / "two" / "eval" / "test-16-0-200.json").read_text())
    first = f"run evaluate first: python evaluate.py --workdir={two} --split=test"
    del older["date"]  # as versions before wrote it
    (two / "eval" / "test-16-0-200.json").write_text(json.dumps({"bands": []} | older))
    with refuses(first):
        chosen(one, two)


def test_words_that_training_never_saw(made, tmp_path):
    """A result over them is reported where it is named: they have a bin and their spelling."""
    workdir = shutil.copytree(made[0] / "one", tmp_path / "run")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "test.txt").write_text("the brand new t0w0\n" * 9)
    request = Request(data_path=str(tmp_path / "text"), vocabulary="union")
    result = evaluate(workdir, request)
    assert result["bins"][0] | {"least": 0, "most": 0, "words": 18} == result["bins"][0]
    [path] = workdir.glob("eval/*plain*.json")
    _, passages = report([path], ReportOptions(f"{tmp_path}/a.html"))
    assert [token.text for token in passages["run"][:5]] == ["the", "brand", "new", "t0w0", "<eos>"]


CONTRASTS = """(() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const light = c => c.slice(0, 3).map(v => v / 255)
    .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const ground = e => { let [r, g, b, a = 1] = rgb(getComputedStyle(e).backgroundColor);
    if (a === 1 || e === document.documentElement) return [r, g, b];
    const under = e.parentElement ? ground(e.parentElement) : [255, 255, 255];
    return [r, g, b].map((v, i) => a * v + (1 - a) * under[i]); };
  const ratio = (a, b) => (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  const contrast = (e, colour) => ratio(light(rgb(colour)), light(ground(e)));
  const tags = 'h1, h2, p, td, th, figcaption, li, .token, summary, footer';
  const texts = [...document.querySelectorAll(tags)]
    .map(e => contrast(e, getComputedStyle(e).color));
  const drawn = [...document.querySelectorAll('svg text')]
    .map(e => contrast(document.body, getComputedStyle(e).fill));
  const lines = [...document.querySelectorAll('svg [id*=line2d] path')]
    .map(e => getComputedStyle(e))
    .map(s => s.stroke === 'none' ? s.color : s.stroke).filter(c => c.startsWith('rgb'))
    .map(c => contrast(document.body, c));
  return [Math.min(...texts), Math.min(...drawn), Math.max(...lines)];
})()"""
FIGURES = """[...document.querySelectorAll('figure')].map(f => {
  const box = f.querySelector('svg').getBoundingClientRect();
  const texts = [...f.querySelectorAll('svg text')];
  return [box.width, box.height, box.right, f.querySelectorAll('svg path').length, texts.length,
    Math.min(...texts.map(t => t.getBoundingClientRect().height))]; })"""
TEST_PERPLEXITY = """[...document.querySelectorAll('th')]
    .find(e => e.textContent === 'Test').getBoundingClientRect().right"""
MORE = """(e => {
  const b = e.getBoundingClientRect();
  return [b.width, b.left, b.right, e.textContent]; })(
  document.querySelector('.token:hover .more'))"""


@pytest.mark.skipif(not chromium.found(), reason="no Chromium: apt-get install chromium")
def test_the_page_in_a_browser(made, tmp_path):
    """Without a network: no errors, all figures drawn, nothing wider than the window, text of
    good contrast; words tell more.
    """
    directory, _, tokens = made
    with chromium.opened(tmp_path) as page:
        page.call(
            "Network.emulateNetworkConditions",
            offline=True,
            latency=0,
            downloadThroughput=0,
            uploadThroughput=0,
        )
        for width in 1280, 400:
            for dark in False, True:
                page.open(directory / "page.html", width, dark)
                assert page.run("document.documentElement.scrollWidth") <= width
                drawn = page.run(FIGURES)
                assert len(drawn) == 10
                for wide, high, right, paths, texts, size in drawn:
                    assert 340 <= wide <= 520 and wide / 2 < high < wide and right <= width
                    assert paths > 8 and texts > 5 and size >= 11  # pixels of a line of text
                text, in_figures, _ = page.run(CONTRASTS)
                assert text >= 4.5 and in_figures >= 7
                red, *_ = map(
                    int,
                    re.findall(r"\d+", page.run("getComputedStyle(document.body).backgroundColor")),
                )
                assert red < 60 if dark else red > 240
                assert page.run(TEST_PERPLEXITY) <= width  # without scrolling sideways
                page.point(".token:nth-of-type(12)")
                wide, left, right, more = page.run(MORE)
                assert wide > 300 and left >= 0 and right <= width
                assert " bits, probability " in more and tokens[11].expected[0][0] in html.unescape(
                    more
                )
        page.run("document.querySelectorAll('details').forEach(e => e.open = true)")
        assert page.run("document.documentElement.scrollWidth") <= 400
        assert page.messages == []
        assert set(page.requests) == {(directory / "page.html").resolve().as_uri()}
        page.picture(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 50_000


def test_a_bin_without_an_interval(tmp_path):
    """Has none in the CSV file either, where it had one of width 0, that of a number known."""
    bins = [Bin(1, 9, 5, 3.0, 2.5, (2.0, 4.0), (2.0, 3.0)), Bin(10, None, 1, 1.0, 1.0, None, None)]
    found = {figure: {"a": bins} for figure in charts.BINNED}
    scores = SimpleNamespace(bins=found, unit="word")
    chart = charts.by_bins("mean", "by_word", scores)
    assert [(row["low"], row["high"]) for row in chart.rows()] == [(2.0, 4.0), (None, None)]
    assert "<path" in draw(chart, {"a": 0}, tmp_path / "a.png")


def test_text_is_escaped():
    """Whatever the words are; control characters and directions of writing cannot reach what
    follows.
    """
    token = Token(
        "</span><script>alert(1)</script>",
        True,
        False,
        3.0,
        2,
        1.0,
        5,
        [('"><img src=x onerror=alert(1)>', 0.5)],
    )
    shown = sample([token, token._replace(bits=math.nan)])
    assert "<script" not in shown and "<img" not in shown
    assert html.escape(token.text) in shown and html.escape(token.expected[0][0]) in shown
    vocabulary = Vocabulary(("<eos>", "a\x00\x1bb"), np.array([2, 1]))
    assert spelled(vocabulary, 1) == ("a��b", False)


def test_special_tokens_of_a_passage():
    """They have no letters of the text; they were shown as nothing."""
    program = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    program.add_special_tokens(["<|user|>"])
    ids = TokenIds.of_counts(np.array([2, 1]))
    assert spelled(Tokenizer.of(ids, program.to_str().encode()), 1) == ("<|user|>", False)


def test_units_of_words():
    """Units show their letters and stand together with the rest of their word; bytes that are
    no letter are marked.
    """
    units = Subwords.build({"low": 5, "lower": 2, "newest": 6, "widest": 3, "<eos>": 4}, codes=10)
    found = [spelled(units, i) for i in units.encode("lowest é")]
    assert found == [
        ("low", True),
        ("est", False),
        ("�", True),
        ("�", True),
        ("▁", False),
        ("<eos>", False),
    ]


def test_names():
    """Runs are called by what tells their paths apart; names that are given must do so."""
    assert names_of(["/a/sm", "/a/adp/"], ()) == ["sm", "adp"]
    assert names_of(["/a/x/run", "/a/y/run"], ()) == ["/a/x/run", "/a/y/run"]
    assert names_of(["/a/run", "/b/run"], ("one", "two")) == ["one", "two"]
    for paths, given in (
        (["/a", "/a"], ()),
        (["/a", "/b"], ("one",)),
        (["/a", "/b"], ("one", "one")),
    ):
        with pytest.raises(InputError):
            names_of(paths, given)


def test_runs_look_different():
    """No two of the first eighty have the same colour and marker; thin lines, which have no
    markers, differ by their dashes.
    """
    looks = [line_style(number) for number in range(80)]
    assert len({(each["color"], each["marker"]) for each in looks}) == 80
    assert len({(each["color"], each["linestyle"]) for each in looks[:20]}) == 20


def test_one_text():
    """Word by word; `<unk>` stands for any."""

    def words(*hashes):
        return Words(None, None, np.array(hashes, np.uint32), 1)

    assert not difference(words(5, 0, 7), words(5, 6, 7)) and not difference(
        words(5, 0, 7), words(0, 6, 7)
    )
    assert difference(words(5, 0, 7), words(5, 6, 8)) == "which differ at word 3"
    assert difference(words(5, 0, 7), words(5)) == "of 3 and 1 words"


def test_logs_that_are_being_written(tmp_path):
    """A line that is cut off, one that is no metric and one without a number are passed over; a
    later line of an update counts.
    """
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 2, "train/nll": 5.0}\n{"step": 4, "train/nll": null}\n[1]\n{"step": 2,'
        ' "train/nll": 4.0, "validation/nll": 6.0, "train/words_per_second": 7}\n{"step": 6,'
        ' "train/n'
    )
    run = RunReport("a", tmp_path / "eval" / "a.json", {})
    assert (run.curve("train"), run.curve("validation")) == ([(2, 4.0)], [(2, 6.0)])
    assert RunReport("a", tmp_path / "b" / "eval" / "a.json", {}).log == []


def test_bad_input(made, tmp_path):
    """Texts and flags that do not fit end the report in one line, with their numbers."""
    directory, *_ = made
    one, output = directory / "one", tmp_path / "report.html"
    (tmp_path / "a.html").mkdir()
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "cut" / "eval").mkdir(parents=True)
    (tmp_path / "cut" / "eval" / "test.json").write_text('{"date')  # was a traceback
    for workdirs, changes, says in (
        ([tmp_path / "cut"], {}, "test.json is damaged (Unterminated string"),
        ([tmp_path / "none"], {}, "none has no result for a report: run evaluate first"),
        ([tmp_path / "a.json"], {}, "a.json must be a result that evaluate.py wrote"),
        ([one, one], {}, "must be one name for each of 2 runs, all different"),
        ([one], {"output": "report.png"}, "must be the name of a page"),
        ([one], {"output": ""}, "must be the name of a page, such as report.html"),
        ([one], {"output": f"{tmp_path}/a.html"}, "a.html"),
        ([one], {"output": "/dev/null/report.html"}, "/dev/null/report_files"),
        ([one], {"bins": (100, 10)}, "bins=100,10 must be growing frequencies"),
        ([one], {"names": ("a", "b")}, "names=a,b must be one name for each of 1 runs"),
        ([one], {"sample_words": -1}, "--sample_words must be in [0, inf), got -1"),
        ([one], {"sample_from": 426}, "sample_from=426 must be less than the text's 426 words"),
    ):
        with refuses(says, error=(InputError, OSError)):
            report(workdirs, ReportOptions(str(output))._replace(**changes))


def test_the_command(made, quick_command, tmp_path):
    """Takes several runs, writes where it is told to and prints the page's name; one line says
    what is wrong.
    """
    done = quick_command("-m", "adaptive_jax", "report", "RUN", "--bins=10,ten")
    says = "error: --bins must be whole numbers, such as 10 or 10,100, got 10,ten\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", says)
    directory, *_ = made
    output = tmp_path / "deep" / "page.html"
    runs = directory / "one", directory / "two"
    done = quick_command(
        "-m", "adaptive_jax", "report", *runs, f"--output={output}", "--sample_words=0"
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"{output}\n")
    assert (
        "<title>one, two</title>" in output.read_text()
        and 'class="token"' not in output.read_text()
    )
    files = {path.stem for path in (tmp_path / "deep" / "page_files").glob("*.csv")}
    assert files == {"runs", "curves", "contexts", "perplexity_by_word"} | {
        f"{statistic}_{figure}"
        for statistic in ("mean", "median")
        for figure in ("by_word", "by_previous", "difference")
    }


@pytest.mark.parametrize(
    "place, corpus",
    [
        ("prepared/news", "news"),
        ("cache/split/1f3a", "text of one file"),
        ("", "text_files"),
    ],
)
def test_the_line_below_the_title(place, corpus):
    """Names the text, wherever it is."""
    config = {"data": {"corpus": "text_files", "path": place}}
    settings = {"config": config, "data_path": None}
    result = {"words": 7, "split": "test", "settings": settings, "vocabulary": {"unit": "word"}}
    run = RunReport("a", Path(), result)
    assert _title([run]) == ("a", f"{corpus}, test split, 7 words")
