"""Downloads of published corpora."""

import gzip
import http.server
import os
import re
import threading
from pathlib import Path

import pytest

from adaptive_jax.data.corpora import download as downloads
from adaptive_jax.errors import InputError


@pytest.fixture
def text(tmp_path):
    """A packed file of 40 lines of four words each, five with the line's end."""
    path = tmp_path / "news.en.shuffled.gz"
    path.write_bytes(gzip.compress("".join(f"Line {i} , über\n" for i in range(40)).encode()))
    return path


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


def test_an_address_that_does_not_answer(site, tmp_path):
    """One line with the reason and the cure."""
    _, address = site
    with pytest.raises(InputError, match="names no file"):
        downloads.download("https://example.com/texts/", tmp_path)
    with pytest.raises(InputError, match="cannot download http://.x/news.gz"):
        downloads.download("http://[x/news.gz", tmp_path)
    with pytest.raises(InputError, match="cannot write data.cache=/proc/x.*: No such file"):
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
