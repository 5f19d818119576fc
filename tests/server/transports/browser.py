"""A real browser without a window: Debian's chromium, driven through chromedriver's HTTP interface (W3C WebDriver)."""

import base64
import http.client
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import processes

FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --disable-extensions --window-size=1100,1000"
)
START_S = 60.0
ANSWER_S = 30.0


class Browser:
    """A browser with one empty page. A context manager, after which all its processes are gone.

    Args:
        folder: For its profile and what it says.
    """

    def __init__(self, folder: Path) -> None:
        driver, binary = shutil.which("chromedriver"), shutil.which("chromium")
        if driver is None or binary is None:
            pytest.skip("no browser is here; apt-get install chromium chromium-driver")
        self._said = folder / "chromedriver.log"
        self._session = ""
        self._http: http.client.HTTPConnection | None = None
        with self._said.open("w") as said:
            self._driver = subprocess.Popen([driver, "--port=0"], stdout=said, stderr=said)
        try:
            port = self._until(lambda: re.search(r"successfully on port (\d+)", self._said.read_text()), START_S)
            self._http = http.client.HTTPConnection("127.0.0.1", int(port[1]), timeout=START_S)
            options = {"binary": binary, "args": [*FLAGS.split(), f"--user-data-dir={folder / 'profile'}"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            found = self.do("POST", "/session", capabilities={"alwaysMatch": wanted})
            self._session = f"/session/{found['sessionId']}"
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.do("DELETE", "")
        finally:
            self._end()

    def _end(self) -> None:
        if self._http is not None:
            self._http.close()
        children = processes.descendants(self._driver.pid)
        processes.kill_tree(self._driver.pid)
        self._driver.wait(10)
        for pid in children:
            processes.kill_tree(pid)

    def do(self, method: str, path: str, **fields: Any) -> Any:
        """One command of the protocol."""
        assert self._http is not None, "it was made at the start"
        body = json.dumps(fields) if method == "POST" else None
        self._http.request(method, self._session + path, body)
        value = json.loads(self._http.getresponse().read())["value"]
        assert not (isinstance(value, dict) and "error" in value), f"{method} {path}: {value}"
        return value

    def open(self, url: str) -> None:
        """Go to a page."""
        self.do("POST", "/url", url=url)

    def js(self, script: str) -> Any:
        """The value of an expression in the page."""
        return self.do("POST", "/execute/sync", script=f"return {script}", args=[])

    def text(self, selector: str) -> str:
        """What a person reads there: nothing if it is hidden."""
        script = f"(e => e.checkVisibility() ? e.innerText : '')(document.querySelector({selector!r}))"
        return str(self.js(script)).strip()

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait for what a page will show."""
        try:
            return self._until(condition, ANSWER_S)
        except TimeoutError:
            pytest.fail(f"{what}: the page says\n{self.text('body')}\n{self.complaints()}", pytrace=False)

    @staticmethod
    def _until(condition: Callable[[], Any], seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.05)
        return found

    def type(self, selector: str, text: str) -> None:
        """Type keys as a person would."""
        (found,) = self.do("POST", "/element", using="css selector", value=selector).values()
        self.do("POST", f"/element/{found}/value", text=text)

    def emulate(self, command: str, **fields: Any) -> None:
        """A command of the browser's own protocol: another screen, another colour scheme."""
        self.do("POST", "/goog/cdp/execute", cmd=f"Emulation.{command}", params=fields)

    def complaints(self) -> list[str]:
        """What its console has said since the last time, of warnings and errors."""
        return [line["message"] for line in self.do("POST", "/se/log", type="browser") if line["level"] != "INFO"]

    def screenshot(self, path: Path) -> None:
        """A picture of what is seen."""
        path.write_bytes(base64.b64decode(self.do("GET", "/screenshot")))
