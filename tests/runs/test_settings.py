"""Refusals of a run before its first update."""

import json
import shutil

import numpy as np

from adaptive_jax.config.keys import complete
from adaptive_jax.data.corpora.corpus import Corpus, LazyIds
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.runs.checkpoints import recorded, steps_in
from adaptive_jax.runs.identity import ENDS, check_resumes, id_of, of_corpus
from adaptive_jax.runs.settings import write_json
from adaptive_jax.runs.start import begin
from tests import refuses


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
