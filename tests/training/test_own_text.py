"""A text of one's own: its vocabulary, the split of a single file, a run from one line."""

import functools
import gzip
import io
import json
import re
import shutil
import zipfile
from pathlib import Path

import pytest

from adaptive_jax.config.keys import resolve, switch
from adaptive_jax.data.corpora.load import load
from adaptive_jax.data.corpora.split import split_lines, unsplit_text
from adaptive_jax.data.corpora.text import Text
from adaptive_jax.data.vocabulary.clusters import Header, write_clusters
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.model.language_model import build
from adaptive_jax.planning.cutoffs import Workload, propose
from adaptive_jax.runs.settings import read_words, write_json
from adaptive_jax.scores.evaluate import Request, evaluate
from adaptive_jax.training.dry_run import check_config, dry_run
from adaptive_jax.training.finetuning import config_of_origin
from adaptive_jax.training.loop import train
from adaptive_jax.training.own_text import choose_vocabulary, with_text
from configs import own_text
from tests import refuses
from tests.toys import plan_of


@pytest.mark.parametrize("row, millions", [("small", 0.9), ("medium", 10.7), ("large", 201)])
def test_rows_are_the_sizes_that_the_file_promises(row, millions):
    """Their updates divide over eight devices, and the schedule ends with the run."""
    config = resolve(own_text.get_config(row))
    plan, schedule = plan_of(config, 30_000, 8), config["schedule"]
    assert plan.parameters["body"] / 1e6 == pytest.approx(millions, rel=0.02)
    assert schedule["warmup_steps"] + schedule["cycle_steps"] == config["steps"]


