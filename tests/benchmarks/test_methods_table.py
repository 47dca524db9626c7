"""The table of ways to score: its models can be built, options are chosen on the validation
text, finished ways are kept.
"""

import json
import shutil

import pytest

from adaptive_jax.data.corpora.load import load
from adaptive_jax.evaluation.evaluate import Request, evaluate
from adaptive_jax.evaluation.methods import METHODS, prepared
from adaptive_jax.model.language_model import build
from adaptive_jax.workdir.settings import read_words
from benchmarks import methods_table
from benchmarks.methods_table import FILES, Model, Way


def test_models_and_ways_exist():
    """Every model can be built, every way has options that its method takes, and a stream has
    no context.
    """
    found = methods_table.models()
    assert len({model.name for model in found}) == len(found) == 3
    for model in found:
        build(model.config, model.config["data"]["vocabulary_size"])
        assert {way.method for way in model.ways} == METHODS.keys()
        for way in model.ways:
            assert all(callable(prepared(way.method, options)) for options in way.candidates())
            assert not way.context or model.config["batches"]["layout"] != "streams"


def test_samples_are_whole_lines_from_the_beginning(trained, text, tmp_path):
    """As many lines as have the words asked for, 0 for all."""
    for words in 0, 1, 40:
        methods_table.write_sample(trained, tmp_path / str(words), words)
        for split, name in FILES.items():
            lines, whole = (
                (folder / name).read_text().splitlines() for folder in (tmp_path / str(words), text)
            )
            assert lines == whole[: len(lines)] and (words or lines == whole)
            counts = [len(line.split()) + 1 for line in lines]
            wanted = min(
                10 * words if split == "train" else words,
                sum(len(line.split()) + 1 for line in whole),
            )
            assert not words or sum(counts[:-1]) < wanted <= sum(counts), split


def test_a_table(trained, config, tmp_path, monkeypatch):
    """Perplexities are those of the texts; of several options the one best on the validation
    text; nothing is scored twice.
    """
    ways = (
        Way("alone"),
        Way("context", context=0.5),
        Way("cache", "cache", {"cache_size": 50}, {"model_weight": (0.9, 0.5)}),
    )
    rates = Way("rates", "dynamic", {"rule": "sgd"}, {}, {"rate": (1e-9, 0.1)})
    monkeypatch.setattr(
        methods_table, "models", lambda: (Model("small", "", config(), (*ways, rates)),)
    )
    monkeypatch.setattr(methods_table, "WORDS", {"cpu": 150})
    monkeypatch.setattr(methods_table, "WARM", 20)
    workdir = tmp_path / "quickstart-transformer"
    shutil.copytree(trained, workdir)
    text = methods_table.section("cpu", tmp_path, {})
    kept = json.loads((workdir / "methods.json").read_text())
    assert list(kept) == ["alone", "context", "cache", "rates"]
    sample = str(workdir / "samples" / "150")
    for split, number in ("validation", "valid"), ("test", "test"):
        assert (
            evaluate(workdir, Request(split, data_path=sample))["perplexity"]
            == kept["alone"][number]
        )
        options = {"cache_size": 50, "model_weight": (kept["cache"]["chosen"]["model_weight"],)}
        request = Request(split, data_path=sample, method="cache", options=options)
        assert evaluate(workdir, request)["perplexity"] == pytest.approx(kept["cache"][number])
    assert kept["alone"]["words"] == len(
        load(
            {**config()["data"], "path": sample}, vocabulary=read_words(workdir), splits=("test",)
        ).ids["test"]
    )
    tried = {
        rate: evaluate(
            workdir,
            Request(
                "validation",
                data_path=sample,
                method="dynamic",
                options={"rule": "sgd", "rate": rate},
            ),
        )["perplexity"]
        for rate in (1e-9, 0.1)
    }
    assert kept["rates"]["chosen"] == {"rate": min(tried, key=tried.get)} and kept["rates"][
        "valid"
    ] == min(tried.values())
    shown = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    assert shown == ["way to score", "alone", "context", "cache", "rates"]
    monkeypatch.setattr(methods_table, "evaluate", None)
    assert methods_table.section("cpu", tmp_path, {}) == text
