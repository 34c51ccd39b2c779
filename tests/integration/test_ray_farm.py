"""Sweeps, maps and searches on a real Ray cluster of two nodes, one of which does not see the run
folder, and of a third that is lost.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from tests.integration.test_search_clusters import population, search
from tests.processes import command_line
from tests.programs import read_program
from tests.ray_cluster import RayCluster, may_mount, wait_for

import muster
from muster.base.errors import EXIT_REQUEUE, EXIT_SETUP, SetupError, UsageError
from muster.farm.executors.cluster import ClusterRequest
from muster.farm.executors.ray_session import (
    check_address,
    check_can_authenticate,
    check_room,
    guarded_environment,
    room_for,
)

pytestmark = pytest.mark.ray

TARGET = read_program("ray_tasks.py")


@pytest.fixture
def place(ray_driver: RayCluster, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, which the node with GPUs does not see."""
    if not may_mount():
        pytest.skip("hiding a folder from a node needs the right to mount")
    place = ray_driver.hidden / f"work-{os.urandom(4).hex()}"
    place.mkdir()
    _write_target(place)
    monkeypatch.chdir(place)
    return place


def _write_target(place: Path) -> None:
    (place / "target.py").write_text(TARGET)
    (place / "beside.py").write_text("def double(x):\n    return 2 * x\n")


def _sweep(target: Any, values: range, *, gpus: int = 0, **options: Any) -> muster.Run:
    request = ClusterRequest(num_workers=2, gpus_per_worker=gpus)
    return muster.sweep(
        target, grid={"x": values}, executor="ray", cluster=request, monitor_interval_s=0, **options
    )


def _rows(run: muster.Run) -> list[dict[str, Any]]:
    return sorted(run.results().to_pylist(), key=lambda row: row["x"])


# ------------------------------------------------------------------ where the folder is shared


