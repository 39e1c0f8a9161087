"""A headless Chromium for tests, driven over its DevTools pipe: no driver package is needed."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# The browser reads commands from descriptor 3 and answers on 4.
_START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for end, wanted in zip(ends, (3, 4)):
    os.dup2(end, wanted, inheritable=True)
os.execv(sys.argv[3], sys.argv[3:])
"""
# The texts of a page whose contrast with what is behind them is below a ratio, as WCAG has it.
_FAINT = """(least => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) =>
    [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const light = (colour) => {
    const [r, g, b] = colour.map((c) =>
      c / 255 <= 0.04045 ? c / 3294.6 : ((c / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const layers = [];
    for (let each = element; each; each = each.parentElement) {
      const shape = each.matches("svg text") && each.parentElement.querySelector(".shape");
      if (shape) layers.push(rgba(getComputedStyle(shape).fill));
      if (!each.closest("svg") || each.matches("svg"))
        layers.push(rgba(getComputedStyle(each).backgroundColor));
    }
    return layers.reduceRight((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  const found = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    const text = texts.currentNode.data.trim();
    const unseen = "script, style, title, option, .later";
    if (!text || element.closest(unseen) || !element.getClientRects().length) continue;
    const { fill, color, opacity } = getComputedStyle(element);
    const ground = behind(element);
    const ink = rgba(element.closest("svg text") ? fill : color);
    ink[3] *= opacity;
    const [high, low] = [over(ink, ground), ground].map(light).sort((a, b) => b - a);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < least) found.push(`${text.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return found;
})"""
_PATIENCE = 60.0  # seconds that an answer may take


def chromium() -> str | None:
    """Where a Chromium is, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class PageError(AssertionError):
    """A script of the page, or of the test in it, has failed."""


class Browser:
    """A browser with one page."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._left = b""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send("Page.setLifecycleEventsEnabled", enabled=True)
        # Frames that may do less than their page are processes of their own.
        self.send(
            "Target.setAutoAttach", autoAttach=True, waitForDebuggerOnStart=False, flatten=True
        )

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Give a command and wait for its answer; events on the way are kept."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while True:
            answer = self._next()
            if answer.get("id") == number:
                if "error" in answer:
                    raise PageError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._read], [], [], deadline - time.monotonic())
            piece = os.read(self._read, 1 << 16) if ready else b""
            if not piece:
                raise PageError(f"the browser does not answer within {_PATIENCE:.0f} s")
            self._left += piece
        line, self._left = self._left.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, address: str) -> None:
        """Go to an address, and wait until the page is loaded and painted."""
        self._load("about:blank")  # The same file with another fragment would not be loaded anew.
        self.events.clear()
        self._load(address)
        self.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 5)))")

    def _load(self, address: str) -> None:
        """Wait for this very document: the one before it can still tell that it is loaded."""
        loader = self.send("Page.navigate", url=address)["loaderId"]
        while not any(
            event["method"] == "Page.lifecycleEvent"
            and event["params"]["name"] == "load"
            and event["params"]["loaderId"] == loader
            for event in self.events
        ):
            self._next()

    def evaluate(self, expression: str, *, frame: bool = False) -> Any:
        """Return the value of an expression as JSON; promises are waited for.

        Args:
            expression: of JavaScript.
            frame: whether it is evaluated in the frame that the page holds.
        """
        page = self._session
        if frame:
            attached = "Target.attachedToTarget"
            while not (found := [e["params"] for e in self.events if e["method"] == attached]):
                self._next()
            self._session = found[-1]["sessionId"]
        try:
            answer = self.send(
                "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
            )
        finally:
            self._session = page
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise PageError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def complaints(self) -> list[str]:
        """What the page's scripts raised, and what it logged as an error."""
        self.evaluate("0")
        told = []
        for event in self.events:
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                told.append(details.get("exception", {}).get("description", details["text"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                told.append(params["entry"]["text"])
            elif event["method"] == "Runtime.consoleAPICalled":
                told.append(f"console.{params['type']}: {params['args']}")
        return told

    def faint_texts(self, least: float = 4.5) -> list[str]:
        """The texts that stand out too little from what is behind them, with their contrast."""
        found: list[str] = self.evaluate(f"{_FAINT}({least})")
        return found

    def requests(self) -> list[str]:
        """The addresses that the page asked for, itself included."""
        self.evaluate("0")
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def size(self, width: int, height: int, *, dark: bool = False, touch: bool = False) -> None:
        """Set the size of the page in pixels, and whether the reader prefers dark colours."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=touch,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Emulation.setTouchEmulationEnabled", enabled=touch)

    def click(self, x: float, y: float, *, times: int = 1) -> None:
        """Click at a point of the page."""
        for count in range(1, times + 1):
            for kind in ("mousePressed", "mouseReleased"):
                self.mouse(kind, x, y, button="left", clickCount=count)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Send one event of the mouse."""
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key, named as in KeyboardEvent.key."""
        shared: dict[str, Any] = {"key": key, "modifiers": 8 if shift else 0}
        typed = {"Enter": "\r"}.get(key, key if len(key) == 1 else None)
        if typed is not None:
            shared["text"] = typed
        if key == "Enter":
            shared["windowsVirtualKeyCode"] = 13
        self.send("Input.dispatchKeyEvent", type="keyDown", **shared)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def type(self, text: str) -> None:
        """Type a text into what has the focus."""
        self.send("Input.insertText", text=text)

    def picture(self, path: str | Path) -> None:
        """Write what is seen to a PNG file."""
        data = self.send("Page.captureScreenshot", format="png")["data"]
        Path(path).write_bytes(base64.b64decode(data))


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a Chromium, and end it and forget its profile afterwards."""
    found = chromium()
    assert found is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    profile = tempfile.mkdtemp()
    start = [sys.executable, "-c", _START, str(theirs_in), str(theirs_out), found, *FLAGS]
    process = subprocess.Popen(
        [*start, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(ours_in, ours_out)
    finally:
        os.close(ours_out)
        process.kill()
        process.wait()
        os.close(ours_in)
        shutil.rmtree(profile, ignore_errors=True)
