"""python -m adaptive_jax score as a Unix user meets it: files and pipes, columns and JSON, one
line for bad input.
"""

import bz2
import gzip
import io
import json
import lzma
import re
import sys
import zipfile
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import adaptive_jax
from adaptive_jax.data.corpora.line_files import TextFiles
from adaptive_jax.data.vocabulary.subwords import Subwords
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.files import escaped
from adaptive_jax.text import generate_command, score_command
from adaptive_jax.text import load as load_module
from tests import refuses


def test_control_characters_do_not_reach_a_terminal():
    """A corpus could clear the screen of whoever scored it; files get text as it is."""
    terminal = SimpleNamespace(isatty=lambda: True)
    assert escaped("a\x1b[2Jb\tc\r\n", terminal) == "a\\x1b[2Jb\tc\\r\n"
    assert escaped("a\x1b[2Jb", SimpleNamespace(isatty=lambda: False)) == "a\x1b[2Jb"


def test_control_characters_of_generated_json(monkeypatch):
    """JSON escapes those below a space, and left the others, such as the 8-bit CSI."""
    monkeypatch.setattr(sys, "stdout", terminal := io.StringIO())
    terminal.isatty = lambda: True
    text = SimpleNamespace(text="a\x9b2J", log_prob=0.0, tokens=[1])
    generate_command.show(SimpleNamespace(continuations=lambda: [text]), "", 1, "jsonl")
    assert "\x9b" not in terminal.getvalue() and r"a\x9b2J" in terminal.getvalue()


def zipped(content):
    """An archive of one file."""
    with zipfile.ZipFile(packed := io.BytesIO(), "w") as archive:
        archive.writestr("text.txt", content)
    return packed.getvalue()


PACKED = {"a.gz": gzip.compress, "a.xz": lzma.compress, "a.bz2": bz2.compress, "a.zip": zipped}
LINES = "the t1w1 the t1w2\n\nthe t5w0\nt3w3 <eos> the\n"


@pytest.fixture
def command(trained):
    return "-m", "adaptive_jax", "score", f"--workdir={trained}"


@pytest.fixture
def score(in_process, command):
    """`score(*flags, given=text)`: the command on the small run."""
    return lambda *flags, **given: in_process(*command, *flags, **given)


@pytest.fixture(scope="module")
def model(trained):
    return adaptive_jax.load(trained)


def test_lines_from_a_pipe_and_from_files(quick_command, command, score, model, tmp_path):
    """In order, a line for each, the last one without a line feed too; compressed or not."""
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + LINES.encode())
    for name, compress in PACKED.items():
        (tmp_path / name).write_bytes(compress(b"the t5w0"))
    expected = "".join(
        f"{line.log_prob:.4f}\t{line.text}\n"
        for line in model.score([*LINES.splitlines(), *["the t5w0"] * len(PACKED)])
    )
    done = quick_command(*command, tmp_path / "a.txt", *(tmp_path / name for name in PACKED))
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")
    typed = LINES + "the t5w0\n" * len(PACKED)
    found = score("--line_buffered", "-", given=typed).stdout
    log_probs, lines = zip(*(line.split("\t") for line in found.splitlines()), strict=True)
    assert [*lines] == typed.splitlines()
    # Lines that are scored alone are rounded otherwise than lines that are scored together.
    together = [float(line.split("\t")[0]) for line in expected.splitlines()]
    np.testing.assert_allclose([*map(float, log_probs)], together, atol=1.01e-4)


def test_a_bar_leaves_the_output_alone(quick_command, trained, tmp_path):
    """If stderr is a terminal and stdout is not, the bar is on one and the lines on the other."""
    (tmp_path / "a.txt").write_text("the t5w0\n" * 70)
    program = """
import sys
from adaptive_jax.__main__ import main
sys.stderr.isatty = lambda: True
main("score")
"""
    done = quick_command("-c", program, f"--workdir={trained}", tmp_path / "a.txt")
    assert [line.split("\t")[1] for line in done.stdout.splitlines()] == ["the t5w0"] * 70
    assert "630/630" in done.stderr and "t5w0" not in done.stderr


@pytest.mark.parametrize("diverged", [False, True])
def test_warnings_and_errors_about_scores(score, monkeypatch, caplog, diverged):
    """It warns of text that the run does not know, and ends with an error if the model gives no
    numbers.
    """
    open_model, factor = load_module.load, float("nan") if diverged else 1.0

    def load(*arguments):
        run = open_model(*arguments).run
        words = ["<unk>" if word == "t0w9" else word for word in run.vocabulary.words]
        params = jax.tree.map(lambda a: a * factor, run.params)
        vocabulary = Vocabulary(words, run.vocabulary.counts)
        return load_module.LoadedModel(run.with_parts(vocabulary=vocabulary, params=params))

    monkeypatch.setattr(load_module, "load", load)
    done = score("--words", "--columns=surprisal,unseen", given="no such\nthe the t1w1\n")
    rows = [line.split("\t")[2:] for line in done.stdout.splitlines()[1:]]
    assert [(row[0], row[2]) for row in rows] == [
        *[("no", "1"), ("such", "1"), ("<eos>", "0")],
        *[(word, "0") for word in ("the", "the", "t1w1", "<eos>")],
    ]
    assert [row[1] == "inf" for row in rows] == [diverged] * 7
    if diverged:
        refused = "error: 7 of 7 words have no finite score: the model has diverged"
        assert done.returncode == 2 and done.stderr.startswith(refused)
    else:
        assert (done.returncode, done.stderr) == (0, "")
        assert [r.getMessage() for r in caplog.records if r.name.endswith("unseen")] == [
            "28.6% of the words are unseen and read as <unk>: is the text tokenised as in training?"
        ]


