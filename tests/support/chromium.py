"""A headless Chromium, driven over the DevTools protocol through two pipes: no library, no port, no download."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find() -> str | None:
    """The browser's path, or None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser process; `open` gives a page."""

    def __init__(self) -> None:
        path = find()
        assert path is not None
        self._home = tempfile.mkdtemp(prefix="shoal-browser-")
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        options = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-extensions", "--disable-background-networking", "--hide-scrollbars",
            f"--user-data-dir={self._home}", "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        # The browser reads commands from descriptor 3 and writes answers to 4.
        redirect = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, path, *options],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"HOME": self._home},
        )
        os.close(to_read)
        os.close(to_write)
        self._number = 0
        self._held = b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Ask for something, and wait for the answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            said = self._next(60)
            if said.get("id") == self._number:
                if "error" in said:
                    raise RuntimeError(f"{method}: {said['error']}")
                return said["result"]
            self.events.append(said)

    def wait_for(self, method: str, session: str, seconds: float = 30) -> dict[str, Any]:
        """The next event of that name."""
        until = time.monotonic() + seconds
        while True:
            for place, event in enumerate(self.events):
                if event.get("method") == method and event.get("sessionId") == session:
                    return self.events.pop(place)
            self.events.append(self._next(until - time.monotonic()))

    def open(self, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.size(width, height)
        page.dark(dark)
        return page

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        for descriptor in (self._read, self._write):
            os.close(descriptor)
        shutil.rmtree(self._home, ignore_errors=True)

    def _next(self, seconds: float) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError("Chromium does not answer")
            chunk = os.read(self._read, 1 << 16)
            if not chunk:
                raise RuntimeError("Chromium has gone")
            self._held += chunk
        first, _, self._held = self._held.partition(b"\0")
        return json.loads(first)


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def go(self, path: Path) -> float:
        """Open a file; the seconds until it is loaded and its scripts have run."""
        return self.visit(path.resolve().as_uri())

    def visit(self, address: str) -> float:
        """Open a page; the seconds until it is loaded and its scripts have run."""
        started = time.monotonic()
        self.call("Page.navigate", url=address)
        self._browser.wait_for("Page.loadEventFired", self._session)
        return time.monotonic() - started

    def size(self, width: int, height: int, scale: int | None = None) -> None:
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale or (2 if phone else 1),
            mobile=phone,
        )

    def dark(self, wanted: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if wanted else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def printed(self) -> None:
        self.call("Emulation.setEmulatedMedia", media="print")

    def do(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        said = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in said:
            raise AssertionError(said["exceptionDetails"]["exception"].get("description"))
        return said["result"].get("value")

    def point_at(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """Move the mouse over an element, to a share of its width and height."""
        where = self._box(selector)
        self._mouse("mouseMoved", where["x"] + x * where["width"], where["y"] + y * where["height"])

    def point_away(self) -> None:
        self._mouse("mouseMoved", 2, 2)

    def click(self, selector: str) -> None:
        where = self._box(selector)
        x, y = where["x"] + where["width"] / 2, where["y"] + where["height"] / 2
        for kind in ("mousePressed", "mouseReleased"):
            self._mouse(kind, x, y, button="left", clickCount=1)

    def tap(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """Touch an element with a finger, and lift it."""
        self.call("Emulation.setTouchEmulationEnabled", enabled=True)
        where = self._box(selector)
        at = [{"x": where["x"] + x * where["width"], "y": where["y"] + y * where["height"]}]
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=at)
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)

    def screenshot(self, path: Path, whole: bool = True) -> None:
        image = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(image["data"]))

    def complaints(self) -> list[str]:
        """What the console says: errors, refused requests, exceptions."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self._events() if event.get("method") in kinds]

    def requests(self) -> list[str]:
        """Everything that the page asked for."""
        asked = [event for event in self._events() if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in asked]

    def _events(self) -> list[dict[str, Any]]:
        return [event for event in self._browser.events if event.get("sessionId") == self._session]

    def _box(self, selector: str) -> dict[str, float]:
        find = f"document.querySelector({json.dumps(selector)})"
        self.do(f"{find}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        return self.do(f"(({{x, y, width, height}}) => ({{x, y, width, height}}))({find}.getBoundingClientRect())")

    def _mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
