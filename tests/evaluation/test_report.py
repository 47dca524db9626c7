"""The report: its numbers, its files, and the page as a browser shows it."""

import csv
import html
import io
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import chromium
import numpy as np
import pytest

from adaptive_jax.data.vocabulary.subwords import Subwords
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.evaluation import evaluate as scored
from adaptive_jax.evaluation.evaluate import Request, evaluate
from adaptive_jax.evaluation.report import charts, passage, runs
from adaptive_jax.evaluation.report.drawing import VARIABLES, draw, look
from adaptive_jax.evaluation.report.frequency import Bin, Words
from adaptive_jax.evaluation.report.page import sample
from adaptive_jax.evaluation.report.passage import Token, spelled
from adaptive_jax.evaluation.report.report import Job, _title, names_of, report
from adaptive_jax.evaluation.report.runs import read_run
from adaptive_jax.evaluation.runs import Run
from adaptive_jax.evaluation.scoring import summary
from adaptive_jax.workdir.settings import read_config
from adaptive_jax.workdir.start import write_published

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
    job = Job(str(directory / "page.html"), (NAME, "_two"), (10, 100), 20, 30)
    # A figure of one's own is a function, named in FIGURES.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "FIGURES", [*charts.FIGURES, toy])
        runs, passages = report([directory / "one", directory / "two"], Request(), job)
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
    for each, workdir in zip(lines, ("one", "two"), strict=True):
        result = evaluate(directory / workdir, Request())
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
    counts = one.vocabulary.counts[one.ids]
    before = np.concatenate([[one.vocabulary.counts[one.vocabulary.eos]], counts[:-1]])
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


def test_the_passage(made):
    """Its surprisal, rank and alternatives are those of the model's distributions."""
    directory, (one, _), tokens = made
    ids, nll = one.ids[20:50], one.nll[20:50]
    assert [token.text for token in tokens] == [one.vocabulary.words[i] for i in ids]
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


def test_a_passage_that_no_example_holds(made, monkeypatch):
    """Such as the empty line with which a text of documents begins: shown, and not scored."""
    directory, (one, _), _ = made
    none = SimpleNamespace(at=np.zeros(0, int), hidden=np.zeros((0, 8), "f"))
    monkeypatch.setattr(passage, "scores", lambda *_: [none])
    [token] = passage.read_passage(one, Run.open(directory / "one"), 20, 1)
    assert token.text == one.vocabulary.words[one.ids[20]] and math.isnan(token.bits)


def test_scores_are_kept(made, monkeypatch):
    """A second report scores nothing again; other settings, other parameters of the same step and
    damaged files are scored anew.
    """
    directory, (one, _), _ = made

    def fail(workdir, request, run):
        raise InputError("scored anew")

    monkeypatch.setattr(runs, "evaluate", fail)
    read, opened = read_run(directory / "one", NAME, Request())
    np.testing.assert_array_equal(read.nll, one.nll)
    assert opened is None
    for request in Request(context=4), Request(split="validation"):
        with pytest.raises(InputError, match="scored anew"):
            read_run(directory / "one", NAME, request)
    seal = directory / "one" / "checkpoints" / "240" / "_CHECKPOINT_METADATA"
    scores = directory / "one" / "eval" / "test-16-0-240.npy"
    other = seal.read_bytes() + b" "
    np.save(short := io.BytesIO(), one.nll[1:])
    for path, broken in (seal, other), (scores, b"\x93NUMPY"), (scores, short.getvalue()):
        whole = path.read_bytes()
        path.write_bytes(broken)
        with pytest.raises(InputError, match="scored anew"):
            read_run(directory / "one", NAME, Request())
        path.write_bytes(whole)


def test_a_checkpoint_that_training_deletes(trained, tmp_path, monkeypatch):
    """While it is scored: its scores, hours and passage are reported all the same."""
    workdir = shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("eval"))

    def late(*given):
        shutil.rmtree(workdir / "checkpoints" / "240")
        return summary(*given)

    monkeypatch.setattr(scored, "summary", late)
    [run], passages = report([workdir], Request(), Job(f"{tmp_path}/a.html", sample_words=3))
    assert run.result["step"] == 240 and run.hours > 0 and len(passages["run"]) == 3


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
                assert len(drawn) == 9
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
    scores = SimpleNamespace(bins=found, unit="word", nats="nats")
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
    looks = [look(number) for number in range(80)]
    assert len({(each["color"], each["marker"]) for each in looks}) == 80
    assert len({(each["color"], each["linestyle"]) for each in looks[:20]}) == 20