def test_words_in_columns_and_as_json(score, model):
    """The same numbers, of one running text."""
    lines = list(model.score(LINES.splitlines(), "previous", rank_and_entropy=True))
    columns = ["line", "position", "word", "surprisal", "rank", "entropy", "frequency", "unseen"]
    units = {"surprisal": "surprisal_bits", "entropy": "entropy_bits"}
    expected = [
        (number, position, *row)
        for number, line in enumerate(lines, 1)
        for position, row in enumerate(
            zip(
                line.words,
                -line.log_probs / np.log(2),
                line.ranks,
                line.entropies / np.log(2),
                line.frequencies,
                line.unseen,
                strict=True,
            ),
            1,
        )
    ]
    done = score("--words", "--bits", "--context_from=previous", given=LINES)
    header, *rows = (line.split("\t") for line in done.stdout.splitlines())
    assert done.returncode == 0
    places = ["start", "end", "text", "file"]
    assert header == [units.get(name, name) for name in columns] + places
    texts = LINES.splitlines()
    for row, values in zip(rows, expected, strict=True):
        *row, start, end, form, file = row
        assert (file, form) == ("-", texts[values[0] - 1][int(start) : int(end)])
        assert form == (values[2] if values[2] != "<eos>" or form else "")
        assert row[:3] == list(map(str, values[:3]))
        np.testing.assert_allclose([float(cell) for cell in row[3:]], values[3:], atol=6e-5)
    flags = "--words", "--columns=surprisal,unseen", "--context_from=previous", "--format=jsonl"
    done = score(*flags, given=LINES)
    for row, values in zip(map(json.loads, done.stdout.splitlines()), expected, strict=True):
        assert list(row) == [*columns[:4], "unseen"] and row["unseen"] is bool(values[7])
        assert row["surprisal"] == pytest.approx(values[3] * np.log(2), abs=1e-5)
    done = score("--format=jsonl", given=LINES)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(each["text"], each["words"], each["unseen"]) for each in found] == [
        ("the t1w1 the t1w2", 5, 0),
        ("", 1, 0),
        ("the t5w0", 3, 0),
        ("t3w3 <eos> the", 4, 0),
    ]


def test_a_table_of_sentences(score, model, tmp_path):
    """A study kept its other columns in a second file, which had to be joined by hand."""
    table = 'item,sentence,kind\n1,the t1w1 t1w2,a\n2,"the\nthe t5w0","b\tc"\n'
    (tmp_path / "items.csv").write_text(table)
    texts = ["the t1w1 t1w2", "the\nthe t5w0"]
    flags = "--text_column=sentence", tmp_path / "items.csv"
    expected = [*model.score(texts)]
    header, *rows = (line.split("\t") for line in score(*flags).stdout.splitlines())
    assert header == ["log_prob_nats", "item", "kind", "sentence"]
    assert [row[1:] for row in rows] == [["1", "a", texts[0]], ["2", "b c", "the the t5w0"]]
    for row, line in zip(rows, expected, strict=True):
        assert float(row[0]) == pytest.approx(line.log_prob, abs=1e-4)
    header, *rows = (line.split("\t") for line in score("--by=word", *flags).stdout.splitlines())
    assert header[:6] == ["item", "kind", "line", "position", "word", "surprisal_nats"]
    words = ["the", "t1w1", "t1w2", "<eos>", "the", "<eos>", "the", "t5w0", "<eos>"]
    assert [row[4] for row in rows] == words
    assert [row[:3] for row in rows] == [["1", "a", "1"]] * 4 + [["2", "b c", "2"]] * 5
    assert score("--text_column=text", tmp_path / "items.csv").returncode == 2
    for row in "3,the, t1w1,a\n", "3,the\n":  # a comma in a text cut it in silence
        (tmp_path / "ragged.csv").write_text(table + row)
        done = score("--text_column=sentence", tmp_path / "ragged.csv")
        assert done.returncode == 2 and "ragged.csv, row 3" in done.stderr
    (tmp_path / "twice.csv").write_text(table.replace("kind", "item"))
    done = score("--text_column=sentence", tmp_path / "twice.csv")  # the last one won in silence
    assert done.returncode == 2 and "['item', 'sentence', 'item']" in done.stderr
    (tmp_path / "other.csv").write_text("kind,item,sentence\na,3,the\n")
    done = score(*flags, tmp_path / "other.csv")  # its cells stood under the first one's names
    assert done.returncode == 2 and "other.csv" in done.stderr and "'kind', 'item'" in done.stderr
    (tmp_path / "items.csv").write_text(table.replace("kind", "end"))
    done = score("--words", *flags)
    assert done.returncode == 2 and "'end'" in done.stderr
    # Of these the scores were lost, or had a name that stood twice.
    for column, form in ("words", "jsonl"), ("text", "jsonl"), ("log_prob_nats", "tsv"):
        (tmp_path / "items.csv").write_text(table.replace("kind", column))
        done = score(f"--format={form}", *flags)
        assert (done.returncode, done.stdout) == (2, "") and repr(column) in done.stderr
    # Names are compared as they are printed, with the unit in a header.
    for column, form, status in (
        ("surprisal_bits", "tsv", 2),
        ("surprisal", "tsv", 0),
        ("surprisal", "jsonl", 2),
        ("surprisal_bits", "jsonl", 0),
    ):
        (tmp_path / "items.csv").write_text(table.replace("kind", column))
        done = score("--bits", "--columns=surprisal", f"--format={form}", *flags)
        assert done.returncode == status and (repr(column) in done.stderr) == (status == 2)


