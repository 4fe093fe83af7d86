"""Drive a headless Chromium by the DevTools protocol over a pipe, with only the standard library."""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
KEYS = {"Enter": 13, "Escape": 27, " ": 32, "End": 35, "Home": 36}
KEYS |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--remote-debugging-pipe", "--no-first-run", "--mute-audio"),
    *("--disable-extensions", "--disable-component-update", "--disable-background-networking", "--disable-sync"),
    *("--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--force-color-profile=srgb"),
)


class Browser:
    """A browser with one page.

    requests: the URLs that the page requested.  errors: the errors of its scripts.
    """

    def __init__(self, folder: Path, width: int = 900, height: int = 640) -> None:
        """folder: for the browser's profile and for downloads."""
        assert CHROMIUM is not None
        self.folder = folder
        (folder / "downloads").mkdir(parents=True, exist_ok=True)
        from_us, to_us = os.pipe(), os.pipe()

        # The browser reads from file descriptor 3 and writes to 4.
        def connect() -> None:
            read, write = os.dup(from_us[0]), os.dup(to_us[1])
            os.dup2(read, 3)
            os.dup2(write, 4)

        self.process = subprocess.Popen(
            [CHROMIUM, *OPTIONS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            preexec_fn=connect,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"HOME": str(folder)},
        )
        os.close(from_us[0])
        os.close(to_us[1])
        self.write, self.read = from_us[1], to_us[0]
        self.rest, self.numbers = b"", itertools.count(1)
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.loaded = False
        (page,) = (t for t in self.ask("Target.getTargets", session=None)["targetInfos"] if t["type"] == "page")
        attached = self.ask("Target.attachToTarget", session=None, targetId=page["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")
        where = str(folder / "downloads")
        self.ask("Browser.setDownloadBehavior", session=None, behavior="allow", downloadPath=where)
        self.resize(width, height)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            os.write(self.write, json.dumps({"id": next(self.numbers), "method": "Browser.close"}).encode() + b"\0")
            self.process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        os.close(self.write)
        os.close(self.read)

    def ask(self, method: str, session: str | None = "", **arguments: Any) -> Any:
        """Call a method of the protocol, and return its result."""
        number = next(self.numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": arguments}
        if session is not None:
            message["sessionId"] = session or self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.write, data) :]
        while True:
            answer = self._next(60)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _next(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while b"\0" not in self.rest:
            if not select.select([self.read], [], [], max(0, end - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            data = os.read(self.read, 1 << 20)
            if not data:
                raise RuntimeError("the browser has ended")
            self.rest += data
        one, self.rest = self.rest.split(b"\0", 1)
        return json.loads(one)

    def _note(self, event: dict[str, Any]) -> None:
        method, what = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(what["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = what["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and what["entry"]["level"] == "error":
            self.errors.append(what["entry"]["text"])
        elif method == "Page.loadEventFired":
            self.loaded = True

    def open(self, path: Path) -> None:
        """Open a file and wait until it is loaded."""
        self.loaded, self.requests, self.errors = False, [], []
        self.ask("Page.navigate", url=path.absolute().as_uri())
        while not self.loaded:
            self._note(self._next(60))

    def run(self, script: str) -> Any:
        """Evaluate an expression on the page, and wait for its value if it is a promise."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", script))
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 30) -> Any:
        """Wait until an expression is true, and return its value, or True for an object."""
        end = time.monotonic() + seconds
        while not (value := self.run(f"(value => typeof value === 'object' ? !!value : value)({script})")):
            if time.monotonic() > end:
                shown = self.run("(document.querySelector('.readout') || document.body).innerText.slice(0, 500)")
                raise TimeoutError(f"never true: {script}; {self.errors}; the page says: {shown}")
            time.sleep(0.03)
        return value

    def resize(self, width: int, height: int) -> None:
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def media(self, kind: str = "", **features: str) -> None:
        """Emulate printing (kind="print"), or preferences such as prefers_color_scheme="dark"."""
        wanted = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.ask("Emulation.setEmulatedMedia", media=kind, features=wanted)

    def place(self, selector: str, x: float = 0.5, y: float = 0.5) -> tuple[float, float]:
        """Scroll to an element, and return the point at these fractions of its width and height."""
        box = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{box}.scrollIntoView({{block: 'center'}})")
        left, top, width, height = self.run(f"(r => [r.x, r.y, r.width, r.height])({box}.getBoundingClientRect())")
        return left + x * width, top + y * height

    def mouse(self, kind: str, at: tuple[float, float], held: bool = False) -> None:
        """Move the mouse ("Moved"), or press ("Pressed") or release ("Released") its left button."""
        button = "none" if kind == "Moved" and not held else "left"
        more = {"clickCount": 1} if kind != "Moved" else {}
        held = held or kind == "Pressed"
        where = {"x": at[0], "y": at[1]}
        self.ask("Input.dispatchMouseEvent", type=f"mouse{kind}", button=button, buttons=int(held), **where, **more)

    def click(self, selector: str) -> None:
        at = self.place(selector)
        self.mouse("Moved", at)
        self.mouse("Pressed", at)
        self.mouse("Released", at)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self.mouse("Moved", start)
        self.mouse("Pressed", start)
        self.mouse("Moved", end, held=True)
        self.mouse("Released", end)

    def key(self, name: str, shift: bool = False, times: int = 1) -> None:
        text = {"Enter": "\r", " ": " "}.get(name, name if len(name) == 1 else "")
        more = {"key": name, "modifiers": 8 * shift, "windowsVirtualKeyCode": KEYS.get(name, 0)}
        for _ in range(times):
            self.ask("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **more)
            self.ask("Input.dispatchKeyEvent", type="keyUp", **more)

    def screenshot(self, path: Path, whole: bool = False) -> None:
        data = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def pdf(self, path: Path) -> None:
        """Print the page."""
        path.write_bytes(base64.b64decode(self.ask("Page.printToPDF", printBackground=False)["data"]))

    def download(self, name: str, seconds: float = 20) -> bytes:
        """Wait for a download, and return the content of the file."""
        path, end = self.folder / "downloads" / name, time.monotonic() + seconds
        while not path.is_file():
            if time.monotonic() > end:
                raise TimeoutError(f"no {name}: {[p.name for p in path.parent.iterdir()]}; {self.errors}")
            time.sleep(0.03)
        data = path.read_bytes()
        path.unlink()
        return data
