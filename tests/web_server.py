"""A dashboard in a process of its own, and a client that sends what it is told to."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

#: It ends by itself after this long, whatever becomes of the test.
_LIMIT_S = 400
_START_S = 120.0


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class WebServer:
    process: subprocess.Popen[bytes]
    port: int
    token: str
    output: Path

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def ask(
        self,
        path: str,
        method: str = "GET",
        *,
        headers: dict[str, str] | None = None,
        body: bytes | None = None,
        knows_token: bool = True,
    ) -> Answer:
        """One request with these headers; Host and the token unless they are given otherwise."""
        known = {"authorization": f"Bearer {self.token}"} if knows_token else {}
        sent = {"host": self.host, **known, **(headers or {})}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            if body is not None:
                sent["content-length"] = str(len(body))
            for name, value in sent.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, found, answer.read())
        finally:
            connection.close()

    def runs(self) -> dict[str, dict[str, Any]]:
        """The rows of the first page by name."""
        return {row["name"]: row for row in self.ask("/api/runs").json["runs"]}

    @contextmanager
    def stream(self, query: str, **headers: str) -> Iterator[Stream]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            known = {"Authorization": f"Bearer {self.token}", "Host": self.host}
            connection.request("GET", f"/api/stream?{query}", headers={**known, **headers})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            assert answer.getheader("content-type", "").startswith("text/event-stream")
            yield Stream(answer)
        finally:
            connection.close()


class Event(NamedTuple):
    id: str
    name: str
    data: Any


class Stream:
    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self._answer = answer

    def lines(self, count: int) -> list[str]:
        return [self._answer.readline().decode().rstrip("\n") for _ in range(count)]

    def events(self) -> Iterator[Event]:
        """Event by event, until the server ends it."""
        found: dict[str, str] = {}
        while line := self._answer.readline():
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name:
                found[name] = value
            elif "event" in found:
                yield Event(found["id"], found["event"], json.loads(found["data"]))
                found = {}

    def until(self, name: str) -> list[Event]:
        """The events up to the first of this name."""
        found = []
        for event in self.events():
            found.append(event)
            if event.name == name:
                return found
        raise AssertionError(f"the stream has ended without {name}: {found}")


@contextmanager
def web_server(folder: Path, *words: str) -> Iterator[WebServer]:
    """``muster web WORDS`` that has begun to listen; its state is below ``folder``."""
    output = folder / f"web-output-{time.monotonic_ns()}.txt"
    env = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "muster", "web", *words],
            stdout=file, stderr=subprocess.STDOUT, cwd=folder, env=env,
            preexec_fn=lambda: signal.alarm(_LIMIT_S),
        )  # fmt: skip
    try:
        yield _listening(process, output)
    finally:
        process.kill()
        process.wait()


def _listening(process: subprocess.Popen[bytes], output: Path) -> WebServer:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        for word in output.read_text().split():
            if word.startswith("http://") and "ends it" in output.read_text():
                address = urlsplit(word)
                return WebServer(process, address.port or 0, address.fragment, output)
        time.sleep(0.02)
    raise AssertionError(f"muster web does not listen: {output.read_text()}")
