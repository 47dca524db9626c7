"""Ids that somebody's tokenizer made: files that are mapped, their order by frequency, what a run
keeps of it, and one line for each way to be wrong.
"""

import json
import re
import shutil

import numpy as np
import pytest

import adaptive_jax
from adaptive_jax import InputError, count_ids, frequency_order
from adaptive_jax.config.keys import resolve
from adaptive_jax.data.corpora.corpus import LazyIds
from adaptive_jax.data.corpora.load import load
from adaptive_jax.data.vocabulary.lexicon import lexicon
from adaptive_jax.data.vocabulary.lines import Lines
from adaptive_jax.data.vocabulary.on_disk import read_with_checksums, write_with_checksums
from adaptive_jax.data.vocabulary.token_ids import TokenIds
from adaptive_jax.model.language_model import build
from adaptive_jax.scores.evaluate import Request, evaluate
from adaptive_jax.text.load import LoadedModel
from adaptive_jax.training.loop import train
from adaptive_jax.training.own_text import with_text
from configs import own_text, quickstart
from tests import refuses
from tests.random_runs import random_run

SIZE, EOS = 60, 7  # id 59 never occurs, id 58 in the test split alone
TOKENS = {"train": 4_000, "valid": 400, "test": 401}


def ids_of(split):
    """Ids whose frequency is in no order; every 20th ends a document."""
    random = np.random.default_rng(len(split))
    chances = random.permutation(1 / np.arange(1, SIZE - 1))
    ids = random.choice(SIZE - 2, TOKENS[split], p=chances / chances.sum())
    ids[19::20] = EOS
    if split == "test":
        ids[:4] = 58
    return ids


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Splits as flat files of 16 bits, as nanoGPT writes them."""
    directory = tmp_path_factory.mktemp("ids")
    for split in TOKENS:
        ids_of(split).astype("<u2").tofile(directory / f"{split}.bin")
    return directory


@pytest.fixture
def data(directory):
    """The group `data` of these files."""
    return {"corpus": "ids", "vocabulary_size": SIZE, "eos": EOS, "path": str(directory)}


def test_order_by_frequency_and_back():
    """The two maps undo each other, ids with equal counts stay in order: a model with cutoffs that
    read other ranks than its training did would be wrong in silence.
    """
    ids = ids_of("train")
    counts = count_ids(ids.astype(np.uint16), SIZE)
    assert counts.tolist() == np.bincount(ids, minlength=SIZE).tolist()
    ranks, back = frequency_order(counts)
    assert (np.diff(counts[back]) <= 0).all() and back[ranks].tolist() == list(range(SIZE))
    assert np.array_equal(back[ranks[ids]], ids)
    assert frequency_order([1, 2, 1, 2]).ids.tolist() == [1, 3, 0, 2]
    with refuses("58", "59"):
        count_ids(np.array([3, 59]), 59)
    with refuses("float64"):
        count_ids(np.array([3.0]), 59)
    with refuses("ids", "[1, 2]"):
        count_ids(np.array([[3, 4]]), 59)
    with refuses("counts", "float64"):
        frequency_order([0.3, 0.7])  # every share was 0


def test_files_are_mapped_and_read_by_rank(data, directory, tmp_path, own_cache):
    """Every token comes back, whatever wrote it: flat files, .npy of any integers, the header of
    llm.c. Nothing but counts is written, or a corpus of a terabyte would be copied.
    """
    corpus = load(data)
    vocabulary = corpus.vocabulary
    assert (len(vocabulary), vocabulary.words[vocabulary.eos]) == (SIZE, "<eos>")
    assert (np.diff(vocabulary.counts) <= 0).all()
    for split, name in ("train", "train"), ("validation", "valid"), ("test", "test"):
        found = corpus.ids[split]
        assert isinstance(found, LazyIds)
        assert (found.dtype, found.shape) == (np.int32, (TOKENS[name],))
        assert np.array_equal(vocabulary.ids[np.asarray(found)], ids_of(name))
        assert np.array_equal(found[np.array([[0, 5], [9, 7]])], found[:][[[0, 5], [9, 7]]])
    assert corpus.unseen["train"] == 0 and corpus.unseen["test"] == 4 / TOKENS["test"]
    assert sum(file.stat().st_size for file in own_cache.rglob("*")) < 20_000
    header = np.zeros(256, "<i4")
    header[:3] = 20240801, 7, TOKENS["train"]
    for number, write in enumerate(
        (
            lambda place: np.save(place / "train.npy", ids_of("train").astype(np.int64)),
            lambda place: (place / "train.bin").write_bytes(
                header.tobytes() + ids_of("train").astype("<u4").tobytes()
            ),
        )
    ):
        place = tmp_path / str(number)
        place.mkdir()
        write(place)
        again = load(data | {"path": str(place)}, splits=("train",))
        assert again.vocabulary.digest == vocabulary.digest
        assert np.array_equal(again.ids["train"][:], corpus.ids["train"][:])


def test_the_order_is_kept_with_its_checksum(data, tmp_path):
    """A run's vocabulary.txt says which id each row is, with and without an end of documents:
    evaluation reads it instead of counting other text.
    """
    corpus = load(data)
    for vocabulary in corpus.vocabulary, load(data | {"eos": -1}).vocabulary:
        write_with_checksums(vocabulary, tmp_path / "vocabulary.txt")
        again = read_with_checksums(tmp_path / "vocabulary.txt", "restore it")
        assert isinstance(again, TokenIds) and again.digest == vocabulary.digest
        assert (again.ids.tolist(), again.eos) == (vocabulary.ids.tolist(), vocabulary.eos)
    assert "<eos=7> " in corpus.vocabulary._text and again.eos == 0
    text = (tmp_path / "vocabulary.txt").read_text()
    (tmp_path / "vocabulary.txt").write_text(text.replace("13 ", "14 "))
    with refuses("vocabulary.txt", "damaged"):
        read_with_checksums(tmp_path / "vocabulary.txt", "restore it")


WRONG = (
    ({"vocabulary_size": 0}, "vocabulary_size=0"),
    ({"vocabulary_size": 50}, "train.bin uint16"),
    ({"eos": 60}, "data.eos=60 59"),
    ({"threshold": 2}, "data.threshold=2 data.corpus=ids"),
    ({"corpus": "text_files"}, "data.eos=7 data.corpus=text_files"),
    ({"ids_dtype": "float32"}, "data.ids_dtype='float32'"),
    ({"ids_dtype": "uint32"}, "data.ids_dtype 59"),
    ({"path": ""}, "data.path=''"),
)


@pytest.mark.parametrize("changes, names", WRONG, ids=str)
def test_wrong_settings_are_named(data, changes, names):
    """Before anything is trained, and with the cure."""
    with refuses(*names.split()):
        load(data | changes)


@pytest.mark.parametrize("wrong", (-100, SIZE))
def test_wrong_ids_of_evaluated_text_are_named(data, directory, tmp_path, wrong):
    """The cure was a larger vocabulary, which no trained model has, nor a negative id."""
    for split in TOKENS:
        ids = ids_of(split)
        ids[5] = wrong if split == "test" else ids[5]
        np.save(tmp_path / f"{split}.npy", ids)
    vocabulary = load(data).vocabulary
    with refuses("test.npy", "59", f"{wrong}", "ids of one tokenizer", "training"):
        load(data | {"path": str(tmp_path)}, vocabulary=vocabulary)


def test_wrong_files_are_told_in_one_line(data, tmp_path):
    """Missing, doubled, empty, of another dtype, cut off: each would be noise to train on."""
    wrong = data | {"path": str(tmp_path)}

    def told():
        with pytest.raises(InputError) as error:
            load(wrong, splits=("train",))
        return re.sub(r"\S*/", "", str(error.value))

    assert told().endswith("has no train split; add one of train.npy, train.bin")
    file = tmp_path / "train.bin"
    for content, says in (
        (b"", "cannot read train.bin: cannot mmap an empty file; write the ids again"),
        (b"\1\0\2", "cannot read train.bin: Size of available data is not a multiple"),
        (ids_of("train").astype("<u4").tobytes(), "as uint16, has the zeros of ids of 4 bytes: "),
        (ids_of("train").astype("<i8").tobytes(), "of 8 bytes: use data.ids_dtype=int64, or a"),
        (np.array([20240520, 1, 9], "<i4").tobytes(), "it has 0 ids and its header says 9; write"),
        (
            np.array([20240520, 1, 2, *[0] * 253, 7, 8], "<i4").tobytes(),
            "cannot read train.bin: it has 4 ids and its header says 2; write the ids again",
        ),
    ):
        file.write_bytes(content)
        assert says in told()
    np.save(tmp_path / "train.npy", np.zeros(3))
    assert "has both train.npy and train.bin; keep one" in told()
    np.save(tmp_path / "train.npy", np.tile(np.array([9, 0], np.uint16), 5))
    file.unlink()
    assert load(wrong, splits=("train",)).ids["train"][:].tolist() == [1, 0] * 5  # it says uint16
    np.save(tmp_path / "train.npy", np.zeros(3))
    assert (
        "train.npy must be one integer or more in one dimension, got float64 of shape (3,)"
        in told()
    )
    np.save(tmp_path / "train.npy", np.zeros(0, np.int32))
    assert "train.npy" in told()
    (tmp_path / "train.npy").write_bytes(b"no ids")
    assert "cannot read train.npy" in told()


def small(data):
    """The config of two updates of a small transformer."""
    config = quickstart.get_config().to_dict()
    steps = {"steps": 2, "tokens_per_update": 64, "tokens_per_device": 64, "evaluate_every": 0}
    config |= steps | {"data": data}
    config["batches"] = {"sequence_length": 16, "break_mode": "eos"}
    config["input"] |= {"cutoffs": (20,), "width": 8}
    config["body"] |= {"layers": 1, "features": 8, "heads": 1, "feed_forward": 8}
    config["schedule"] |= {"warmup_steps": 1, "cycle_steps": 1}
    return config


def test_a_run_on_ids(data, tmp_path, capsys):
    """Training, evaluation, perplexity per token; other files are read by the same order; lines of
    ids can be read and written, and words cannot.
    """
    config = small(data)
    run = tmp_path / "run"
    with refuses("break_mode=eos"):
        train(resolve(config | {"data": data | {"eos": -1}}), run)
    config["evaluate_break_mode"] = "complete"
    none = config["batches"] | {"break_mode": "none"}
    with refuses("evaluate_break_mode=complete"):
        train(resolve(config | {"data": data | {"eos": -1}, "batches": none}), run)
    train(resolve(config | {"evaluate_break_mode": ""}), run)
    assert "tokens       of the validation split: unseen tokens" in capsys.readouterr().out
    result = evaluate(run, Request())
    printed = capsys.readouterr().out
    assert result["words"] == result["tokens"] == TOKENS["test"]
    assert f"nats a token) over {TOKENS['test']} tokens" in printed and "word" not in printed
    kept = json.loads((run / "config.json").read_text())["data"]
    lines = Lines.of(kept, read_with_checksums(run / "vocabulary.txt", ""))
    np.save(tmp_path / "test.npy", ids_of("test"))
    other = data | {"path": str(tmp_path)}
    found = load(other, vocabulary=lines.vocabulary, splits=("test",)).ids["test"]
    assert np.array_equal(lines.vocabulary.ids[found[:]], ids_of("test"))
    ids = lines.encode("12 13\n7 12")
    assert lines.vocabulary.ids[ids].tolist() == [12, 13, EOS, EOS, 12]
    assert lines.decode(ids) == "12 13\n\n12"
    with refuses("'cat'", "59"):
        lines.encode("cat")
    without = load(data | {"eos": -1}).vocabulary
    with refuses("data.corpus=ids"):
        lexicon(without, {"spelling": {"length": 4}})


def test_ids_without_an_end_of_text_and_without_a_test_split(data, directory, tmp_path):
    """A folder as nanoGPT leaves it trains; the test split is asked for when it is scored; lines
    of ids are scored as evaluation scores them, no end of a line counted, and continued.
    """
    for split, name in ("train", "train"), ("valid", "val"):
        shutil.copy(directory / f"{split}.bin", tmp_path / f"{name}.bin")
    config = small(data | {"eos": -1, "path": str(tmp_path)})
    config["batches"]["break_mode"] = "none"
    run = tmp_path / "run"
    train(resolve(config), run)
    with refuses("test", "test.npy"):
        evaluate(run, Request())
    result = evaluate(run, Request(split="validation"))
    model = adaptive_jax.load(run)
    ids = ids_of("valid").tolist()
    text = [" ".join(map(str, ids[:150])), "", " ".join(map(str, ids[150:]))]
    assert model.perplexity(text, context=0) == pytest.approx(result["perplexity"], rel=1e-6)
    line, empty, _ = model.score(["12 13 7", "", "5"])
    assert (line.words, empty.words) == (("12", "13", "7"), ())
    most_frequent = model.run.vocabulary.words[0]
    (continuation,) = model.continuations(f"12 {most_frequent}\n 13", words=3, seed=1)
    numbers = [str(i) for i in model.run.vocabulary.ids[continuation.tokens]]
    assert continuation.text == " " + " ".join(numbers) and len(numbers) == 3
    with refuses("<eos>"):
        model.encode("12 <eos>")


def test_own_text_chooses_a_model_for_ids(data, tmp_path, capsys):
    """The one config for texts of one's own takes ids, too, and drops no setting in silence."""
    config = own_text.get_config().to_dict()
    config["data"] |= data
    model = build(resolve(config), SIZE)
    chosen = with_text(resolve(config), None, model)["data"]
    assert (chosen["vocabulary_size"], chosen["threshold"], chosen["codes"]) == (SIZE, 1, 0)
    assert "words        the ids of the tokenizer, the most" in capsys.readouterr().out
    with refuses("data.limit=9", "data.corpus=ids"):
        with_text(resolve(config | {"data": config["data"] | {"limit": 9}}), None, model)


def test_an_end_of_a_document_within_a_line(config):
    """Ids of a line stay as they were typed: the one that ends a document was called `<eos>`, and
    the places after it were those of other ids.
    """
    vocabulary = TokenIds.of_counts(np.arange(20, 0, -1), eos=0)
    model = LoadedModel(random_run(config(**{"input.cutoffs": (5,)}), vocabulary))
    [line] = model.score(["5 0 12 7"])
    assert line.words == ("5", "0", "12", "7", "<eos>")
    assert line.places.tolist() == [[0, 1], [2, 3], [4, 6], [7, 8], [8, 8]]
