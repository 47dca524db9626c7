"""A run keeps the lexicon of its words, and goes on without the one that it was made from."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from adaptive_jax.config.keys import complete
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.runs.run import Run
from adaptive_jax.scores.evaluate import Request, evaluate
from adaptive_jax.training.loop import train
from tests import refuses

CHANGES = {
    "input.name": "groc",
    "input.width": 4,
    "input.filters": ((1, 6), (3, 8)),
    "input.strides": (1, 2),
    "input.length": 12,
    "input.relations": 2,
    "input.definition": 3,
    "body.name": "lstm",
    "body.features": 8,
    "body.widths": (8,),
    "output.name": "softmax",
    "output.table.name": "mapped",
    "output.table.depth": 0,
    "output.table.bias": "predicted",
}
LEXICON = "\n".join(
    json.dumps({"word": f"t{i}w{j}", "relations": [f"t{i}w0", "zebra"], "definition": "the zebra"})
    for i in range(12)
    for j in range(6)
)
RUN = {"steps": 2, "evaluate_every": 2, "checkpoint_every": 2}


@pytest.fixture(scope="module")
def grounded(config, tmp_path_factory):
    """The config of a run of two updates, and its workdir; the file that its lexicon came from
    has been deleted since.
    """
    directory = tmp_path_factory.mktemp("grounded")
    path, whole = directory / "words.jsonl", complete(CHANGES)
    path.write_text(LEXICON)
    given = config(**RUN) | {group: whole[group] for group in ("input", "body", "output")}
    given["input"]["lexicon"] = str(path)
    train(given, directory / "run")
    path.unlink()
    return given, directory / "run"


def with_words(workdir, vocabulary):
    """The run, to score over other words, too."""
    return dataclasses.replace(Run.of(workdir), vocabulary=vocabulary)


def rows(run, name):
    """Words of an array of the lexicon that are not empty."""
    return (np.asarray(run.lexicon["input"][name]["words"]) >= 0).any(axis=1)


def test_a_run_opens_and_resumes_without_its_lexicon(grounded, config, capsys, caplog):
    """By the copy in its workdir, which has the entries of its words; for other words a
    warning; a new run needs the file.
    """
    given, workdir = grounded
    kept = [json.loads(line) for line in (workdir / "lexicon.jsonl").read_text().splitlines()]
    assert len(kept) == 72 and {tuple(entry["relations"])[-1:] for entry in kept} == {
        (f"t{i}w0",) for i in range(12)
    }
    capsys.readouterr()
    run = Run.open(workdir, "latest")
    assert not capsys.readouterr().out  # where `score` writes its columns
    assert rows(run, "relations").sum() == rows(run, "definitions").sum() == 72 and run.step == 2
    assert "input.lexicon" not in caplog.text
    more = Vocabulary((*run.vocabulary.words, "zebra"), np.append(run.vocabulary.counts, 0))
    assert rows(with_words(workdir, more), "relations").sum() == 72
    assert (
        "input.lexicon='" in caplog.text and "is not here: new words have no entries" in caplog.text
    )
    capsys.readouterr()
    train(given | {"steps": 3}, workdir)
    assert (
        "lexicon      of 122 words, 59.02 % have relations, 59.02 % have definitions\n"
        in capsys.readouterr().out
    )
    assert Run.open(workdir, "latest").step == 3
    with refuses("words.jsonl"):
        train(given, workdir.with_name("new"))


def test_the_lexicon_of_new_words(grounded, caplog):
    """Is the one that the run was started with: another file of its name is refused."""
    given, workdir = grounded
    words, path = Run.of(workdir).vocabulary, Path(given["input"]["lexicon"])
    more = Vocabulary((*words.words, "zebra"), np.append(words.counts, 0))
    zebra = json.dumps({"word": "zebra", "relations": ["t0w0"], "definition": "a horse"})
    try:
        path.write_text(f"{LEXICON}\n{zebra}")
        assert rows(with_words(workdir, more), "relations").sum() == 73
        assert "input.lexicon" not in caplog.text
        path.write_text(LEXICON.replace('["t3w0"', '["t2w0"', 1))
        with refuses("lexicon"):
            _ = with_words(workdir, more).lexicon
    finally:
        path.unlink()


def test_a_share_of_the_entries_at_evaluation(grounded, trained):
    """Fewer words have entries, the parameters are the same; a run without a lexicon says so."""
    _, workdir = grounded
    whole, less = Run.open(workdir, "best"), dataclasses.replace(Run.of(workdir), share=0.25)
    for name in ("relations", "definitions"):
        assert (
            rows(less, name).sum() == round(0.25 * 122)
            and (rows(whole, name) >= rows(less, name)).all()
        )
    losses = [
        evaluate(workdir, Request("validation", share=share))["nll"] for share in (None, 1.0, 0.0)
    ]
    assert losses[0] == losses[1] != losses[2]
    with refuses("share=0.5"):
        _ = dataclasses.replace(Run.of(trained), share=0.5).model


def test_a_damaged_copy_is_told(grounded, tmp_path):
    """With what to do; so is one that is missing."""
    _, workdir = grounded
    path = workdir / "lexicon.jsonl"
    content = path.read_text()
    try:
        path.write_text(content.replace("zebra", "horse"))
        with refuses("lexicon.jsonl", "damaged"):
            Run.open(workdir, "latest")
        path.unlink()
        with refuses("lexicon.jsonl", "missing"):
            Run.open(workdir, "latest")
    finally:
        path.write_text(content)
