"""The command that cuts texts for evaluations on other domains."""

import gzip
import http.server
import os
import re
import threading
from pathlib import Path

import pytest

from adaptive_jax.data.corpora import cut as command
from adaptive_jax.data.corpora import download as downloads
from adaptive_jax.data.corpora.cut import cut
from adaptive_jax.errors import InputError


@pytest.fixture
def text(tmp_path):
    """A packed file of 40 lines of four words each, five with the line's end."""
    path = tmp_path / "news.en.shuffled.gz"
    path.write_bytes(gzip.compress("".join(f"Line {i} , über\n" for i in range(40)).encode()))
    return path


def numbers(path):
    return [int(line.split()[1]) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ({"sizes": (20, 10, 1000)}, ([0, 1, 2, 3], [4, 5], list(range(6, 40)))),
        ({"sizes": (21, 1, 5)}, ([0, 1, 2, 3, 4], [5], [6])),
        ({"sizes": (3, 1, 2), "by_lines": True}, ([0, 1, 2], [3], [4, 5])),
    ],
)
def test_parts_follow_each_other(text, tmp_path, sizes, expected):
    """Whole lines, until there are enough words, `<eos>` among them, or lines."""
    counts = cut(text, tmp_path / "out", **sizes)
    assert (
        tuple(numbers(tmp_path / "out" / f"{name}.txt") for name in ("train", "valid", "test"))
        == expected
    )
    assert counts == {
        split: 5 * len(part)
        for split, part in zip(("train", "validation", "test"), expected, strict=True)
    }


def test_each_part_is_shuffled_by_itself(text, tmp_path):
    """The same lines in another order, the same one for the same seed."""
    for out in ("one", "two"):
        cut(text, tmp_path / out, (100, 50, 50), seed=3)
    parts = [numbers(tmp_path / "one" / f"{name}.txt") for name in ("train", "valid", "test")]
    assert list(map(sorted, parts)) == [
        list(range(20)),
        list(range(20, 30)),
        list(range(30, 40)),
    ] and parts[0] != sorted(parts[0])
    assert (tmp_path / "one" / "train.txt").read_bytes() == (
        tmp_path / "two" / "train.txt"
    ).read_bytes()


def test_of_a_corpus_with_splits_each_beginning_is_taken(tmp_path, caplog):
    """By any of the names that its files may have. A part that the text does not fill is told."""
    (tmp_path / "wikitext").mkdir()
    for name in ("train", "valid", "test"):
        (tmp_path / "wikitext" / f"wiki.{name}.raw").write_text(f"{name} 1\n{name} 2\n{name} 3\n")
    cut(tmp_path / "wikitext", tmp_path / "out", (3, 6, 100))
    assert [numbers(tmp_path / "out" / f"{name}.txt") for name in ("train", "valid", "test")] == [
        [1],
        [1, 2],
        [1, 2, 3],
    ]
    assert caplog.messages == ["the text ended: the test split has 9 of 100 words"]


def test_a_cut_that_fails_leaves_what_was_there(text, tmp_path):
    """A text that is too short, and a directory that holds anything, of which nothing changes."""
    with pytest.raises(InputError, match="no text left for the test split"):
        cut(text, tmp_path / "out", (100, 100, 9))
    assert {path.name for path in tmp_path.iterdir()} == {text.name}
    (tmp_path / "docs").mkdir()
    (tmp_path / "link").symlink_to("docs")
    cut(text, tmp_path / "link", (5, 5, 5))  # an empty one is new
    before = (tmp_path / "docs" / "train.txt").read_bytes()
    for output in tmp_path / "docs", text:
        with pytest.raises(InputError, match=rf"--output={output} already exists: use a new"):
            cut(text, output, (10, 5, 5))
    assert (tmp_path / "docs" / "train.txt").read_bytes() == before


