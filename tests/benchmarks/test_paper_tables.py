"""The papers' tables: every row can be built, its numbers stand beside the published ones,
finished rows are kept.
"""

import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from adaptive_jax.config.rows import Paper, Row
from adaptive_jax.model.language_model import build
from adaptive_jax.planning.plan import divide_update
from adaptive_jax.training.divergence import Diverged
from benchmarks import figures, tables
from benchmarks.lines import Line, Table, config_of
from benchmarks.paper_tables import TABLES
from configs import quickstart
from tests import refuses
from tests.toys import misplaced_labels

NUMBERS = {
    "test": {"0": 119.96, "480": 110.04},
    "losses": {"training": [[1, 9.1], [2, 5.0]], "validation": [[1, 9.0], [2, 4.8158]]},
    "epoch": 61.2,
    "hours": 0.51,
    "parameters": 2_500_000,
    "operations": 3e12,
    "peak_bytes": 2.1e9,
}
BUILT = set()  # layers, which several tables share


@pytest.mark.parametrize("name", TABLES)
def test_every_row_can_be_built(name):
    """At every size; the schedule of a size is as long as the run. An adaptive softmax has bands:
    with one it would be the full softmax that it is compared with.
    """
    table = TABLES[name]()
    for size, lines in table.lines.items():
        assert lines and len(set(lines)) == len(lines)
        for line in {line.run: line for line in lines}.values():
            config = config_of(table, line, size)
            output, input_ = config["output"], config["input"]
            words = config["data"]["vocabulary_size"]
            layers = repr([input_, config["body"], output, words])
            if not line.clusters and layers not in BUILT:
                build(config, words)
                BUILT.add(layers)
            if output["name"] == "adaptive":
                shared = input_.get("cutoffs") if output["table"]["name"] == "tied" else ()
                assert output["table"].get("cutoffs") or shared, line.run
            divide_update(config, 1)
            schedule = config["schedule"]
            if size == "cpu" and schedule["name"] == "cosine_cycles":
                assert config["steps"] == schedule["warmup_steps"] + schedule["cycle_steps"]


def test_rows_of_table_3_differ_only_in_input_and_output():
    """The same body, updates and schedule."""
    table = TABLES["adaptive_inputs_3"]()
    configs = [config_of(table, line, "cpu") for line in table.lines["cpu"]]
    rest = [
        {key: config[key] for key in config if key not in ("input", "output", "data")}
        for config in configs
    ]
    assert all(each == rest[0] for each in rest)
    assert (
        len(
            {
                repr((config["input"], config["output"], config["data"]["codes"]))
                for config in configs
            }
        )
        == 8
    )


def test_a_line_has_ours_and_the_published_numbers():
    """Nothing where there is none; the validation loss is that of no context."""
    line = Line("penn_treebank", "adp_t", Paper(19.79, 20.51, 246.9, 30), 31.9, memory=6221)
    assert (
        tables.cells(line, NUMBERS)
        == "| `adp_t` | 123.4 | 120.0 | 2.5M | 61 | 30.6 | 2,100 | 19.79 | 20.51 | 246.9M | 31.9 |"
        " 30 | 6221 |"
    )
    fewer = Line("penn_treebank", "groc", Paper(test=159.3), share=0.16)
    assert fewer.request(None).share == 0.16
    shown = tables.cells(fewer, NUMBERS | {"test": {"0": 119.96, "share 0.16": 130.04}})
    assert shown.startswith("| `groc`, 16% of the lexicon in inference |  | 130.0 | 2.5M |")
    assert (
        tables.cells(Line("penn_treebank", "adp_t", context=480), NUMBERS)
        == "| `adp_t`, 480 tokens of context |  | 110.0 | 2.5M | 61 | 30.6 | 2,100 |  |  |  |  | "
        " |  |"
    )


def test_a_row_that_diverges_is_a_line(tmp_path, monkeypatch):
    """It does not end the table, of which some rows are to diverge (Dauphin et al. 2017, Figure
    6): it says where, the figure leaves it out, and it is not trained again.
    """

    def diverges(config, workdir):
        raise Diverged(7, "loss 2e+04 nats a token")

    monkeypatch.setattr(tables, "train", diverges)
    table = TABLES["gcnn_figure_6"]()
    line = next(line for line in table.lines["cpu"] if line.row == "no_clipping_1")
    settings = SimpleNamespace(size="cpu", corpora=[], workdir=tmp_path, lexicon="", glove="")
    numbers = tables.measure("gcnn_figure_6", line, settings)
    shown = tables.cells(line, numbers)
    assert shown.startswith(
        "| `no_clipping_1` | diverges: update 7 has loss 2e+04 nats a token | |"
    )
    assert shown.count("|") == tables.TITLE.splitlines()[0].count("|")
    assert tables.figure_of(table, [(line, numbers)], "cpu")["rows"] == []
    row = tables.runs_of("gcnn_figure_6", settings) / line.run / "row.json"
    row.parent.mkdir(parents=True)
    row.write_text(json.dumps(numbers))
    assert tables.numbers_of("gcnn_figure_6", line, settings) == numbers


def test_a_section_takes_the_place_of_the_one_before(tmp_path):
    """Other sections stay as they are; a new one comes last."""
    path = tmp_path / "RESULTS.md"
    path.write_text("# Results\n\n## One\n\nold\n\n## Two\n\n### Under\n\n2\n")
    tables.write_section(path, "## One\n\nnew\n")
    tables.write_section(path, "## Three\n\n3\n")
    assert (
        path.read_text()
        == "# Results\n\n## One\n\nnew\n\n## Two\n\n### Under\n\n2\n\n## Three\n\n3\n"
    )


