"""Refusals of a run before its first update."""

import json
import shutil

import numpy as np
import pytest

from adaptive_jax.config.keys import complete
from adaptive_jax.data.corpora.corpus import Corpus, LazyIds
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.runs.checkpoints import recorded, steps_in
from adaptive_jax.runs.identity import ENDS, check_resumes, id_of, of_corpus
from adaptive_jax.runs.settings import read_config, write_json
from adaptive_jax.runs.start import begin
from tests import refuses


def test_a_run_of_an_earlier_version_opens(tmp_path):
    """Keys of a composed table's CNN stood among those of the table, the config named a cache, and
    it knew no tokenizer, no list of words and no optimizer of tables.
    Without their renaming the run would be refused, and with that cache programs of the one who
    made the run would be loaded.
    """
    config = complete({"output.table.name": "composed", "output.table.cnn.length": 9})
    table = config["output"]["table"]
    old = {key: value for key, value in table.items() if key != "cnn"} | table["cnn"]
    data = {
        key: value for key, value in config["data"].items() if key not in ("tokenizer", "words")
    }
    old = {"output": config["output"] | {"table": old}, "data": data | {"cache": "/x"}}
    optimizer = config["optimizer"].items()
    old["optimizer"] = {key: value for key, value in optimizer if not key.startswith("tables")}
    write_json(tmp_path / "config.json", config | old)
    assert read_config(tmp_path) == config


def test_a_run_resumes_on_its_text_alone(tmp_path):
    """The same words with the same counts may stand in another order; then the best checkpoint was
    chosen on another text, and the updates are others.
    """
    vocabulary = Vocabulary.build({"a": 3, "b": 2, "<eos>": 2})
    ids = np.arange(3 * ENDS, dtype=np.int32) % 7

    def corpus(train, validation=ids[:9]):
        return Corpus(vocabulary, {"train": train, "validation": validation})

    def check(corpus):
        check_resumes(tmp_path, of_corpus(corpus))

    begin(tmp_path, complete({}), {}, corpus(ids))
    check(corpus(LazyIds(lambda index: ids[index], len(ids))))
    check(Corpus(vocabulary, {"train": ids}))
    for other, names in (
        (corpus(ids[::-1]), ("train text", "196,608")),
        (corpus(ids, ids[:8]), ("validation text", "9", "8")),
    ):
        with refuses(str(tmp_path), "another run", *names):
            check(other)
    (tmp_path / "text.json").write_text('{"train": 5}')
    with refuses("text.json", "remove"):
        check(corpus(ids[::-1]))


def test_a_run_does_not_resume_from_checkpoints_of_another(trained, tmp_path):
    """A training that lived on beside the one begun in its removed workdir left its checkpoints
    there, and the second resumed from them. Runs and checkpoints without an id resume.
    """
    first, second = (shutil.copytree(trained, tmp_path / name) for name in ("first", "second"))
    step = steps_in(trained / "checkpoints")[0]
    saved, text = second / "checkpoints" / str(step), second / "text.json"
    assert id_of(trained) and recorded(saved, "id") == id_of(trained)
    check_resumes(second, {})
    write_json(text, json.loads(text.read_text()) | {"id": "another"})
    with refuses(str(saved), str(second), "another training"):
        check_resumes(second, {})
    text.unlink()
    check_resumes(second, {})
    write_json(first / "text.json", json.loads((first / "text.json").read_text()) | {"id": "other"})
    for step in steps_in(first / "checkpoints"):
        (first / "checkpoints" / str(step) / "_CHECKPOINT_METADATA").write_text("{}")
    check_resumes(first, {})


@pytest.mark.parametrize("corpus", ["embedded", "text_files"])
@pytest.mark.parametrize("older", [True, False])
def test_an_older_quickstart_separates_its_words(corpus, older, tmp_path):
    """Until 0.2.0 its corpus did, not its tokeniser: prompts of such runs would be read at white
    space, and the quickstart's own command would not resume them. A run of today says what it does.
    """
    config = complete({"data.corpus": corpus, "data.threshold": 2})
    if older:
        del config["data"]["tokenizer"]
    write_json(tmp_path / "config.json", config)
    data = read_config(tmp_path)["data"]
    expected = ("marks", True) if older and corpus == "embedded" else ("none", False)
    assert (data["tokeniser"], data["lower"]) == expected