def test_files_of_a_directory_end_their_last_lines(tmp_path):
    """Where a line feed is missing, the next file still begins a line; a byte order mark is no
    letter; an editor's backup is not read; JSON is not taken for text.
    """
    for name in ("train", "valid", "test"):
        (tmp_path / "in" / name).mkdir(parents=True)
        for i in range(3):
            content = "\ufeff" * (i == 1) + f"{name} {i}"
            (tmp_path / "in" / name / f"{i}.txt").write_text(content)
        (tmp_path / "in" / name / "1.txt~").write_text("as it was")
    cut(tmp_path / "in", tmp_path / "out", (3, 2, 1), by_lines=True)
    assert (tmp_path / "out" / "train.txt").read_text() == "train 0\ntrain 1\ntrain 2\n"
    (tmp_path / "in" / "train" / "0.txt").rename(tmp_path / "in" / "train" / "0.jsonl")
    with pytest.raises(InputError, match="train/0.jsonl holds JSON, not text"):
        cut(tmp_path / "in", tmp_path / "again", (3, 2, 1), by_lines=True)


class Server(http.server.BaseHTTPRequestHandler):
    """Serves one file, with ranges; the first answer ends in its middle. asked: path and range
    of each request.
    """

    content, asked, ranges, version = b"", [], True, '"1"'

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        asked = self.headers["Range"]
        self.asked.append((self.path, asked))
        if not self.path.partition("?")[0].endswith("/news.2007.en.shuffled.gz"):
            return self.send_error(404)
        same = self.ranges and self.headers.get("If-Range", self.version) == self.version
        begin = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and same else 0
        if begin >= len(self.content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(self.content)}")
            return self.end_headers()
        self.send_response(206 if begin else 200)
        self.send_header("ETag", self.version)
        self.send_header("Content-Length", str(len(self.content) - begin))
        self.end_headers()
        stop = len(self.content) // 2 if len(self.asked) == 1 else None
        self.wfile.write(self.content[begin:stop])


@pytest.fixture
def site(text, monkeypatch):
    """The class of the server, and the address of its file."""
    monkeypatch.setattr(Server, "content", text.read_bytes())
    monkeypatch.setattr(Server, "asked", [])
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as httpd:
        threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True).start()
        yield Server, f"http://127.0.0.1:{httpd.server_port}/news.{{}}.en.shuffled.gz"
        httpd.shutdown()


def test_a_download_resumes(site, text, tmp_path, monkeypatch):
    """Within one call, in a later one, of a server without ranges, and where only the last name
    was missing; then never again.
    """
    served, address = site
    address, half = address.format(2007), len(served.content) // 2
    assert downloads.download(address, tmp_path / "a").read_bytes() == served.content
    assert downloads.download(address, tmp_path / "a").name == "news.2007.en.shuffled.gz"
    assert [asked for _, asked in served.asked] == [None, f"bytes={half}-"]
    monkeypatch.setattr(downloads, "TRIES", 1)
    served.asked.clear()
    with pytest.raises(
        InputError,
        match=rf"cannot download .* \(it ended after {half} of {len(served.content)} bytes\): try",
    ):
        downloads.download(address, tmp_path / "b")
    found = downloads.download(address, tmp_path / "b")
    part = found.with_name(f"{found.name}.part")
    assert found.read_bytes() == served.content
    found.rename(part)
    (version := part.with_suffix(".version")).write_text(served.version)
    assert downloads.download(address, tmp_path / "b").read_bytes() == served.content
    assert [asked for _, asked in served.asked] == [
        None,
        f"bytes={half}-",
        f"bytes={len(served.content)}-",
    ]
    for what, other in ("ranges", False), ("ranges", True), ("version", '"2"'):
        monkeypatch.setattr(served, what, other)
        found.rename(part)
        part.write_bytes(b"another file")
        version.write_text('"1"' if what == "version" or not other else "")
        if other is True:  # a server that names no versions: what is too long is begun again
            part.write_bytes(served.content + b"x")
            with pytest.raises(InputError, match="416"):
                downloads.download(address, tmp_path / "b")
        assert downloads.download(address, tmp_path / "b").read_bytes() == served.content
    named = downloads.download(f"{address}?name=/x", tmp_path / "c")
    assert named.name == "news.2007.en.shuffled.gz" and os.listdir(named.parent) == [
        named.name,
        f".{named.name}.lock",
    ]


