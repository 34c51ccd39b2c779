"""A real browser that looks at a dashboard, and everything it complains about."""

from __future__ import annotations

import gzip
import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.web_server import WebServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_AXE = Path(__file__).parent / "fixtures" / "axe" / "axe-4.14.1.min.js.gz"
#: A name of somebody else's that means this machine: DNS rebinding.
REBOUND = "rebound.example"
#: A busy machine is no defect of a page.
PATIENCE_MS = 90_000
#: What Chromium notes of a server that is not there, which some tests bring about.
_NOTED = ("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED", "ERR_CONNECTION_RESET",
        "ERR_EMPTY_RESPONSE")  # fmt: skip


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's Chromium; the test is skipped where it or playwright is missing."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium here (make servers installs it on Debian)")
    with api.sync_playwright() as started:
        # Every name but the one that tests make mean this machine is unknown: nothing gets out.
        names = f"MAP {REBOUND} 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"
        browser = started.chromium.launch(
            executable_path=path, args=["--no-sandbox", f"--host-resolver-rules={names}"]
        )
        try:
            yield browser
        finally:
            browser.close()


class Look:
    """A tab that is logged in. What its console, its page or its policy says is in ``wrong``."""

    def __init__(self, browser: Browser, server: WebServer, **options: Any) -> None:
        self.server = server
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}} | options)
        self.context.set_default_timeout(PATIENCE_MS)
        self.page: Page = self.context.new_page()
        self.wrong: list[str] = []
        self.asked: list[str] = []
        #: Whether a question of the page is answered with yes or no; None: it must not ask.
        self.agrees: bool | None = None
        self.questions: list[str] = []
        self.page.on(
            "console",
            # That there is no log yet is an answer; the page says it, and Chromium notes it.
            lambda said: "/log?" in said.location["url"] or self._heard(said.type, said.text),
        )
        self.page.on("pageerror", lambda error: self.wrong.append(f"{error} {error.stack}"))
        self.page.on("request", self._note)
        self.page.on("dialog", self._answer)

    def _note(self, request: Any) -> None:
        self.asked.append(request.url)
        if request.headers.get("referer"):
            self.wrong.append(f"referer {request.headers['referer']} for {request.url}")

    def _answer(self, dialog: Any) -> None:
        if self.agrees is None:
            self.wrong.append(f"dialog {dialog.message}")
        self.questions.append(dialog.message)
        if self.agrees:
            dialog.accept()
        else:
            dialog.dismiss()

    def _heard(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and not any(word in text for word in _NOTED):
            self.wrong.append(text)

    def log_in(self) -> None:
        self.page.goto(f"http://{self.server.host}/#{self.server.token}")
        self.ready()

    def go(self, path: str) -> None:
        self.page.goto(f"http://{self.server.host}{path}")
        self.ready()

    def ready(self) -> None:
        self.page.wait_for_selector("html[data-ready]")

    def text(self, selector: str = "main") -> str:
        return self.page.inner_text(selector)

    def drag(self, selector: str, begin: tuple[float, float], end: tuple[float, float]) -> None:
        """From one place on an element to another: shares of its width, pixels from its top."""
        self.page.locator(selector).first.scroll_into_view_if_needed()
        box = self.page.locator(selector).first.bounding_box()
        assert box is not None
        mouse = self.page.mouse
        mouse.move(box["x"] + begin[0] * box["width"], box["y"] + begin[1])
        mouse.down()
        mouse.move(box["x"] + end[0] * box["width"], box["y"] + end[1], steps=4)
        mouse.up()

    def held(self) -> dict[str, float]:
        """What the page holds after its garbage was collected: bytes, elements, listeners."""
        ask = self.context.new_cdp_session(self.page)
        try:
            ask.send("Performance.enable")
            ask.send("HeapProfiler.collectGarbage")
            said = ask.send("Performance.getMetrics")["metrics"]
        finally:
            ask.detach()
        names = ("JSHeapUsedSize", "Nodes", "JSEventListeners")
        return {one["name"]: one["value"] for one in said if one["name"] in names}

    def until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true.

        Asked from outside: ``wait_for_function`` would evaluate a text in the page, which its
        policy forbids.
        """
        deadline = time.monotonic() + PATIENCE_MS / 1000
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, f"{expression}: {self.text()[:2000]}"
            self.page.wait_for_timeout(30)

    def island(self) -> Any:
        return json.loads(self.page.text_content("#data") or "")

    def accessibility(self, *rules: str) -> list[str]:
        """The serious findings of axe-core; of ``rules`` alone, where some are named."""
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(gzip.decompress(_AXE.read_bytes()).decode())
        only = {"runOnly": {"type": "rule", "values": list(rules)}} if rules else {}
        found = self.page.evaluate(
            "async (only) => (await axe.run(document, {...only, resultTypes: ['violations']}))"
            ".violations.map(one => [one.impact, one.id, one.nodes.slice(0, 3).map(n => n.html)])",
            only,
        )
        return [str(one) for one in found if one[0] in ("serious", "critical")]


@contextmanager
def look(browser: Browser, server: WebServer, **options: Any) -> Iterator[Look]:
    """Fails at its end for whatever the browser has complained about, or asked of others."""
    found = Look(browser, server, **options)
    try:
        found.log_in()
        yield found
        assert not found.wrong, found.wrong
        ours = (f"http://{server.host}/", "data:")
        assert [url for url in found.asked if not url.startswith(ours)] == []
        told = server.output.read_text()
        assert "refused a part" not in told, told
    finally:
        found.context.close()


def run_id(server: WebServer, name: str) -> str:
    return str(server.runs()[name]["id"])


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        return


@contextmanager
def files_served(folder: Path) -> Iterator[int]:
    """A plain server of files, at a port of this machine."""
    answer = partial(_Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), answer) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        try:
            yield found.server_port
        finally:
            found.shutdown()
            thread.join()
