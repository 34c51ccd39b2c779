"""Tests that police themselves: what a test leaves behind fails it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import settings

settings.register_profile("ci", deadline=None, derandomize=True)
settings.register_profile("here", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "here")

#: Set by pytest itself or by libraries on import, and no test's doing.
_FOREIGN = ("PYTEST_", "COV_", "KMP_", "TORCH", "MPL", "COLUMNS", "LINES")
_GRACE_S = 2.0


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """No changed environment or folder, no thread and no child process outlives a test."""
    environment, folder = _environment(), os.getcwd()
    threads = set(threading.enumerate())
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    # Fixtures that are asked for, monkeypatch among them, end before this automatic one.
    assert _environment() == environment, "the test changed environment variables"
    assert os.getcwd() == folder, "the test changed the working folder"
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline:
        left = [t for t in threading.enumerate() if t not in threads and not t.daemon]
        alive = [p for p in psutil.Process().children(recursive=True) if p.pid not in children]
        if not left and not alive:
            return
        time.sleep(0.05)
    names = [" ".join(_command(process)) for process in alive]
    raise AssertionError(f"the test leaves threads {left} and processes {names}")


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() or [process.name()]
    except psutil.Error:
        return ["gone"]