def test_addresses_that_end_in_one_name(site, own_cache, monkeypatch):
    """Each has its own file: one was taken for the other, and the rest of one appended to the
    beginning of the other.
    """
    served, address = site
    monkeypatch.setattr(downloads, "TRIES", 1)
    address, other = address.format(2007), address.format(2007).replace("/news", "/b/news")
    with pytest.raises(InputError, match="it ended after"):
        command._text(address)
    assert command._text(other).read_bytes() == served.content
    assert [asked for _, asked in served.asked] == [None, None]
    assert command._text(address) != command._text(other)


def test_an_address_that_does_not_answer(site, tmp_path):
    """One line with the reason and the cure; the addresses are those of the years that the
    paper has.
    """
    _, address = site
    with pytest.raises(InputError, match="names no file"):
        downloads.download("https://example.com/texts/", tmp_path)
    with pytest.raises(InputError, match="cannot download http://.x/news.gz"):
        downloads.download("http://[x/news.gz", tmp_path)
    with pytest.raises(InputError, match="cannot write the cache /proc/x.*: No such file"):
        downloads.download("https://example.com/news.gz", Path("/proc/x"))
    for wrong, reason in (
        (address.format(2006), "Not Found"),
        ("http://127.0.0.1:9/news.gz", "refused"),
    ):
        with pytest.raises(
            InputError, match=rf"cannot download {wrong} \(.*{reason}.*\): try again"
        ) as error:
            downloads.download(wrong, tmp_path / "a")
        assert len(str(error.value)) < 200
    assert [name[-4:] for name in command.NEWS_CRAWL] == ["2007", "2008", "2009", "2010", "2011"]
    assert all(year[-4:] in address for year, address in command.NEWS_CRAWL.items())


def test_a_year_is_downloaded_and_cut(site, quick_command, tmp_path):
    """By the command, from an address, too; another year is no name."""
    _, address = site
    arguments = (
        address.format(2007),
        "--output=out",
        f"--cache_dir={tmp_path / 'cache'}",
        "--lines=3,2,1",
    )
    done = quick_command("-m", "adaptive_jax", "cut", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (
        0,
        "out: train 15 words, validation 10 words, test 5 words\n",
    ), done.stderr
    assert list((tmp_path / "cache" / "downloads").glob("*/news.2007.en.shuffled.gz"))
    done = quick_command(
        "-m", "adaptive_jax", "cut", "news_crawl_2006", "--output=other", cwd=tmp_path
    )
    assert done.returncode == 2 and "TEXT=news_crawl_2006 is not one of" in done.stderr


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["news.gz", "--output=out"], "news.gz does not exist"),
        (["--output=out"], "TEXT"),
        (
            ["TEXT", "--output=out", "--words=3,5"],
            "--words and --lines must be three numbers, 1 or more, got 3,5: use",
        ),
        (["TEXT", "--output=out", "--lines=3,x,5"], "must be three numbers, 1 or more, got 3,x,5"),
        (["TEXT", "--output=out", "--words=3,5,0"], "must be three numbers, 1 or more, got 3,5,0"),
        (["TEXT", "--output=out", "--words=3,5,5", "--lines=3,5,5"], "are both given"),
        (["TEXT", "--output=."], "--output=. already exists"),
        (["binary", "--output=out"], "binary, line 2: not UTF-8"),
        (["zeros", "--output=out"], "zeros, line 1: a NUL byte"),
        (["TEXT", "--output=out", "--words=1000,5,5"], "no text left for the validation split"),
    ],
)
def test_wrong_commands(quick_command, text, tmp_path, arguments, says):
    """One line, status 2, and nothing is written."""
    (tmp_path / "binary").write_bytes(b"fine\n\xff\xfe\n")
    (tmp_path / "zeros").write_bytes(b"a\0b\n")
    given = [str(text) if each == "TEXT" else each for each in arguments]
    done = quick_command("-m", "adaptive_jax", "cut", *given, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and says in done.stderr
    assert not (tmp_path / "out").exists()
