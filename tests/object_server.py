"""A server that keeps objects in memory and speaks what tensorstore, gcsfs and google-cloud-storage
ask of Google Cloud Storage.
"""

import contextlib
import hashlib
import http.server
import itertools
import json
import re
import threading
import urllib.parse
from base64 import b64encode


class Objects:
    """Kept objects: `{(bucket, key): (generation, content)}`.

    stop_at: a write whose name ends so is never answered, and sets `stopped`.
    forbidden: the name of a bucket that nobody may read.
    fault: a pattern of "METHOD /path?query" and the status of its answer; 0: it is never answered.
    """

    forbidden = "private"

    def __init__(self):
        self.objects, self.stop_at, self.stopped = {}, None, threading.Event()
        self.fault = None
        self.lock, self.generations = threading.Lock(), itertools.count(1)

    def names(self, bucket):
        """The keys of a bucket, sorted."""
        return sorted(key for own, key in self.objects if own == bucket)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version, wbufsize, disable_nagle_algorithm = (
        "HTTP/1.1",
        1 << 16,
        True,
    )  # or each answer takes 40 ms

    def log_message(self, *_):
        pass

    def answer(self, status, content=b"", **headers):
        if isinstance(content, dict):
            content, headers = json.dumps(content).encode(), {"Content_Type": "application/json"}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def handle_any(self):
        store, parts = self.server.store, urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if store.fault and re.search(store.fault[0], f"{self.command} {self.path}"):
            if not (status := store.fault[1]):
                return threading.Event().wait(5)
            about = {"error": {"code": status, "message": "denied"}}
            return self.answer(status, json.dumps(about).encode())
        pattern = r"(?:/upload|/download)?/storage/v1/b/([^/]+)(/o)?(?:/(.+))?"
        bucket, objects, key = re.fullmatch(pattern, parts.path).groups()
        key = urllib.parse.unquote(key or query.get("name", ""))
        if query.get("uploadType") == "multipart":
            key, body = parts_of(body, self.headers["Content-Type"])
        if query.get("uploadType") == "resumable":  # then everything follows at once
            place = f"{self.server.url}{self.path}".replace("=resumable", "=media")
            return self.answer(200, Location=place)
        if self.command == "POST" and store.stop_at and key.endswith(store.stop_at):
            store.stopped.set()
            self.close_connection = True
            return
        with store.lock:
            if bucket == store.forbidden:
                self.answer(403, b"no permission")
            elif objects is None:
                self.answer(200, {"kind": "storage#bucket", "name": bucket})
            elif key:
                self.object(bucket, key, query, body)
            else:
                self.list(bucket, query)

    do_GET = do_POST = do_DELETE = handle_any

    def list(self, bucket, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        first, end = query.get("startOffset", ""), query.get("endOffset")
        listed = {"kind": "storage#objects", "items": [], "prefixes": []}
        for name in self.server.store.names(bucket):
            if not name.startswith(prefix) or name < first or (end is not None and name >= end):
                continue
            folder, inside, _ = name.removeprefix(prefix).partition(delimiter or "\0")
            if not inside:
                listed["items"].append(self.about(bucket, name))
            elif prefix + folder + inside not in listed["prefixes"]:
                listed["prefixes"].append(prefix + folder + inside)
        self.answer(200, listed)

    def about(self, bucket, key):
        generation, content = self.server.store.objects[bucket, key]
        digest = b64encode(hashlib.md5(content).digest()).decode()
        time = dict.fromkeys(("timeCreated", "updated"), "2026-01-01T00:00:00.000Z")
        numbers = {"generation": str(generation), "size": str(len(content)), "md5Hash": digest}
        return {"name": key, "bucket": bucket} | numbers | time

    def object(self, bucket, key, query, body):
        store = self.server.store
        generation, content = store.objects.get((bucket, key), (0, b""))
        if int(query.get("ifGenerationMatch", generation)) != generation:
            return self.answer(412)
        if self.command == "POST":
            store.objects[bucket, key] = next(store.generations), body
            return self.answer(200, self.about(bucket, key))
        if not generation:
            return self.answer(404)
        if self.command == "DELETE":
            del store.objects[bucket, key]
            return self.answer(204)
        if query.get("alt") != "media":
            return self.answer(200, self.about(bucket, key))
        if int(query.get("ifGenerationNotMatch", -1)) == generation:
            return self.answer(304)
        span = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not span:
            return self.answer(200, content, x_goog_generation=generation)
        size = len(content)
        first = int(span[1]) if span[1] else max(0, size - int(span[2]))
        last = min(int(span[2]) if span[1] and span[2] else size - 1, size - 1)
        if first > last:
            return self.answer(416, x_goog_generation=generation)
        place = {"Content_Range": f"bytes {first}-{last}/{size}", "x_goog_generation": generation}
        self.answer(206, content[first : last + 1], **place)


def parts_of(body, content_type):
    """Name and content of an upload of two parts, the first of which is JSON."""
    boundary = b"--" + re.search(r'boundary="?([^";]+)', content_type)[1].encode()
    end = b"\r\n" if boundary + b"\r\n" in body else b"\n"
    about, rest = body.removeprefix(boundary).split(end + boundary, 1)
    content = rest[: rest.rindex(end + boundary)].split(2 * end, 1)[1]
    return json.loads(about.split(2 * end, 1)[1])["name"], content


@contextlib.contextmanager
def serving():
    """Yields `Objects` and the variables by which programs find the server in place of Google's."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.store, url = Objects(), f"http://127.0.0.1:{server.server_port}"
        server.url = url
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield (
            server.store,
            {
                "TENSORSTORE_GCS_HTTP_URL": url,
                "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
                "STORAGE_EMULATOR_HOST": url,
                "GOOGLE_CLOUD_PROJECT": "project",
                "NO_GCE_CHECK": "true",
                # It would ask Google what kind of bucket this is.
                "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            },
        )
        server.shutdown()