COMMON = {f"word{n}": 1 + 2_000 // (n + 1) for n in range(900)}
ONCE = {f"rare{n}": 1 for n in range(400)}


@pytest.mark.parametrize(
    "counts, held_out, expected, share",
    [
        (COMMON | ONCE, COMMON | ONCE, {"threshold": 2}, "2.6%"),
        (COMMON | {"<unk>": 5_000}, COMMON, {"threshold": 4}, "4.6%"),  # something becomes <unk>
        (COMMON | ONCE, COMMON | {"new": 1_500, "<unk>": 9}, {"codes": 1318}, "9.0%"),
        (ONCE, ONCE, {"codes": 222}, "100.0%"),
        ({"字": 3}, {"字": 3}, {"codes": 200}, "100.0%"),
    ],
)
def test_vocabulary_for_a_text(counts, held_out, expected, share):
    """Words while few words of the validation text become <unk>, whatever the train text
    promises; otherwise sub-words. The line gives the numbers.
    """
    words = Vocabulary.build(counts | {"<eos>": 900})
    chosen, line = choose_vocabulary(words, held_out | {"<eos>": 90})
    assert chosen == expected and f" {share} of the validation text " in line
    if "codes" in chosen:
        assert line.startswith(f"sub-words, {chosen['codes']:,} merges: of whole words, ")
    else:
        kept = len(words.cut(chosen["threshold"], 0))
        assert 0 <= kept - int(re.search(r"([\d,]+) of", line)[1].replace(",", "")) <= 2


def test_a_hierarchical_softmax_of_own_text_waits_for_its_words():
    """Its classes were compared with a vocabulary of 2 words, and refused."""
    classes = {"output.name": "hierarchical", "output.classes": 50, "input.name": "lookup"}
    config = own_text.get_config("small").to_dict()
    config, _ = switch(config, classes | {"output.table.cutoffs": ()})
    parts = check_config(resolve(config), None)
    assert parts.model.input.vocabulary_size == 50


@pytest.mark.parametrize(
    "lines, expected", [(3, (1, 1, 1)), (40, (36, 2, 2)), (250_001, (230_001, 10_000, 10_000))]
)
@pytest.mark.parametrize("compress", [None, gzip])
def test_a_file_is_split_in_order(lines, expected, compress, tmp_path):
    """The last tenth is for validation and test; together the copies are the text, and the
    user's folder stays as it is.
    """
    text = "\n".join(f"line {n}" for n in range(lines)).encode()
    folder, cache = tmp_path / "mine", tmp_path / "cache"
    folder.mkdir()
    file = folder / ("book.md.gz" if compress else "book.md")
    file.write_bytes(compress.compress(text) if compress else text)
    (folder / ".hidden").touch()
    assert unsplit_text(str(folder)) == unsplit_text(str(file)) == Text((file,))
    directory, counts = split_lines(unsplit_text(str(folder)), cache)
    parts = [(directory / f"{name}.txt").read_bytes() for name in ("train", "valid", "test")]
    assert counts == expected == tuple(part.count(b"\n") for part in parts)
    assert b"".join(parts) == text + b"\n"
    assert directory.parent.parent == cache
    assert {path.name for path in folder.iterdir()} == {".hidden", file.name}
    (directory / "valid.txt").unlink()
    (left := directory / ".train.txt.1f").touch()  # by a process that was killed
    assert split_lines(unsplit_text(str(file)), cache) == (directory, counts) and not left.exists()
    (link := tmp_path / file.name).symlink_to(file.rename(tmp_path / "blob"))  # as hubs keep files
    assert split_lines(unsplit_text(str(link)), cache)[1] == counts
    file.write_bytes(compress.compress(text + b" x") if compress else text + b" x")
    assert split_lines(unsplit_text(str(file)), cache)[0] != directory


def test_places_without_a_single_text(text, tmp_path):
    """A folder of splits, of nothing; an archive; nothing at all."""
    (tmp_path / "text.tar.gz").touch()
    (tmp_path / "empty").mkdir()
    for name in "text.tar.gz", "empty", "nowhere":
        assert unsplit_text(str(tmp_path / name)) is None
    assert unsplit_text(str(text)) is None
    (tmp_path / "one.zip").touch()  # `unpacked` reads it
    assert unsplit_text(str(tmp_path / "one.zip")) == Text((tmp_path / "one.zip",))
    with refuses("empty", "split"):
        chosen(**{"data.path": str(tmp_path / "empty")})
    with refuses("data.path", "local disk"):
        chosen(**{"data.path": f"file://{tmp_path}/two"})
    with refuses("nowhere", "does not exist"):
        chosen(**{"data.path": str(tmp_path / "nowhere")})
    (tmp_path / "a").write_text("one line only\nand another")
    with refuses(str(tmp_path / "a"), "2 line(s)"):
        split_lines(Text((tmp_path / "a",)), tmp_path)


def test_a_folder_of_files_is_one_text_with_a_document_a_file(tmp_path, capsys, own_cache):
    """It was refused, and the cure, `cat DIR/*.txt`, failed on spaces and joined lines."""
    folder = tmp_path / "my papers"
    for name, content in (
        ("b.md", "four\n" * 30),
        ("a b.txt", "one\ntwo"),  # no line feed at its end
        ("sub/deep/c.tex", "six\n" * 30),
        (".git/config", "hidden"),
        ("a.txt~", "a backup"),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    config = chosen(**{"data.path": str(folder)})
    copies = Path(config["data"]["path"])
    joined = "".join((copies / f"{split}.txt").read_text() for split in ("train", "valid", "test"))
    assert joined == "one\ntwo\n\n" + "four\n" * 30 + "\n" + "six\n" * 30
    assert f"{folder}, 3 files, is split" in capsys.readouterr().out
    (folder / "test.txt").touch()  # a split, so the others are none
    with refuses("my papers", "split"):
        chosen(**{"data.path": str(folder)})


def locked_zip():
    """A .zip whose one file is marked as encrypted."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("a.txt", "a b\n" * 40)
    marks = {b"PK\3\4\x14\0\0": b"PK\3\4\x14\0\1", b"\3\x14\0\0": b"\3\x14\0\1"}
    return functools.reduce(lambda a, mark: a.replace(*mark), marks.items(), content.getvalue())


@pytest.mark.parametrize(
    "content, says",
    [
        ("a\n" * 38 + "b\0\n", "mine.txt, line 39: a NUL byte"),
        (b"a\n" * 38 + b"\xff\n", "mine.txt, line 39: not UTF-8"),
        ("a\n" * 38 + "\n" * 9, "mine.txt has no words in the 2 lines of valid.txt"),
        ("a <eos>\n" * 40, "mine.txt: the text has <eos> of its own"),
        (gzip.compress(b"a b\n" * 999)[:-9], "cannot read mine.txt.gz: "),
        (b"(\xb5/\xfd", "mine.txt.zst is packed in a way that cannot be read: unpack it"),
        (
            b"%PDF-1.7\n\xe2\xe3",
            "mine.pdf is a PDF, not text: extract its text first, as by pdftotext",
        ),
        (
            b"caf\xe9\n" * 40,
            "mine.txt, line 1: not UTF-8; convert it, as by `iconv -f WINDOWS-1252",
        ),
        (b"BZh9", "mine.tar.xz is packed in a way that cannot be read: unpack it first"),
        (locked_zip(), "mine.zip cannot be unpacked (File "),
        (gzip.compress(b'{"text": "a b"}\n' * 40), "mine.jsonl.gz must be text, not JSON"),
    ],
)
def test_a_bad_file_is_named_itself(content, says, tmp_path):
    """Not a copy of it, whose lines have other numbers; and no copy is left to be read."""
    file = tmp_path / re.search(r"mine[a-z.]*[a-z]", says)[0]
    says = says.removeprefix("cannot read ").strip()
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    for _ in range(2):
        with refuses(f"{file.parent}/{says}"):
            split_lines(Text((file,)), tmp_path / "cache")


def request(**changes):
    """The config as the command line gives it."""
    return resolve(switch(own_text.get_config().to_dict(), changes)[0])


def chosen(**changes):
    """The config with what the text decides."""
    config = request(**changes)
    return with_text(config, None, build(config, 20))


def test_own_text_in_one_line(text, tmp_path, capsys, own_cache):
    """A dry run says what would be chosen; the run trains with that, resumes with it, refuses
    another, and is evaluated.
    """
    book, workdir = tmp_path / "book", tmp_path / "run"
    book.mkdir()
    splits = [(text / f"{name}.txt").read_bytes() for name in ("train", "valid", "test")]
    (book / "book.txt").write_bytes(b"".join(splits))
    asked = {"data.path": str(book), "body.layers": 1, "log_every": 1}
    asked |= {"tokens_per_update": 512, "schedule.warmup_steps": 1}
    dry_run(request(**asked), workdir)
    said = capsys.readouterr().out
    for line in "text  ", "words  ", "bands        none", "parameters  ", "state  ":
        assert f"\n{line}" in f"\n{said}", line
    assert "book.txt is split: its first 372 lines train, the next 20 validate, the last 20" in said

    train(request(**asked, steps=3), workdir)
    config = json.loads((workdir / "config.json").read_text())
    first = (workdir / "metrics.jsonl").read_text()
    assert config["own_text"] and config["data"]["vocabulary_size"] > 1
    assert config["data"]["codes"] > 0 or config["data"]["threshold"] > 1
    capsys.readouterr()

    shutil.rmtree(own_cache)  # what was prepared, the copies of the split among it, may be deleted
    train(request(**asked, steps=5), workdir)
    out = capsys.readouterr().out
    assert "after 3 of 5 updates" in out and "\nbands  " not in out  # nothing is chosen again
    assert json.loads((workdir / "config.json").read_text()) == config | {"steps": 5}
    assert (workdir / "metrics.jsonl").read_text().startswith(first)
    with refuses("data.threshold", "9"):
        train(request(**asked, **{"data.threshold": 9}), workdir)
    assert evaluate(workdir, Request())["step"] in (3, 5)
    with refuses("--config.data.path=DIR"):
        train(request(), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_cutoffs_are_the_cheapest(text, tmp_path, monkeypatch):
    """Of the vocabulary that the text has, for the width of the model."""
    monkeypatch.setattr("adaptive_jax.training.own_text.FULL_SOFTMAX", 100)
    for changes, width in ({}, 192), ({"body.features": 1_024}, 1_024):
        config = chosen(**{"data.path": str(text)}, **changes)
        counts = load(config["data"]).vocabulary.counts
        cutoffs, _ = propose(counts, 3, Workload(width))
        assert len(counts) > 100 and config["input"]["cutoffs"] == cutoffs


@pytest.mark.parametrize("cutoffs", [(), (5,), (5, 9, 70)])
def test_a_run_from_another_one_has_as_many_bands(cutoffs, text, tmp_path, monkeypatch):
    """A longer text chose three bands, in which the parameters of a run of one do not fit, and no
    flag chose one.
    """
    monkeypatch.setattr("adaptive_jax.training.own_text.FULL_SOFTMAX", 100)
    write_json(tmp_path / "config.json", request(**{"input.cutoffs": cutoffs}))
    config = chosen(**{"data.path": str(text), "init_from": str(tmp_path)})
    assert len(config["input"]["cutoffs"]) == len(cutoffs)


@pytest.mark.parametrize("table", ["tied", "own"])
def test_clusters_of_words_say_where_they_begin(table, text, tmp_path, monkeypatch):
    """The cutoffs of the file replace those that the text would choose; the file was refused as
    one that `build` does not read.
    """
    monkeypatch.setattr("adaptive_jax.training.own_text.FULL_SOFTMAX", 100)
    vocabulary = load(chosen(**{"data.path": str(text)})["data"]).vocabulary
    sizes, path = (70, len(vocabulary) - 70), tmp_path / "clusters.txt"
    header = Header("kmeans", 0, vocabulary.digest, sizes)
    write_clusters(path, header, vocabulary.words[::-1])
    changes = {"data.path": str(text), "output.name": "hierarchical", "body.layers": 1}
    changes |= {"output.clusters": str(path), "output.table.name": table}
    dry_run(request(**changes), tmp_path / "dry")
    for steps in 1, 2:  # the second one resumes
        train(request(**changes, steps=steps, **{"schedule.warmup_steps": 1}), tmp_path / "run")
        config = json.loads((tmp_path / "run" / "config.json").read_text())
        tied = table == "tied"
        assert config["input"]["cutoffs"] == [70] * tied
        assert config["output"]["table"]["cutoffs"] == [70] * (not tied)
        assert config["data"]["vocabulary_size"] == len(vocabulary)


def test_more_merges_than_the_text_gives_resume_with_those_that_it_gave(text, capsys):
    """The number that was trained with is stored, and the same command was refused for it."""
    config = request(**{"data.path": str(text), "data.codes": 8_000})
    begun = with_text(config, None, build(config, 2))
    assert 0 < begun["data"]["codes"] < 8_000 and "merges       only" in capsys.readouterr().out
    fixed = {"data.path": str(text), "data.threshold": 2, "input.cutoffs": (9,)}
    with_text(request(**fixed), None, build(request(**fixed), 20))
    assert not capsys.readouterr().out  # it was an empty line
    assert with_text(config, begun, build(config, 2)) == begun


@pytest.mark.parametrize(
    "changes, bands",
    [
        ({}, (True, False)),
        ({"output.table.name": "own"}, (True, True)),
        ({"output.name": "hierarchical", "output.table.name": "own"}, (True, False)),
        ({"output.name": "hierarchical", "output.classes": 11}, (False, False)),
        ({"output.name": "sampled"}, (False, False)),
        ({"output.name": "softmax", "output.table.name": "own"}, (True, False)),
    ],
)
def test_bands_are_those_that_the_output_reads(changes, bands, text, tmp_path, monkeypatch):
    """A table of the output's own had one band, under the cutoffs that were chosen for it; an
    output of one band refused those of the tied table.
    """
    monkeypatch.setattr("adaptive_jax.training.own_text.FULL_SOFTMAX", 100)
    changes = {"data.path": str(text)} | changes
    config = chosen(**changes)
    cutoffs = config["input"]["cutoffs"], config["output"]["table"]["cutoffs"]
    assert tuple(len(each) == 2 for each in cutoffs) == bands
    assert with_text(request(**changes), config, build(config, 20)) == config
    assert not all(bands) or cutoffs[0] == cutoffs[1]
    dry_run(request(**changes), tmp_path / "run")


def test_a_tied_table_that_is_cut_by_itself(text, tmp_path, monkeypatch):
    """Its input stays whole: cutoffs were chosen for that, too, and refused with the table's."""
    monkeypatch.setattr("adaptive_jax.training.own_text.FULL_SOFTMAX", 100)
    changes = {"data.path": str(text), "output.table.cutoffs": (3, 9)}
    assert chosen(**changes)["input"]["cutoffs"] == ()
    dry_run(request(**changes), tmp_path / "run")


def test_words_of_another_run_are_planned(trained, config, tmp_path):
    """With `init_words=both`: a dry run counted those of the new text alone, and refused cutoffs
    that only both have.
    """
    (tmp_path / "new").mkdir()
    for split in "train", "valid", "test":
        (tmp_path / "new" / f"{split}.txt").write_text("one two\none two\n")
    changes = {"init_from": str(trained), "init_words": "both", "input.cutoffs": (20, 60)}
    changes |= {"own_text": True, "data.path": str(tmp_path / "new")}
    changes |= {"data.threshold": 2, "data.vocabulary_size": 0}
    dry_run(resolve(config(**changes)), tmp_path / "run")
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    words = {"one", "two", *read_words(trained).words}
    assert plan["vocabulary_size"] == len(words)


def test_a_run_from_another_ones_config_has_its_own_number_of_words(tmp_path, in_process):
    """A smaller tokenizer got words that do not exist; of ids the user says the number. The config
    is explained without a workdir, too.
    """
    for corpus, size in ("ids", 50), ("text_files", 0):
        write_json(
            tmp_path / "config.json",
            request(**{"data.corpus": corpus, "data.path": "x", "data.vocabulary_size": 50}),
        )
        assert config_of_origin(str(tmp_path))["data"]["vocabulary_size"] == size
    flags = "--explain", f"--init_from={tmp_path}", "--config.body.layers=31"
    done = in_process("train.py", *flags)
    assert done.returncode == 0 and re.search(r"layers.*31", done.stdout), done.stderr


def test_wrong_settings_are_told_before_the_text_is_prepared(in_process, tmp_path, own_cache):
    """A long text takes minutes, and gigabytes of the cache."""
    (tmp_path / "mine.txt").write_text("a b c\n" * 400)
    done = in_process(
        "train.py",
        "--config=configs/own_text.py:small",
        f"--config.data.path={tmp_path / 'mine.txt'}",
        "--config.optimizer.learning_rate=-1",
        f"--workdir={tmp_path / 'run'}",
    )
    assert done.returncode == 2 and "optimizer.learning_rate must be in" in done.stderr
    assert not (own_cache / "split").exists()
