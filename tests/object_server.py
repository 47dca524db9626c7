"""A server that keeps objects in memory and speaks what tensorstore asks of Google Cloud
Storage and of Amazon S3.
"""

import contextlib
import http.server
import itertools
import json
import re
import threading
import urllib.parse
from xml.sax.saxutils import escape


class Objects:
    """What a server keeps: `{(bucket, key): (generation, content)}`.

    stop_at: a write whose name ends so is never answered, and sets `stopped`.
    """

    def __init__(self):
        self.objects, self.stop_at, self.stopped = {}, None, threading.Event()
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
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def handle_any(self):
        parts = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        store, name = self.server.store, query.get("name", urllib.parse.unquote(parts.path))
        if self.command in ("POST", "PUT") and store.stop_at and name.endswith(store.stop_at):
            store.stopped.set()
            self.close_connection = True
            return
        with store.lock:
            if found := re.fullmatch(r"(/upload)?/storage/v1/b/([^/]+)/o(?:/(.+))?", parts.path):
                self.google(
                    *map(urllib.parse.unquote, (found[2], found[3] or query.get("name", ""))),
                    query,
                    body,
                )
            else:
                bucket, _, key = urllib.parse.unquote(parts.path).lstrip("/").partition("/")
                self.amazon(bucket, key, query, body)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = handle_any

    def google(self, bucket, key, query, body):
        store = self.server.store
        if not key:
            first, end = query.get("startOffset", ""), query.get("endOffset")
            names = [
                name
                for name in store.names(bucket)
                if name.startswith(query.get("prefix", "")) and name >= first
            ]
            items = [{"name": name, "size": "0"} for name in names if end is None or name < end]
            return self.answer(
                200, json.dumps({"items": items}).encode(), Content_Type="application/json"
            )
        generation, content = store.objects.get((bucket, key), (0, b""))
        if int(query.get("ifGenerationMatch", generation)) != generation:
            return self.answer(412)
        if self.command == "POST":
            store.objects[bucket, key] = next(store.generations), body
            made = {
                "name": key,
                "generation": str(store.objects[bucket, key][0]),
                "size": str(len(body)),
            }
            return self.answer(200, json.dumps(made).encode(), Content_Type="application/json")
        if not generation:
            return self.answer(404)
        if self.command == "DELETE":
            del store.objects[bucket, key]
            return self.answer(204)
        if int(query.get("ifGenerationNotMatch", -1)) == generation:
            return self.answer(304)
        return self.content(content, x_goog_generation=generation)

    def amazon(self, bucket, key, query, body):
        store = self.server.store
        if not key:
            after = query.get("start-after", "")
            names = [
                name
                for name in store.names(bucket)
                if name.startswith(query.get("prefix", "")) and name > after
            ]
            listed = "".join(
                f"<Contents><Key>{escape(name)}</Key><Size>0</Size></Contents>" for name in names
            )
            text = (
                "<ListBucketResult><IsTruncated>false</IsTruncated>"
                f"<KeyCount>{len(names)}</KeyCount>{listed}</ListBucketResult>"
            )
            return self.answer(
                200, text.encode(), Content_Type="application/xml", x_amz_bucket_region="us-east-1"
            )
        generation, content = store.objects.get((bucket, key), (0, b""))
        tag = f'"{generation}"'
        if self.command != "PUT" and not generation:
            return self.answer(404)
        if self.headers.get("If-Match", tag) != tag or (
            generation and self.headers.get("If-None-Match") == "*"
        ):
            return self.answer(412)
        if self.command == "PUT":
            store.objects[bucket, key] = next(store.generations), body
            return self.answer(200, ETag=f'"{store.objects[bucket, key][0]}"')
        if self.command == "DELETE":
            del store.objects[bucket, key]
            return self.answer(204)
        if self.headers.get("If-None-Match") == tag:
            return self.answer(304)
        return self.content(content, ETag=tag)

    def content(self, content, **headers):
        found = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not found:
            return self.answer(200, content, **headers)
        size = len(content)
        first, last = (
            (int(found[1]), int(found[2] or size - 1))
            if found[1]
            else (max(0, size - int(found[2])), size - 1)
        )
        last = min(last, size - 1)
        if first > last:
            return self.answer(416, **headers)
        return self.answer(
            206, content[first : last + 1], Content_Range=f"bytes {first}-{last}/{size}", **headers
        )


@contextlib.contextmanager
def serving():
    """Yields `Objects` and the variables by which tensorstore finds the server in place of the
    stores.
    """
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.store, url = Objects(), f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield (
            server.store,
            {
                "TENSORSTORE_GCS_HTTP_URL": url,
                "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
                "AWS_ENDPOINT_URL": url,
                "AWS_ACCESS_KEY_ID": "id",
                "AWS_SECRET_ACCESS_KEY": "key",
                "AWS_REGION": "us-east-1",
                "AWS_EC2_METADATA_DISABLED": "true",
            },
        )
        server.shutdown()
