"""A lean start of Ray, with something in the place of Ray's own."""

from __future__ import annotations

import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster.farm.executors.ray_lean import NOBODY, GivenUpError, lean


def ray_of(wait: Any) -> Any:
    """As much of Ray as a start changes."""
    node = SimpleNamespace(Node=object, wait_for_persisted_port=wait)
    services = SimpleNamespace(start_ray_process=lambda command: command)
    utils = SimpleNamespace(get_dashboard_dependency_error=lambda: "missing")
    private = SimpleNamespace(node=node, services=services, utils=utils)
    return SimpleNamespace(_private=private, _raylet=SimpleNamespace())


def test_a_start_that_is_given_up_waits_no_longer_and_starts_nothing(tmp_path: Path) -> None:
    ray = ray_of(lambda *_, **__: pytest.fail("there is no port yet"))
    usual = vars(ray._private.node).copy()
    is_given_up = threading.Event()
    with lean(ray, 1, is_given_up=is_given_up.is_set):
        threading.Timer(0.05, is_given_up.set).start()
        begun = time.monotonic()
        with pytest.raises(GivenUpError):
            ray._private.node.wait_for_persisted_port(str(tmp_path), "node", "port", 60_000)
        assert time.monotonic() - begun < 30
        with pytest.raises(GivenUpError):
            ray._private.services.start_ray_process(["raylet"])
    assert vars(ray._private.node) == usual


def test_the_port_is_read_once_it_is_there(tmp_path: Path) -> None:
    ray = ray_of(lambda folder, node, name, timeout_ms: 7)
    with lean(ray, 1):
        threading.Timer(0.05, (tmp_path / "port_node").touch).start()
        assert ray._private.node.wait_for_persisted_port(str(tmp_path), "node", "port", 60_000) == 7


def test_a_raylet_gets_nobody_for_its_agents_and_as_many_workers_as_are_wanted() -> None:
    ray = ray_of(None)
    words = ["raylet", "--dashboard_agent_command=python a=b", "--num_prestart_python_workers=64",
             "--python_worker_command=python w=1", "--port=1"]  # fmt: skip
    with lean(ray, 2, lambda command: f"fork {command}"):
        program, agent, *rest = ray._private.services.start_ray_process(words)
    assert program == "raylet" and "python" not in agent
    assert rest == ["--num_prestart_python_workers=2",
                    "--python_worker_command=fork python w=1", "--port=1"]  # fmt: skip


@pytest.mark.skipif(sys.platform == "win32", reason="there is no shell")
def test_a_stand_in_ends_with_the_raylet_that_holds_its_input() -> None:
    """A raylet that was killed left two sleeping processes, for ever."""
    nobody = subprocess.Popen([*shlex.split(NOBODY), "--added=1"], stdin=subprocess.PIPE)
    assert nobody.stdin is not None
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            nobody.wait(0.2)  # the raylet would end with it
        nobody.stdin.close()
        assert nobody.wait(20) == 0
    finally:
        nobody.kill()
        nobody.wait()


@pytest.mark.skipif(sys.platform == "win32", reason="there is no shell")
def test_a_stand_in_stays_where_the_raylet_holds_no_input() -> None:
    nobody = subprocess.Popen(shlex.split(NOBODY), stdin=subprocess.DEVNULL)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            nobody.wait(0.2)
    finally:
        nobody.kill()
        nobody.wait()
