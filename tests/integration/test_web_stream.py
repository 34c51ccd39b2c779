"""Live pages and actions: what a browser hears while a run goes on, is killed, or is changed."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.web_server import Event, WebServer, web_server

WORK = """
import time
from pathlib import Path


def wait(x, ctx):
    print("began", x, flush=True)
    ctx.log(1, loss=1.0 / x)
    while not Path(f"go-{x}").exists():
        time.sleep(0.02)
    if x == 2:
        raise ValueError("two")
    return {"y": x}
"""
_SOON_S = 120.0


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "work.py").write_text(WORK)
    return tmp_path


@pytest.fixture
def run(place: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run of four tasks on one worker, each of which waits until it may end."""
    words = ["sweep", "work.py:wait", "--grid", "x=1,2,3,4", "--devices", "cpu:1", "--quiet"]
    command = [sys.executable, "-m", "muster", *words, "--run-dir", "runs/waiting"]
    process = subprocess.Popen(command, cwd=place, preexec_fn=lambda: signal.alarm(240))
    try:
        wait_until(lambda: list((place / "runs/waiting/logs").glob("worker-*.log")))
        yield process
    finally:
        for x in (1, 2, 3, 4):
            (place / f"go-{x}").touch()
        process.terminate()
        process.wait()


def wait_until(holds: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + _SOON_S
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def start_of(server: WebServer) -> tuple[str, str]:
    """The run's id, and the place in its stream that its page shows."""
    row = wait_until(lambda: server.runs().get("waiting"))
    page = server.ask(f"/run/{row['id']}/tasks").text
    island = page.partition('id="data">')[2].partition("</script>")[0]
    return row["id"], json.loads(island)["run"]["seq"]


def heads(events: list[Event]) -> list[dict[str, int]]:
    return [event.data["counts"] for event in events if event.name == "counts"]


def test_a_page_hears_what_happens_and_a_break_loses_and_doubles_nothing(
    place: Path, run: subprocess.Popen[bytes]
) -> None:
    with web_server(place) as server:
        name, seq = start_of(server)
        wait_until(lambda: server.ask(f"/api/run/{name}").json["counts"]["total"] == 4)
        with server.stream(f"run={name}&after={seq}") as stream:
            (place / "go-1").touch()
            seen = []
            for event in stream.events():
                seen.append(event)
                if heads(seen) and heads(seen)[-1]["done"] == 1:
                    break
        last = seen[-1].id  # a break: while nobody looks, the run goes on
        for x in (2, 3, 4):
            (place / f"go-{x}").touch()
        assert run.wait(120) == 1
        headers = {"Last-Event-ID": last}
        with server.stream(f"run={name}&after={seq}", **headers) as stream:
            after = stream.until("end")
        assert heads(after)[-1] | {"done": 3, "failed": 1, "running": 0} == heads(after)[-1]
        numbers = [int(event.id.rpartition("-")[2]) for event in seen + after]
        assert numbers == sorted(set(numbers)), "an event came twice"
        with server.stream(f"run={name}&after={seq}") as stream:  # a second viewer, from the start
            again = stream.until("end")
        assert [event.id for event in again][-1] == after[-1].id
        with server.stream(f"run={name}&after=00000000-7") as stream:  # of an earlier server
            fresh = stream.until("stale")
        assert heads(fresh)[-1] == heads(after)[-1] and fresh[-1].data == {}


def test_points_and_rows_come_as_they_are_made(place: Path, run: subprocess.Popen[bytes]) -> None:
    with web_server(place) as server:
        name, seq = start_of(server)
        tasks = f"/api/run/{name}/tasks?sort=x"
        wait_until(lambda: server.ask(tasks).json["total"] == 4)
        with server.stream(f"run={name}&after={seq}") as stream:
            for x in (1, 2, 3, 4):
                (place / f"go-{x}").touch()
            seen = stream.until("end")
        rows = {
            row["key"]: dict(zip(event.data["columns"], row["cells"], strict=True))
            for event in seen if event.name == "rows" for row in event.data["rows"]
        }  # fmt: skip
        assert {row["x"]: row["state"] for row in rows.values()} | {1: "done", 2: "failed"} == {
            1: "done", 2: "failed", 3: "done", 4: "done",
        }  # fmt: skip
        points = [one for event in seen if event.name == "points" for one in event.data["series"]]
        assert {one["name"] for one in points} == {"loss"}
        # What was logged before the page was made is in the page; each of the others comes once.
        assert len({one["task"] for one in points}) == len(points) >= 2


def test_what_a_task_prints_is_read_while_it_runs(
    place: Path, run: subprocess.Popen[bytes]
) -> None:
    with web_server(place) as server:
        name, _ = start_of(server)
        log = f"/api/run/{name}/log?task="
        wait_until(lambda: "began 1" in server.ask(log + "1").json.get("text", ""))
        seq = start_of(server)[1]
        with server.stream(f"run={name}&after={seq}&log=2") as stream:
            (place / "go-1").touch()
            seen = next(event for event in stream.events() if event.name == "log")
            assert "began 2" in seen.data["text"] and seen.data["offset"] == 0
            assert server.ask(f"/api/run/{name}/task/2").json["state"] == "claimed"
        shown = server.ask(log + "2").json["text"]
        (place / "go-2").touch()
        wait_until(lambda: server.ask(f"/api/run/{name}/task/2").json["state"] == "failed")
        whole = server.ask(log + "2").json["text"]
        assert "began 1" not in shown + whole and whole.startswith(shown.rstrip())


def test_a_run_that_is_killed_ends_for_its_viewers_and_a_server_that_is_killed_for_no_run(
    place: Path, run: subprocess.Popen[bytes]
) -> None:
    with web_server(place) as server:
        name, seq = start_of(server)
        wait_until((place / "runs/waiting/monitor.csv").exists)  # the last that a run begins with
        before = sorted(path.name for path in (place / "runs/waiting").iterdir())
        with server.stream(f"run={name}&after={seq}"):
            server.process.kill()
            server.process.wait()
    assert run.poll() is None
    (place / "go-1").touch()
    with web_server(place) as server:
        wait_until(lambda: server.ask(f"/api/run/{name}").json["counts"]["done"] == 1)
        name, seq = start_of(server)
        workers = psutil.Process(run.pid).children(recursive=True)
        with server.stream(f"run={name}&after={seq}") as stream:
            run.kill()
            run.wait()
            end = stream.until("end")[-1]
        assert end.data["state"] in ("stopped", "running")
        wait_until(lambda: server.ask(f"/api/run/{name}").json["state"] == "stopped")
        psutil.wait_procs(workers, timeout=120)
    after = sorted(path.name for path in (place / "runs/waiting").iterdir())
    assert set(after) - set(before) <= {"status.json", "ledger.sqlite-wal", "ledger.sqlite-shm",
                                        "results.csv", "results.parquet", "artifacts"}  # fmt: skip


@pytest.mark.parametrize("is_patient", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_idle_run_says_nothing_but_that_the_stream_is_alive_and_a_removed_one_that_it_is_gone(
    place: Path, is_patient: bool
) -> None:
    words = ["sweep", "work.py:wait", "--grid", "x=1", "--devices", "cpu:1", "--quiet"]
    (place / "go-1").touch()
    command = [sys.executable, "-m", "muster", *words, "--run-dir", "runs/waiting"]
    subprocess.run(command, cwd=place, check=True)
    with web_server(place) as server:
        name, seq = start_of(server)
        with server.stream(f"run={name}&after={seq}") as stream:
            assert stream.lines(2) == ["retry: 1000", ""]
            if is_patient:
                assert stream.lines(2) == [": still here", ""]
            time.sleep(1.0)
            # Elsewhere: SQLite may make a file in the folder while a reader has the ledger open.
            shutil.rmtree((place / "runs/waiting").rename(place / "removed"))
            [first, *_] = stream.until("stale")
            assert (first.name, first.data) == ("stale", {"what": "gone"})
        for path in (f"/api/run/{name}", f"/api/run/{name}/tasks", f"/run/{name}"):
            answer = server.ask(path)
            assert answer.status in (200, 503) and "not there any more" in answer.text
        assert server.runs() == {}


# ---------------------------------------------------------------------- actions


def act(
    server: WebServer, name: str, action: object, key: str = "1", **of: object
) -> tuple[int, Any]:
    known = {"content-type": "application/json", "x-muster": key}
    body = json.dumps({"action": action, **of}).encode()
    answer = server.ask(f"/api/run/{name}/act", "POST", headers=known, body=body)
    return answer.status, answer.json


def test_a_run_is_cancelled_and_tried_again_as_by_the_command_line(
    place: Path, run: subprocess.Popen[bytes]
) -> None:
    with web_server(place, "--allow-actions") as server:
        name, _ = start_of(server)
        for action, status in (("stop", 404), ("", 404), (None, 404), (["cancel"], 404)):
            assert act(server, name, action)[0] == status
        for task in (None, "nothing", "--help", 0, 9, [1], "", True, "1 2"):
            assert act(server, name, "cancel", task=task)[0] == 404, task
        assert act(server, name, "cancel", key="0")[0] == 403
        # A cookie alone, which any server of this machine may have been sent, does not act.
        body = json.dumps({"token": server.token}).encode()
        entered = server.ask("/login", "POST", body=body, knows_token=False)
        known = {"content-type": "application/json",
                 "cookie": entered.headers["set-cookie"].partition(";")[0]}  # fmt: skip
        for key, status in (("1", 403), ("é", 403), (entered.json["act"], 404)):
            sent = {**known, "x-muster": key}
            answer = server.ask(f"/api/run/{name}/act", "POST", headers=sent, body=b"{}",
                                knows_token=False)  # fmt: skip
            assert answer.status == status, key
        assert run.poll() is None
        (place / "go-1").touch()
        wait_until(lambda: server.ask(f"/api/run/{name}").json["counts"]["done"] == 1)
        status, said = act(server, name, "cancel")
        assert status == 200 and "asked its coordinator to cancel" in said["said"]
        assert run.wait(120) == 130
        assert server.ask(f"/api/run/{name}").json["state"] == "cancelled"
        for x in (2, 3, 4):
            (place / f"go-{x}").touch()
        status, said = act(server, name, "retry")
        assert status == 200 and "no task has failed" in said["said"]


def test_what_is_begun_from_a_page_outlives_the_dashboard(place: Path) -> None:
    (place / "go-2").touch()
    words = ["sweep", "work.py:wait", "--grid", "x=2", "--devices", "cpu:1", "--quiet"]
    command = [sys.executable, "-m", "muster", *words, "--run-dir", "runs/waiting"]
    assert subprocess.run(command, cwd=place, check=False).returncode == 1
    (place / "go-2").unlink()
    with web_server(place, "--allow-actions") as server:
        name, _ = start_of(server)
        assert act(server, name, "retry") == (200, {"said": "`muster retry` has begun."})
        wait_until(lambda: server.ask(f"/api/run/{name}").json["state"] == "running")
        status, again = act(server, name, "retry")  # as the command says it
        (place / "go-2").touch()
        assert status == 200 and "no task has failed" in again["said"]
    with web_server(place) as server:
        wait_until(lambda: server.runs()["waiting"]["state"] == "failed")
    table = (place / "runs/waiting/results.csv").read_text()
    assert ",2," in table  # its second attempt was recorded
