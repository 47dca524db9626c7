"""A server that corpora are downloaded from."""

import functools
import http.server
import threading

import pytest


@pytest.fixture
def served(tmp_path):
    """A folder and its address on loopback."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    folder = tmp_path / "served"
    folder.mkdir()
    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True).start()
        yield folder, f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
