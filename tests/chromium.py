"""A headless Chromium, driven through its debugging pipe: no other package is needed."""

import base64
import contextlib
import fcntl
import functools
import json
import os
import shutil
import subprocess
import time

NAMES = "chromium", "chromium-browser", "google-chrome", "chrome"
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
)
PATIENCE = 60.0  # seconds for an answer; the machine may be busy


@functools.cache
def found():
    """The path of a Chromium that starts, or None."""
    paths = filter(None, map(shutil.which, NAMES))
    return next(
        (
            path
            for path in paths
            if not subprocess.run([path, "--version"], capture_output=True).returncode
        ),
        None,
    )


class Page:
    """A tab that keeps what it was told of the console, of requests and of errors.

    messages: texts of the console and of its warnings and errors. requests: URLs that the page
        asked for.
    """

    def __init__(self, to, answers):
        self.to, self.answers, self.rest, self.number = to, answers, b"", 0
        self.messages, self.requests, self.session = [], [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in "Runtime", "Log", "Network", "Page":
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """Calls a method of the DevTools protocol and returns its result."""
        self.number += 1
        session = {"sessionId": self.session} if self.session else {}
        os.write(
            self.to,
            json.dumps(
                {"id": self.number, "method": method, "params": parameters} | session
            ).encode()
            + b"\0",
        )
        while (message := self._next()).get("id") != self.number:
            self._hear(message)
        assert "error" not in message, (method, message["error"])
        return message["result"]

    def open(self, path, width, dark):
        """Opens a file in a window of that width, in the dark or in the light, and waits until
        it is drawn.
        """
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Page.navigate", url=path.resolve().as_uri())
        while self.run("document.readyState") != "complete":
            time.sleep(0.05)

    def run(self, script):
        """The value of an expression in the page, or of its promise."""
        done = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def picture(self, path, whole=True):
        """Writes a PNG of the page."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole, format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    def point(self, selector):
        """Moves the mouse to the first element that a selector finds."""
        box = self.run(
            "(e => { e.scrollIntoView({block: 'center'}); const b ="
            " e.getBoundingClientRect();return [b.x + b.width / 2, b.y + b.height / 2]"
            f" }})(document.querySelector({json.dumps(selector)}))"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def _next(self):
        while b"\0" not in self.rest:
            os.set_blocking(self.answers, False)
            end = time.monotonic() + PATIENCE
            while True:
                with contextlib.suppress(BlockingIOError):
                    part = os.read(self.answers, 1 << 20)
                    break
                assert time.monotonic() < end, "Chromium does not answer"
                time.sleep(0.005)
            assert part, "Chromium has ended"
            self.rest += part
        line, _, self.rest = self.rest.partition(b"\0")
        return json.loads(line)

    def _hear(self, message):
        method, given = message.get("method"), message.get("params", {})
        if method == "Log.entryAdded":
            self.messages.append(given["entry"]["text"])
        elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.messages.append(json.dumps(given))
        elif method == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])


@contextlib.contextmanager
def opened(profile):
    """A page of a browser that keeps its files in the directory `profile`."""
    (read, to), (answers, write) = os.pipe(), os.pipe()
    given = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read, write)]
    # It reads from 3 and writes to 4.
    place = 'exec "$0" "$@" 3<&{} 4>&{}'.format(*given)
    command = [
        found(),
        *OPTIONS,
        f"--user-data-dir={profile}",
        "--remote-debugging-pipe",
        "about:blank",
    ]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    browser = subprocess.Popen(["bash", "-c", place, *command], pass_fds=given, **silent)
    for end in (read, write, *given):
        os.close(end)
    try:
        yield Page(to, answers)
    finally:
        browser.terminate()
        browser.wait(PATIENCE)
        os.close(to)
        os.close(answers)