def test_a_sweep_gives_what_it_gives_here(
    ray_driver: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_target(tmp_path)
    monkeypatch.chdir(tmp_path)
    run = _sweep("target.py:square", range(20))
    assert [row["y"] for row in _rows(run)] == [2 * x * x for x in range(20)]
    [(_, text)] = run.log(_rows(run)[7]["task"])
    assert text == "task 7 of seed 0 speaks\n"
    assert not (run.folder.pilots / "token").exists()


# ------------------------------------------------------------------ what each worker gets


def _asked(place: Path, **request: Any) -> list[dict[str, Any]]:
    run = muster.sweep(
        "target.py:where", grid={"x": range(8), "place": [str(place)]}, executor="ray",
        cluster=ClusterRequest(num_workers=2, **request), monitor_interval_s=0,
        run_dir=f"run-{os.urandom(4).hex()}",
    )  # fmt: skip
    return _rows(run)


def test_a_custom_resource_decides_where_workers_run(place: Path, ray_driver: RayCluster) -> None:
    """Ray gives each node one of a resource that has its address as its name."""
    for number, node in enumerate(ray_driver.nodes):
        rows = _asked(place, resources=(f"node:{node}=0.01",))
        assert {row["is_first_node"] for row in rows} == {number == 0}


def test_a_task_above_its_memory_limit_fails_there_too(place: Path) -> None:
    (place / "takes.py").write_text(
        "import time\n\ndef takes(x):\n    held = bytearray(x << 20)\n"
        "    time.sleep(600 if x > 400 else 0)\n    return {'y': x}\n"
    )
    run = _sweep("takes.py:takes", range(1, 602, 300), memory_mib=400)
    assert [row["state"] for row in _rows(run)] == ["done", "done", "failed"]
    assert "of 400 MiB allowed (--memory)" in _rows(run)[2]["error"]
    with pytest.raises(SetupError, match="GiB of memory do not fit"):
        _sweep("takes.py:takes", range(2), memory_mib=2**29, run_dir="more")


@pytest.mark.thorough
def test_tasks_are_added_to_a_sweep_at_work(ray_driver: RayCluster, tmp_path: Path) -> None:
    _write_target(tmp_path)
    words = [sys.executable, "-m", "muster", "sweep", "target.py:hold", "--grid", "x=1,2,3", "--on",
             "ray", "--address", ray_driver.address, "--workers", "1", "--monitor-interval", "0",
             "--run-dir", "r"]  # fmt: skip
    with subprocess.Popen(words, cwd=tmp_path, env=ray_driver.environment) as process:
        try:
            wait_for(lambda: (tmp_path / "began-1").exists() or process.poll() is not None)
            add = [sys.executable, "-m", "muster", "add", "r", "--grid", "x=3,7", "--json"]
            done = subprocess.run(add, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            said = json.loads(done.stdout)
            assert (said["added"], said["known"], said["is_at_work"]) == (1, 1, True)
            (tmp_path / "go").touch()
            assert process.wait(120) == 0
        finally:
            process.kill()
    assert [row["y"] for row in _rows(muster.Run(tmp_path / "r"))] == [1, 2, 3, 7]


def test_two_workers_share_a_gpu(place: Path) -> None:
    rows = _asked(place, gpus_per_worker=0.5)
    assert {row["devices"] for row in rows} <= {"0", "1"}
    assert {row["kind"] for row in rows} == {"cuda:0"}


@pytest.mark.thorough
def test_workers_are_spread_over_the_nodes(ray_driver: RayCluster, tmp_path: Path) -> None:
    """Ray would put both on one node, which has two cores."""
    from ray._private.state import available_resources_per_node

    def free() -> list[float]:
        return sorted(node.get("CPU", 0.0) for node in available_resources_per_node().values())

    _write_target(tmp_path)
    wait_for(lambda: free() == [2.0, 2.0])  # Ray hears a moment later that a worker has ended
    words = [sys.executable, "-m", "muster", "sweep", "target.py:hold", "--grid", "x=1,2", "--on",
             "ray", "--address", ray_driver.address, "--workers", "2", "--monitor-interval", "0",
             "--placement-strategy", "SPREAD"]  # fmt: skip
    with subprocess.Popen(words, cwd=tmp_path, env=ray_driver.environment) as process:
        try:
            wait_for(lambda: sum(free()) == 2.0 or process.poll() is not None)
            assert process.poll() is None and free() == [1.0, 1.0]
        finally:
            (tmp_path / "go").touch()
    assert process.returncode == 0


# ------------------------------------------------------------------ where it is not


def test_without_a_shared_folder_code_goes_there_and_results_and_logs_come_back(
    place: Path, ray_driver: RayCluster
) -> None:
    _sweep("target.py:square", range(10), gpus=1, seeds=1, run_dir="run")
    run = _sweep("target.py:square", range(10), gpus=1, seeds=2, run_dir="run")  # goes on
    rows = _rows(run)
    assert [(row["x"], row["y"]) for row in rows] == [
        (x // 2, 2 * (x // 2) ** 2) for x in range(20)
    ]
    assert {row["devices"] for row in rows} <= {"0", "1"}, "as Ray has set it for each actor"
    assert {row["kind"] for row in rows} == {"cuda:0"}
    assert {row["run"] for row in rows} == {"run"}
    for row in rows:
        [(_, text)] = run.log(row["task"])
        assert text == f"task {row['x']} of seed {row['seed']} speaks\n"
    assert list(ray_driver.scratch.glob("muster-*")) == []


def test_files_of_tasks_come_back_whole(place: Path) -> None:
    run = _sweep("target.py:write", range(3), gpus=1)
    for row in _rows(run):
        [folder] = run.folder.artifacts.glob(f"*/{row['task']}*")
        assert (folder / "inner" / "text").read_text() == f"of {row['x']}"
        assert (folder / "large").read_bytes() == bytes([row["x"]]) * 9_000_000
        assert os.readlink(folder / "link") == "large"
    assert list(run.folder.attempts.iterdir()) == []


def test_files_of_failed_tasks_are_kept(place: Path) -> None:
    run = _sweep("target.py:fail", range(2), gpus=1, keep_going=True)
    assert run.exit_code == 1
    [group] = run.failures()
    assert group.num_failed == 2, "the same failure, on whichever node"
    assert f'File "{place}/target.py"' in group.trace
    kept = [path.read_text() for path in run.folder.attempts.glob("*/trace")]
    assert kept == ["what I saw"] * 2


def test_a_command_runs_in_the_folder_that_was_sent(place: Path) -> None:
    (place / "work.py").write_text(
        "import json, sys, pathlib, beside\n"
        "pathlib.Path(sys.argv[2], 'result.json').write_text(\n"
        "    json.dumps({'y': beside.double(int(sys.argv[1]))}))\n"
    )
    run = _sweep([sys.executable, "work.py", "{x}", "{dir}"], range(3), gpus=1)
    assert [row["y"] for row in _rows(run)] == [0, 2, 4]


def test_too_much_code_is_refused_with_its_size(place: Path) -> None:
    with (place / "weights.bin").open("wb") as file:
        file.truncate(150 << 20)
    with pytest.raises(SetupError, match=r"too large .*: 150 MiB, of which weights.bin has 150"):
        _sweep("target.py:square", range(2), gpus=1)


# ------------------------------------------------------------------ maps

STAGE = """
from beside import double

def stage(record):
    if record["n"] == 7:
        raise ValueError("not seven")
    return {**record, "m": double(record["n"])}
"""


def _map(place: Path, gpus: int) -> Any:
    (place / "stage.py").write_text(STAGE)
    lines = (json.dumps({"n": n}) + "\n" for n in range(500))
    (place / "in.jsonl").write_text("".join(lines))
    return muster.map(
        "stage.py:stage", "in.jsonl", "out.jsonl", executor="ray", chunk_rows=50,
        cluster=ClusterRequest(num_workers=2, gpus_per_worker=gpus), monitor_interval_s=0,
    )  # fmt: skip


def _check_map(place: Path, done: Any) -> None:
    rows = [json.loads(line) for line in (place / "out.jsonl").read_text().splitlines()]
    assert [(row["n"], row["m"]) for row in rows] == [(n, 2 * n) for n in range(500) if n != 7]
    assert (done.num_in, done.num_out, done.num_rejected) == (500, 499, 1)
    [reject] = [json.loads(line) for line in done.errors.read_text().splitlines()]
    assert (reject["row"], reject["reason"]) == (7, "ValueError: not seven")


def test_a_map_reads_its_shards_where_the_workers_are(
    ray_driver: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_target(tmp_path)
    monkeypatch.chdir(tmp_path)
    _check_map(tmp_path, _map(tmp_path, 0))


def test_a_map_without_a_shared_folder_gets_its_input_sent(place: Path) -> None:
    _check_map(place, _map(place, 1))


# ------------------------------------------------------------------ waiting, ending, resuming


def test_workers_that_wait_for_room_say_so_and_begin_when_there_is_some(
    ray_driver: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    class Occupant:
        def is_here(self) -> bool:
            return True

    _write_target(tmp_path)
    monkeypatch.chdir(tmp_path)
    occupant = ray.remote(Occupant).options(num_gpus=2, num_cpus=0).remote()
    assert ray.get(occupant.is_here.remote())
    seen: set[str] = set()

    def show(view: Any) -> None:
        seen.update(line.progress for line in view.workers)
        if any("waiting" in text for text in seen):
            ray.kill(occupant)

    run = _sweep("target.py:square", range(4), gpus=1, show=show)
    assert "waiting for 1 core and 1 GPU to be free" in seen
    assert run.exit_code == 0


def _command(cluster: RayCluster, *words: str) -> list[str]:
    return [
        sys.executable, "-m", "muster", "sweep", *words, "--on", "ray", "--address",
        cluster.address, "--monitor-interval", "0",
    ]  # fmt: skip


def _left(run_id: str) -> list[psutil.Process]:
    """Processes of a run, wherever they are."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it ends just now, or is somebody else's
            mark = process.environ().get("MUSTER_RUN_MARK", "")
            if mark.startswith(run_id) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def test_after_kill_9_of_the_coordinator_nothing_works_on_and_the_same_command_ends_it(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    _write_target(tmp_path)
    words = _command(
        ray_cluster, "target.py:slow", "--grid", "x=" + ",".join(map(str, range(30))),
        "--workers", "2", "--run-dir", "run",
    )  # fmt: skip
    settings: dict[str, Any] = {"cwd": tmp_path, "env": ray_cluster.environment}
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, **settings) as process:
        wait_for(lambda: len(list(tmp_path.glob("began-*"))) > 6)
        process.kill()
    run_id = json.loads((tmp_path / "run" / "run.json").read_text())["run_id"]
    wait_for(lambda: not _left(run_id))
    begun = len(list(tmp_path.glob("began-*")))
    assert begun < 30
    done = subprocess.run(words, capture_output=True, text=True, **settings)
    assert done.returncode == 0, done.stderr
    assert sorted(row["y"] for row in _rows(muster.Run(tmp_path / "run"))) == list(range(30))
    assert len(muster.Run(tmp_path / "run").results()) == 30


@pytest.mark.slow  # to its end: the next one
@pytest.mark.parametrize("how", ["to its end", "INT", "TERM", "KILL"])
def test_a_cluster_that_is_started_here_ends_with_the_run(tmp_path: Path, how: str) -> None:
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    _write_target(tmp_path)
    words = [sys.executable, "-m", "muster", "sweep", "target.py:slow", "--grid", "x=1,2,3,4,5,6",
             "--on", "ray", "--workers", "1", "--monitor-interval", "0"]  # fmt: skip
    scratch = Path(tempfile.mkdtemp(dir="/tmp", prefix="t-"))
    try:
        with subprocess.Popen(
            words, cwd=tmp_path, env={**os.environ, "TMPDIR": str(scratch)}, text=True,
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
        ) as process:  # fmt: skip
            if how != "to its end":
                wait_for(lambda: list(tmp_path.glob("began-*")) or process.poll() is not None)
                process.send_signal(signal.Signals[f"SIG{how}"])
                process.send_signal(signal.Signals[f"SIG{how}"])
            _, said = process.communicate(timeout=300)
        codes = {"to its end": 0, "TERM": EXIT_REQUEUE, "KILL": -signal.SIGKILL}
        assert process.returncode == codes.get(how, 130), said
        wait_for(lambda: not _mentioning(scratch), 120.0)
        if how != "KILL":
            assert list(scratch.iterdir()) == []
        assert len(list(tmp_path.glob("began-*"))) == (6 if how == "to its end" else 1)
    finally:
        for left in _mentioning(scratch):
            left.kill()
        shutil.rmtree(scratch)


def _mentioning(folder: Path) -> list[psutil.Process]:
    """Processes of Ray whose session is in the folder, and those with it as TMPDIR."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = [*process.cmdline(), process.environ().get("TMPDIR", "")]
            if any(str(folder) in word for word in words) and process.status() != "zombie":
                found.append(process)
    return found


@contextmanager
def holding_on_ray(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A sweep that starts a Ray here, and where Ray keeps its files. Nothing of it stays."""
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    _write_target(folder)
    scratch = Path(tempfile.mkdtemp(dir="/tmp", prefix="t-"))
    words = [sys.executable, "-m", "muster", "sweep", "target.py:hold", "--grid", "x=1",
             "--on", "ray", "--workers", "1", "--monitor-interval", "0"]  # fmt: skip
    try:
        with subprocess.Popen(
            words, cwd=folder, env={**os.environ, "TMPDIR": str(scratch)}, text=True,
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
        ) as process:  # fmt: skip
            try:
                yield process, scratch
            finally:
                process.kill()
    finally:
        for left in _mentioning(scratch):
            left.kill()
        shutil.rmtree(scratch, ignore_errors=True)


@pytest.mark.thorough
def test_ctrl_c_is_heard_while_ray_starts_here_and_nothing_of_it_stays(tmp_path: Path) -> None:
    """Also where it hangs: its control store is stopped as soon as it is there."""
    with holding_on_ray(tmp_path) as (process, scratch):

        def store() -> list[psutil.Process]:
            shown = ((p, command_line(p).partition(" ")[0]) for p in _mentioning(scratch))
            return [p for p, program in shown if program.endswith("gcs_server")]

        wait_for(lambda: store() or process.poll() is not None)
        assert process.poll() is None
        store()[0].suspend()
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
        took_s = time.monotonic() - begun
        assert process.returncode == 130, said
        assert "Traceback" not in said
        assert took_s < 15, said  # 2 s on a quiet machine
        assert not _mentioning(scratch)
        assert not list(scratch.glob("muster-ray-*"))


@pytest.mark.thorough
@pytest.mark.parametrize("victim", ["raylet", "muster"])
def test_a_ray_of_ours_ends_with_the_run_and_the_run_with_it(victim: str, tmp_path: Path) -> None:
    """A run waited for ever for room on a node that was gone; what stands in for the agents of a
    raylet outlived it.
    """
    with holding_on_ray(tmp_path) as (process, scratch):
        wait_for(lambda: (tmp_path / "began-1").exists() or process.poll() is not None)
        [raylet] = [
            each for each in psutil.Process(process.pid).children() if each.name() == "raylet"
        ]
        (raylet if victim == "raylet" else process).kill()
        _, said = process.communicate(timeout=60)
        if victim == "raylet":
            assert process.returncode == EXIT_SETUP, said
            assert "Ray on this machine has ended: its raylet is gone." in said
            assert not list(scratch.glob("muster-ray-*"))
        wait_for(lambda: not _mentioning(scratch))


@pytest.mark.thorough
def test_nobody_else_runs_a_task_in_a_cluster_that_is_started_here(tmp_path: Path) -> None:
    """Neither without authentication nor with a guess; with the token of the run's owner it would
    work, so that it is the token that keeps the others out.
    """
    with holding_on_ray(tmp_path) as (process, scratch):
        try:
            wait_for(lambda: (tmp_path / "began-1").exists() or process.poll() is not None)
            (token_path,) = scratch.glob("muster-ray-*/auth_token")
            assert token_path.stat().st_mode & 0o777 == 0o600
            assert token_path.parent.stat().st_mode & 0o777 == 0o700
            address, token = _address_of_head(scratch), token_path.read_text()
            for shown in _mentioning(scratch):
                assert token not in command_line(shown)  # anybody may read it
            intruders = [
                _intrude(address, mode, guess, tmp_path / f"by-{who}")
                for who, mode, guess in [
                    ("nobody", "disabled", ""), ("guess", "token", "0" * 64),
                    ("owner", "token", token),
                ]
            ]  # fmt: skip
            codes = [intruder.wait(300) for intruder in intruders]
            assert codes[0] != 0 and codes[1] != 0 and codes[2] == 0
            assert [path.name for path in tmp_path.glob("by-*")] == ["by-owner"]
        finally:
            (tmp_path / "go").touch()
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
        wait_for(lambda: not _mentioning(scratch), 120.0)
        assert list(scratch.iterdir()) == [], "the cluster ends with the run"


def _address_of_head(scratch: Path) -> str:
    """As any user of the machine finds it in the list of processes."""
    for process in _mentioning(scratch):
        if found := re.search(r"--gcs-address=(127\.0\.0\.2:\d+)", command_line(process)):
            return found[1]
    raise AssertionError("no process of Ray names its head")


def _intrude(address: str, mode: str, token: str, mark: Path) -> subprocess.Popen[bytes]:
    program = Path(__file__).parents[1] / "programs" / "ray_intruder.py"
    words = [sys.executable, str(program), address, mode, token, str(mark)]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_a_token_is_for_its_owner_alone(tmp_path: Path) -> None:
    environment = guarded_environment(tmp_path)
    path = Path(environment["RAY_AUTH_TOKEN_PATH"])
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(path.read_text()) == 64 and path.read_text() not in environment.values()
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_AUTH_TOKEN"] == ""  # or the user's own would come before the path


def test_a_ray_that_knows_no_token_is_not_started() -> None:
    old = SimpleNamespace(__version__="2.51.0", _raylet=SimpleNamespace())
    with pytest.raises(SetupError, match=r"Ray 2\.51\.0 cannot ask for a token.*\n.*\[ray\]"):
        check_can_authenticate(old)


# ------------------------------------------------------------------ what is refused, and how


@pytest.fixture
def deaf() -> Iterator[str]:
    """The address of a server that is not Ray."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.recv(100)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def test_ray_that_is_missing_is_told_with_how_to_get_it(tmp_path: Path) -> None:
    _write_target(tmp_path)
    (tmp_path / "missing" / "ray").mkdir(parents=True)
    (tmp_path / "missing" / "ray" / "__init__.py").write_text("raise ImportError('no ray')\n")
    path = os.pathsep.join([str(tmp_path / "missing"), os.environ.get("PYTHONPATH", "")])
    words = ["sweep", "target.py:square", "--grid", "x=1", "--on", "ray"]
    done = subprocess.run(
        [sys.executable, "-m", "muster", *words], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 3
    assert "--on ray needs the package ray, which is not installed." in done.stderr
    assert "Hint: pip install 'muster-gpu[ray]'" in done.stderr


def test_what_answers_but_is_not_ray_is_told(deaf: str) -> None:
    with pytest.raises(SetupError, match=f"What answers at {deaf} is not Ray"):
        check_address(deaf)


def test_the_head_of_a_cluster_is_recognised(ray_cluster: RayCluster) -> None:
    check_address(ray_cluster.address)


@pytest.mark.parametrize("address", ["ray://host:10001", "host", "host:", ":6379", "host:six"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"--address {address} is not HOST:PORT")):
        check_address(address)


def test_no_cluster_at_the_address_is_told_at_once(
    tmp_path: Path, muster_cli: Any, request: pytest.FixtureRequest
) -> None:
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    _write_target(tmp_path)
    with socket.socket() as held:  # nobody else has it, and nobody listens there
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        done = muster_cli("sweep", "target.py:square", "--grid", "x=1,2", "--on", "ray",
                          "--address", address)  # fmt: skip
    assert done.returncode == 3
    assert f"No Ray cluster answers at {address}: Connection refused." in done.stderr
    assert "Traceback" not in done.stderr


def test_more_than_the_cluster_has_is_refused_with_what_it_has() -> None:
    nodes = [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 4.0}]
    request = ClusterRequest(num_workers=3, gpus_per_worker=1, cpus_per_worker=2)
    assert room_for(nodes, request) == 2
    with pytest.raises(SetupError) as caught:
        check_room(nodes, request, "10.0.0.7:6379")
    assert str(caught.value) == (
        "3 workers of 2 cores and 1 GPU do not fit: the Ray cluster at 10.0.0.7:6379 has room for "
        "2 (2 nodes: 8 cores and 2 GPUs, 4 cores and 0 GPUs).\n"
        "Hint: ask for --workers 2, or for less per worker."
    )
    check_room(nodes, ClusterRequest(num_workers=6, cpus_per_worker=2), None)


@pytest.mark.parametrize(
    ("request_", "room"),
    [
        ({"gpus_per_worker": 0.5}, 4),
        ({"gpus_per_worker": 0.6}, 2),  # two of them do not share one GPU
        ({"gpus_per_worker": 0.25, "cpus_per_worker": 2}, 4),
        ({"gpus_per_worker": 2}, 1),
        ({"resources": ("ssd=1",)}, 3),
        ({"resources": ("ssd=0.5", "tape=1")}, 1),
        ({"resources": ("laser=1",)}, 0),
        ({"task_memory_mib": 1024.0}, 5),
        ({}, 12),
    ],
)
def test_room_is_counted_by_all_that_a_worker_needs(request_: dict[str, Any], room: int) -> None:
    memory = {"memory": 2.5 * 2**30}
    nodes = [{"CPU": 8.0, "GPU": 2.0, "ssd": 3.0, "tape": 1.0, "memory": 3.5 * 2**30}]
    nodes.append({"CPU": 4.0} | memory)
    assert room_for(nodes, ClusterRequest(num_workers=1, **request_)) == room


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--gpus-per-worker", "1.5"), "more than one GPU is a whole number"),
        (("--gpus-per-worker", "-1"), "--gpus-per-worker -1"),
        (("--resource", "ssd"), "--resource ssd is not NAME=AMOUNT"),
        (("--resource", "ssd=0"), "is not NAME=AMOUNT with an amount greater than 0"),
        (("--resource", "=1"), "is not NAME=AMOUNT"),
        (("--resource", "ssd=inf"), "is not NAME=AMOUNT"),
        (("--mem", "4G"), "--mem has no effect with --on ray"),
    ],
)
def test_a_request_that_ray_cannot_mean_is_refused(
    tmp_path: Path, muster_main: Any, words: tuple[str, ...], says: str
) -> None:
    _write_target(tmp_path)
    done = muster_main("sweep", "target.py:square", "--grid", "x=1", "--on", "ray", *words)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr


def test_another_muster_on_a_node_is_told(
    ray_driver: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_target(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("muster.farm.executors.ray.muster_version", lambda: "9.9")
    there = re.escape(importlib.metadata.version("muster-gpu"))
    with pytest.raises(SetupError, match=f"Muster is 9.9 here and {there} on the node"):
        _sweep("target.py:square", range(2))


# ------------------------------------------------------------------ searches


@pytest.mark.slow
def test_a_population_on_a_node_that_does_not_see_the_run_folder(place: Path) -> None:
    population(place, "ray", ClusterRequest(num_workers=2, gpus_per_worker=1))


@pytest.mark.slow
def test_a_search_on_ray(
    ray_driver: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    search(tmp_path, "ray", ClusterRequest(num_workers=2))


def test_a_search_on_a_node_that_does_not_see_the_run_folder(place: Path) -> None:
    """Its checkpoints come home, and go to whichever node a promoted trial runs on."""
    search(place, "ray", ClusterRequest(num_workers=2, gpus_per_worker=1))


# ------------------------------------------------------------------ nodes that are lost, at last


LOST = """
import time
from pathlib import Path

def slow(x: int, go: str):
    time.sleep(0.2)
    while x >= 15 and not Path(go).exists():
        time.sleep(0.02)
    return {"y": x * x}

def count(x: int, ctx):
    state = ctx.restore() or {"n": 0}
    begun_at = state["n"]
    for n in range(begun_at, 40):
        time.sleep(0.1)
        ctx.checkpoint({"n": n + 1})
    return {"begun_at": begun_at, "n": n + 1, "attempt": ctx.attempt}
"""


def _node_of_the_worker(cluster: RayCluster) -> str:
    for ip in cluster.nodes:
        for process in cluster.processes(ip):
            if "muster.farm.worker.main" in command_line(process):
                return ip
    raise AssertionError("no node has a worker")


@pytest.mark.slow
def test_a_task_goes_on_from_its_checkpoint_on_another_node(
    ray_driver: RayCluster, place: Path
) -> None:
    (place / "lost.py").write_text(LOST)
    ray_driver.add(cpus=2, gpus=1, hidden=ray_driver.hidden)
    killed: list[str] = []

    def show(view: Any) -> None:
        if not killed and list(place.glob("runs/*/checkpoints/*.ckpt")):
            killed.append(_node_of_the_worker(ray_driver))
            ray_driver.kill(killed[0])

    run = muster.sweep(
        "lost.py:count", grid={"x": [1]}, executor="ray", monitor_interval_s=0, show=show,
        cluster=ClusterRequest(num_workers=1, gpus_per_worker=1),
    )  # fmt: skip
    [row] = run.results().to_pylist()
    assert killed
    assert (row["n"], row["state"]) == (40, "done")
    assert row["begun_at"] > 0, "the checkpoint came with it"
    assert list(run.folder.checkpoints.iterdir()) == []
    assert [part.outcome for part, _ in run.log(row["task"])] == ["lost", "ok"]


def test_the_loss_of_a_node_loses_and_doubles_nothing(ray_driver: RayCluster, place: Path) -> None:
    (place / "lost.py").write_text(LOST)
    ip = ray_driver.add(cpus=2, hidden=ray_driver.hidden)
    num_workers = 2 * len([1 for ip in ray_driver.nodes if ray_driver.processes(ip)])
    killed: list[str] = []
    go = ray_driver.folder / f"go-{os.urandom(4).hex()}"  # seen on every node

    def show(view: Any) -> None:
        all_work = all(line.state == "running" for line in view.workers)
        if not killed and all_work and view.num_done >= 15:
            killed.append(ip)
            ray_driver.kill(ip)
            go.touch()

    run = muster.sweep(
        "lost.py:slow", grid={"x": range(150), "go": [str(go)]}, executor="ray",
        monitor_interval_s=0, show=show,
        cluster=ClusterRequest(num_workers=num_workers), retries=0,  # a loss is no try
    )  # fmt: skip
    assert killed
    assert run.exit_code == 0
    rows = sorted(run.results().to_pylist(), key=lambda row: row["x"])
    assert [(row["x"], row["y"]) for row in rows] == [(x, x * x) for x in range(150)]
    assert run.status().num_retried >= 1, "the node was at work"