def test_a_row_trains_is_scored_and_is_kept(settings, text, tmp_path, monkeypatch):
    """With --only in this process; the next call finds its numbers and draws the table."""
    run = {"steps": 2, "evaluate_every": 1, "checkpoint_every": 1, "log_every": 1}
    flat = quickstart.SETTINGS | quickstart.LAYERS["adp_t"] | settings(**run)
    lines = Line("wikitext2", "tiny"), Line("wikitext2", "tiny", context=2)
    tuned = lines[0]._replace(target="wikitext2_raw", tuned=flat["tokens_per_update"])
    small = {
        "tokens_per_update": tuned.tuned,
        "schedule.name": "cosine_cycles",
        "schedule.warmup_steps": 1,
    }
    rows = {("cpu", "wikitext2"): ({"tiny": Row("tiny")}, {"tiny": flat})}
    table = Table(
        "Tiny", {"cpu": (*lines, tuned)}, {"cpu": small}, rows, {"optimizer.learning_rate": 0.125}
    )
    monkeypatch.setitem(TABLES, "tiny", lambda: table)
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "RESULTS.md")
    (tmp_path / "RESULTS.md").write_text("# Results\n")
    places = {"glove": "", "lexicon": "", "workdir": tmp_path / "runs"}
    texts = [f"wikitext2={text}", f"wikitext2_raw={text}"]
    flags = SimpleNamespace(size="cpu", corpora=texts, only="wikitext2-tiny", **places)
    tables.main("tiny", flags)
    numbers = json.loads(
        (tmp_path / "runs" / "tiny_cpu" / "wikitext2-tiny" / "row.json").read_text()
    )
    assert (
        numbers["test"].keys() == {"0", "2"}
        and len(numbers["losses"]["validation"]) == 2
        and numbers["peak_bytes"] > 1e8
    )
    kept = tmp_path / "runs" / "tiny_cpu" / "wikitext2-tiny" / "row.json"
    kept.write_text(json.dumps(numbers | {"test": {"0": 7.0}}))
    tables.main("tiny", flags)  # a line that the run was not scored on yet
    assert json.loads(kept.read_text())["test"] == {"0": 7.0, "2": numbers["test"]["2"]}
    flags.only = "wikitext2-tiny-wikitext2_raw"
    tables.main("tiny", flags)
    run = tmp_path / "runs" / "tiny_cpu" / flags.only
    config = json.loads((run / "config.json").read_text())
    assert (config["steps"], config["init_words"], config["optimizer"]["learning_rate"]) == (
        3,
        "both",
        0.125,
    )
    assert config["init_from"] == str(kept.parent)
    assert json.loads((run / "row.json").read_text())["test"].keys() == {"wikitext2_raw"}
    if importlib.util.find_spec("matplotlib"):
        flags.only = ""
        tables.main("tiny", flags)
        assert (tmp_path / "tiny_cpu.png").read_bytes()[1:4] == b"PNG"
        written = (tmp_path / "RESULTS.md").read_text()
        assert (
            "| `tiny`, 2 tokens of context |" in written
            and "| `tiny`, finetuned on wikitext2_raw |" in written
        )
    with refuses("--only=wikitext2-none"):
        tables.main("tiny", SimpleNamespace(**vars(flags) | {"only": "wikitext2-none"}))
    with refuses("directory"):
        tables.main("tiny", SimpleNamespace(**vars(flags) | {"corpora": ["wikitext2"]}))


def test_figures_of_each_kind_have_labels_in_their_places():
    """The old plotter repeated colours, and labels overlapped or stood outside. Every figure of
    RESULTS.md has its numbers beside it.
    """
    pytest.importorskip("matplotlib")
    lines = [Line("wikitext2", f"row_{number}") for number in range(24)]
    rows_and_numbers = [(line, NUMBERS) for line in lines]
    both = NUMBERS | {"test": {"0": 110.0, "far": 310.0}}
    texts = [(line._replace(target=t), both) for line in lines[:2] for t in ("", "far")]
    work = Table("By work", {}, operations=True)
    once = NUMBERS | {"losses": NUMBERS["losses"] | {"validation": [[2, 4.8158]]}}
    drawn = [
        tables.figure_of(Table("Plain", {}), rows_and_numbers, "cpu"),
        tables.figure_of(work, texts, "cpu"),
        tables.figure_of(Table("Evaluated once", {}), [(lines[0], once)], "cpu"),
    ]
    assert drawn[1]["by"] == "TFLOP of training"
    assert [row["losses"][:1] for row in drawn[1]["rows"]][::2] == [[(3.0, 9.0)]] * 2
    assert [row["corpus"] for row in drawn[1]["rows"]] == ["wikitext2", "far"] * 2
    assert drawn[2]["rows"][0]["losses"] == [(1, 9.1), (2, 5.0)]
    results = Path(figures.__file__).with_name("RESULTS.md").read_text()
    names = re.findall(r"!\[.*?\]\((\w+)\.png\)", results)
    files = [Path(figures.__file__).with_name(f"{name}.json") for name in names]
    assert len(files) > 20 and all(file.exists() for file in files)
    some = "thesis_4_3_cpu", "groc_5_cpu", "groc_10_cpu", "vocabulary_growth_cpu"
    drawn += [json.loads(file.read_text()) for file in files if file.stem in some]
    for numbers in drawn:
        figure = getattr(figures, numbers["kind"])(numbers)
        assert not misplaced_labels(figure), numbers["title"]
        for axes in figure.axes:
            looks = {(line.get_color(), line.get_marker()) for line in axes.get_lines()}
            assert len(looks) == len(axes.get_lines())
