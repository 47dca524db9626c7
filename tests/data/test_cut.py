"""The command that cuts texts for evaluations on other domains."""

import gzip

import pytest

from adaptive_jax.data.cut import cut
from adaptive_jax.errors import InputError


@pytest.fixture
def text(tmp_path):
    """A packed file of 40 lines of four words each, five with the line's end."""
    path = tmp_path / "news.en.shuffled.gz"
    path.write_bytes(gzip.compress("".join(f"Line {i} , über\n" for i in range(40)).encode()))
    return path


def numbers(path):
    return [int(line.split()[1]) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("sizes, expected", [
    ({"words": (20, 10, 1000)}, ([0, 1, 2, 3], [4, 5], list(range(6, 40)))),
    ({"words": (21, 1, 5)}, ([0, 1, 2, 3, 4], [5], [6])),
    ({"lines": (3, 1, 2)}, ([0, 1, 2], [3], [4, 5]))])
def test_parts_follow_each_other(text, tmp_path, sizes, expected):
    """Whole lines, until there are enough words, `<eos>` among them, or lines."""
    counts = cut(text, tmp_path / "out", **sizes)
    assert tuple(numbers(tmp_path / "out" / f"{name}.txt") for name in ("train", "valid", "test")) == expected
    assert counts == {split: 5 * len(part) for split, part in zip(("train", "validation", "test"), expected, strict=True)}


def test_each_part_is_shuffled_by_itself(text, tmp_path):
    """The same lines in another order, the same one for the same seed."""
    for out in ("one", "two"):
        cut(text, tmp_path / out, (100, 50, 50), seed=3)
    parts = [numbers(tmp_path / "one" / f"{name}.txt") for name in ("train", "valid", "test")]
    assert list(map(sorted, parts)) == [list(range(20)), list(range(20, 30)), list(range(30, 40))] and parts[0] != sorted(parts[0])
    assert (tmp_path / "one" / "train.txt").read_bytes() == (tmp_path / "two" / "train.txt").read_bytes()


def test_of_a_corpus_with_splits_each_beginning_is_taken(tmp_path):
    """By any of the names that its files may have."""
    (tmp_path / "wikitext").mkdir()
    for name in ("train", "valid", "test"):
        (tmp_path / "wikitext" / f"wiki.{name}.raw").write_text(f"{name} 1\n{name} 2\n{name} 3\n")
    cut(tmp_path / "wikitext", tmp_path / "out", (3, 6, 100))
    assert [numbers(tmp_path / "out" / f"{name}.txt") for name in ("train", "valid", "test")] == [[1], [1, 2], [1, 2, 3]]


@pytest.mark.parametrize("arguments, says", [
    (["news.gz", "--output=out"], "there is no news.gz"), (["--output=out"], "TEXT"),
    (["TEXT", "--output=out", "--words=3,5"], "must be three numbers"),
    (["TEXT", "--output=out", "--words=1000,5,5"], "no text left for the validation split")])
def test_wrong_commands(quick_command, text, tmp_path, arguments, says):
    """One line, status 2."""
    given = [str(text) if each == "TEXT" else each for each in arguments]
    done = quick_command("-m", "adaptive_jax.data.cut", *given, cwd=tmp_path)
    assert done.returncode == 2 and says in done.stderr and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_the_command_says_what_it_wrote(quick_command, text, tmp_path):
    """Words of each part."""
    done = quick_command("-m", "adaptive_jax.data.cut", text, "--output=out", "--lines=3,2,1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "out: train 15 words, validation 10 words, test 5 words\n"), done.stderr


def test_too_short_a_text(tmp_path):
    """Told with the split that gets nothing."""
    (tmp_path / "short.txt").write_text("one\n")
    with pytest.raises(InputError, match="no text left for the validation split"):
        cut(tmp_path / "short.txt", tmp_path / "out")
