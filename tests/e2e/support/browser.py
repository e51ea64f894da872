"""A headless Chromium, driven by the DevTools protocol over two pipes."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time

CHROMIUM = shutil.which("chromium")


class Browser:
    """One page. `events` collects what the browser reports: console messages, exceptions and
    violations of the Content-Security-Policy."""

    def __init__(self, directory):
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()

        def place():  # as descriptors 3 and 4, where Chromium looks for them
            os.dup2(os.dup(to_browser), 3)
            os.dup2(os.dup(from_browser), 4)

        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        self.log = open(directory / "chromium.log", "wb")
        self.process = subprocess.Popen(
            [CHROMIUM, "--headless=new", "--remote-debugging-pipe", "--disable-gpu",
             "--hide-scrollbars", "--disable-dev-shm-usage", "--no-first-run",
             "--disable-background-networking", "--disable-component-update",
             f"--user-data-dir={directory}/profile", *sandbox, "about:blank"],
            preexec_fn=place, close_fds=False, stdout=self.log, stderr=self.log,
            stdin=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._last, self._session, self.events = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target,
                                  flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _next(self, seconds):
        end = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0, end - time.monotonic()))
            piece = os.read(self._read, 1 << 20) if ready else b""
            assert piece, "the browser does not answer"
            self._buffer += piece
        message, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(message)
        if message.get("method") in ("Log.entryAdded", "Runtime.consoleAPICalled",
                                     "Runtime.exceptionThrown", "Network.requestWillBeSent"):
            self.events.append((message["method"], message["params"]))
        return message

    def call(self, method, **parameters):
        self._last += 1
        request = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            request["sessionId"] = self._session
        os.write(self._write, json.dumps(request).encode() + b"\0")
        while True:
            message = self._next(20)
            if message.get("id") == self._last:
                assert "error" not in message, message
                return message["result"]

    def evaluate(self, script):
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True,
                           awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, script, seconds=10):
        """Until the script's value is true; that value."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            value = self.evaluate(script)
            if value:
                return value
            time.sleep(0.05)
        raise AssertionError(f"not within {seconds} s: {script}\n{self.evaluate('document.body.innerText')}")

    def show(self, width, height, scheme="light", scale=1):
        """The window's size in CSS pixels, and what the user prefers."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=scale, mobile=width < 600)
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path):
        """All of the page, as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True,
                         clip={"x": 0, "y": 0, "width": size["width"], "height": size["height"],
                               "scale": 1})["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self):
        with contextlib.suppress(OSError):
            os.close(self._write)
        self.process.kill()
        self.process.wait()
        os.close(self._read)
        self.log.close()
