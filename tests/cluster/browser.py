"""A headless Chromium, driven over a pipe (DevTools protocol: JSON messages that end with a zero byte)."""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new", "--no-sandbox", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu",
    "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage",
    "--force-color-profile=srgb", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip
PATIENCE_S = 60.0


def find_chromium():
    """The browser of this machine, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def _raised(end):
    """The descriptor under a number above 9."""
    raised = fcntl.fcntl(end, fcntl.F_DUPFD, 10)
    os.close(end)
    return raised


class Browser:
    """One process; `page` opens a tab."""

    def __init__(self, profile: Path) -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        # the browser reads from descriptor 3 and writes to 4, so ours must be others
        theirs_in, theirs_out = (_raised(end) for end in (theirs_in, theirs_out))
        script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out} {theirs_in}<&- {theirs_out}>&-'
        command = [
            "bash",
            "-c",
            script,
            "bash",
            find_chromium(),
            *FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = ours_in, ours_out
        self._buffer = b""
        self._number = 0
        self.events = []

    def page(self, width=1280, height=900):
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = Page(self, session)
        page.call("Page.enable")
        page.call("Runtime.enable")
        page.call("Log.enable")
        page.resize(width, height)
        return page

    def call(self, method, params=None, session=None):
        """The result of one command; raises AssertionError for an error, and when it takes too long."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params or {}}
        os.write(
            self._out, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0"
        )
        deadline = time.monotonic() + PATIENCE_S
        while True:
            reply = self._read(deadline)
            if reply.get("id") == self._number:
                assert "error" not in reply, (method, reply["error"])
                return reply["result"]
            self.events.append(reply)

    def _read(self, deadline):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def close(self):
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)


class Page:
    """A tab."""

    def __init__(self, browser, session):
        self._browser, self._session = browser, session

    def call(self, method, **params):
        return self._browser.call(method, params, self._session)

    def open(self, url):
        self.call("Page.navigate", url=url)

    def resize(self, width, height, *, is_mobile=False):
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_mobile}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)

    def prefer(self, scheme):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def run(self, expression):
        """The value of a JavaScript expression."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def until(self, expression, what, timeout=30.0):
        """Polls until the expression is true; its value."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with contextlib.suppress(AssertionError):  # a page that is being loaded has nothing yet
                if value := self.run(expression):
                    return value
            time.sleep(0.02)
        raise AssertionError(
            f"not within {timeout} s: {what}; the page says {self.run('document.body.innerText')!r}"
        )

    def key(self, name, text="", modifiers=0):
        """One press of a key."""
        for kind in ("keyDown", "keyUp"):
            code = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}.get(name, 0)
            press = {"key": name, "code": name, "windowsVirtualKeyCode": code, "modifiers": modifiers}
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                **press,
                **({"text": text} if text and kind == "keyDown" else {}),
            )

    def type(self, text):
        self.call("Input.insertText", text=text)

    def accessible(self):
        """(role, name) of everything that assistive technology is told of."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        told = [node for node in nodes if not node.get("ignored")]
        return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in told]

    def screenshot(self, path, *, whole=False):
        """What the window shows, or with `whole` the page to its end."""
        more = {}
        if whole:
            size = self.run("[innerWidth, document.documentElement.scrollHeight]")
            clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
            more = {"captureBeyondViewport": True, "clip": clip}
        data = self.call("Page.captureScreenshot", format="png", **more)["data"]
        Path(path).write_bytes(base64.b64decode(data))

    @property
    def complaints(self):
        """Violations of the policy, exceptions and failed requests that the browser told of so far."""
        self.run("1")
        kinds = ("Log.entryAdded", "Runtime.exceptionThrown")
        mine = [event for event in self._browser.events if event.get("sessionId") == self._session]
        return [event["params"] for event in mine if event["method"] in kinds]