def test_one_text():
    """Word by word; `<unk>` stands for any."""

    def run(*hashes):
        words = Words(None, None, 1, np.array(hashes, np.uint32))
        return runs.RunReport(f"{hashes}", Path("a"), *[None] * 4, words, *[None] * 4)

    runs.check_comparable([run(5, 0, 7), run(5, 6, 7), run(0, 6, 7)])
    for other, says in (run(5, 6, 8), "which differ at word 3:"), (run(5), "of 3 and 1 words:"):
        with pytest.raises(InputError, match=f"score different texts, {says} pass --data_path"):
            runs.check_comparable([run(5, 0, 7), other])


def test_logs_that_are_being_written(tmp_path):
    """A line that is cut off, one that is no metric and one without a number are passed over; a
    later line of an update counts.
    """
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 2, "train/nll": 5.0}\n{"step": 4, "train/nll": null}\n[1]\n{"step": 2,'
        ' "train/nll": 4.0, "validation/nll": 6.0, "train/words_per_second": 7}\n{"step": 6,'
        ' "train/n'
    )
    run = runs.RunReport(*[None] * 9, runs._log(tmp_path / "metrics.jsonl"), None)
    assert (run.curve("train"), run.curve("validation")) == ([(2, 4.0)], [(2, 6.0)])
    assert runs._log(tmp_path / "none") == [] and runs._parameters(tmp_path) is None
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "a.json").write_text('{"split": "test", "step": 1}')
    for name, text in ("b", "{"), ("c", '{"settings": null}'), ("d", '{"settings": {}}'):
        (tmp_path / "eval" / f"{name}.json").write_text(text)
    assert runs._results(tmp_path, {}, "") == []


def test_bad_input(made, tmp_path):
    """What does not fit ends the report before a run is scored, with its numbers."""
    directory, *_ = made
    one, output = directory / "one", tmp_path / "report.html"
    (tmp_path / "text").mkdir()
    (tmp_path / "a.html").mkdir()
    (tmp_path / "text" / "test.txt").write_text("the t0w0\n" * 9)
    shutil.copytree(one, tmp_path / "other")
    config = json.loads((one / "config.json").read_text())
    config["data"]["path"] = str(tmp_path / "text")
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    for workdirs, changes, says in (
        ([tmp_path / "none"], {}, "none holds no run"),
        ([one, one], {}, "is given twice: use each run once"),
        ([one], {"output": "report.png"}, "must be the name of a page"),
        ([one], {"output": ""}, "must be the name of a page, such as report.html"),
        ([one], {"output": f"{tmp_path}/a.html"}, "a.html is a directory"),
        ([one], {"output": "/proc/report.html"}, "/proc/report_files"),
        ([one], {"bins": (100, 10)}, "bins=100,10 must be growing frequencies"),
        ([one], {"names": ("a", "b")}, "names=a,b must be one name for each of 1 runs"),
        ([one], {"sample_from": 3, "sample_words": 0}, "sample_from=3 has no effect"),
        ([one], {"sample_words": -1}, "--sample_words must be in [0, inf), got -1"),
        ([one], {"sample_from": 426}, "sample_from=426 must be less than the text's 426 words"),
        ([one, tmp_path / "other"], {"sample_words": 0}, "score different texts, of 426"),
    ):
        with pytest.raises((InputError, OSError), match=re.escape(says)):
            report(workdirs, Request(), Job(str(output))._replace(**changes))


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
    assert files == {"runs", "curves", "contexts"} | {
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
    run = SimpleNamespace(name="a", config=config, result={"words": 7}, vocabulary=Vocabulary)
    assert _title([run], Request(split="test")) == ("a", f"{corpus}, test split, 7 words")