def test_after_the_text_of_a_file(score, model, tmp_path):
    """`--context_from=FILE` is `given` in Python."""
    (tmp_path / "before.txt").write_text("the t5w1 the t5w2 the")
    expected = [
        line.log_prob for line in model.score(["t5w0", "t1w1"], given="the t5w1 the t5w2 the")
    ]
    done = score(f"--context_from={tmp_path / 'before.txt'}", given="t5w0\nt1w1\n")
    np.testing.assert_allclose(
        [float(line.split("\t")[0]) for line in done.stdout.splitlines()], expected, atol=6e-5
    )
    assert expected[0] > expected[1]  # the model keeps to a topic


WRONG = [
    ([], "", "there is no text to score"),
    ([], "the unheard\n", "'unheard' is not one of the 122 words"),
    (["/nowhere.txt"], "", "cannot read /nowhere.txt: No such file"),
    (["--window=8", "--context=8"], "the\n", "window=8 must be greater than context=8"),
    (["--columns=surprisal,surprisal"], "the\n", "two columns are called 'surprisal_nats'"),
    (["--columns=surprise"], "the\n", 'Did you mean "surprisal"?'),
    (["--context_from=previos"], "the\n", 'a file that exists. Did you mean "previous"?'),
]


def test_bad_input_is_one_line(score):
    """Status 2, one line, and nothing printed that a pipe would read."""
    for flags, given, says in WRONG:
        done = score(*flags, given=given)
        assert (done.returncode, done.stdout) == (2, "") and says in done.stderr
        assert re.fullmatch(r"error: .{1,200}\n", done.stderr), done.stderr


def test_columns_of_sub_word_units():
    """They have surprisal alone."""
    words = Subwords.build({"low": 5, "lower": 2, "<eos>": 4}, codes=2)
    with refuses("--columns='rank'"):
        score_command.columns_of(words, score_command.Score(columns=("rank",)))


def test_columns_of_a_list_of_words():
    """Every word of a converted list had frequency 1."""
    words = Vocabulary(("the", "<eos>"), np.ones(2, np.int64))
    columns = score_command.columns_of(words, score_command.Score(words=True))
    assert columns == tuple(name for name in score_command.NAMES if name != "frequency")
    with refuses("--columns='frequency'"):
        score_command.columns_of(words, score_command.Score(columns=("frequency",)))


def test_archives_of_one_file(tmp_path):
    """A .zip of several files is refused: all but the first were left out in silence."""
    for name, members in ("one.zip", ["dir/", "dir/a.txt"]), ("two.zip", ["a.txt", "b.txt"]):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for member in members:
                archive.writestr(member, "the\n" * (member[-1] != "/"))
    assert list(TextFiles([tmp_path / "one.zip"])) == ["the"]
    with refuses("two.zip", "2 files"):
        list(TextFiles([tmp_path / "two.zip"]))


def test_lines_of_windows(tmp_path):
    """Their carriage returns were part of the text that `score` and `generate` write out."""
    (tmp_path / "a.txt").write_bytes(b"the\r\n\r\nhat\rcat\r\nend")
    assert list(TextFiles([tmp_path / "a.txt"])) == ["the", "", "hat\rcat", "end"]


def test_bytes_that_are_no_text(tmp_path):
    """Files that are not UTF-8 or have a NUL byte, and compressed ones that are cut or changed."""
    flipped = bytearray(gzip.compress(np.random.default_rng(0).bytes(500).hex().encode()))
    flipped[200] ^= 1
    for name, content, *names in (
        ("latin.txt", b"the\nt1w1\n\xff\n", "line 3", "UTF-8"),
        ("nul.txt", b"the\n\0\n", "line 2", "NUL"),
        ("half.gz", gzip.compress(b"the t1w1\n" * 20)[:-12]),
        ("flipped.gz", flipped),
    ):
        (tmp_path / name).write_bytes(content)
        with refuses(name, *names):
            list(TextFiles([tmp_path / name]))
