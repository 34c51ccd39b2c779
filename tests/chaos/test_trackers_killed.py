"""Trackers that die, hang or refuse: no point is lost or doubled, and nobody waits for them."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tests.ports import free_port
from tests.processes import command_line
from tests.tracked import READERS, add_lines, gang_folder, in_mlflow, logged

from muster.api.trackers.guard import track, tracking
from muster.run.folder import RunFolder

BATCH, BATCHES = 5, 60
#: Until it has imported its library and sent what there is, and some more.
LIFE_S = {"tensorboard": 3.0, "trackio": 4.0, "wandb": 6.0, "mlflow": 9.0}


def lines(start: int, count: int) -> list[dict[str, object]]:
    steps = range(start, start + count)
    return [{"kind": "train", "step": step, "loss": step / 2} for step in steps]


EXPECTED = {"": {"train/loss": [(step, step / 2) for step in range(BATCH * BATCHES)]}}


@pytest.fixture(autouse=True)
def _at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)


def processes_of(name: str) -> list[psutil.Process]:
    words = ("muster.api.trackers.guard", name)
    mine = psutil.Process().children()
    return [one for one in mine if all(word in command_line(one).split() for word in words)]


@pytest.mark.parametrize(
    ("name", "kills"),
    [
        ("tensorboard", 3),
        *(pytest.param(name, 20, marks=pytest.mark.slow) for name in READERS),
    ],
)
def test_killed_at_random_times(tmp_path: Path, name: str, kills: int) -> None:
    folder, draw, written = gang_folder(tmp_path / "run", lines(0, BATCH)), random.Random(7), BATCH
    with tracking(folder, [name], print, longest_pause_s=0.1):
        for _ in range(kills):
            count = min(BATCH * draw.randrange(3), BATCH * BATCHES - written)
            add_lines(folder, lines(written, count))
            written += count
            process = wait_for(name)
            time.sleep(draw.uniform(0.0, LIFE_S[name]))
            with _gone():
                os.kill(process.pid, signal.SIGKILL)
        add_lines(folder, lines(written, BATCH * BATCHES - written))
    assert track(folder, [name], print) == []
    assert logged(READERS[name](folder)) == EXPECTED


def wait_for(name: str) -> psutil.Process:
    while not (found := processes_of(name)):
        time.sleep(0.02)
    return found[0]


@contextmanager
def _gone() -> Iterator[None]:
    try:
        yield
    except ProcessLookupError:
        return


@contextmanager
def silent_server() -> Iterator[int]:
    """A port that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[socket.socket] = []

        def take() -> None:
            while True:
                try:
                    taken.append(server.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    thread.join()
    for one in taken:
        one.close()


def test_one_that_hangs_holds_up_neither_the_end_nor_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, said = gang_folder(tmp_path / "run", lines(0, BATCH * BATCHES)), []
    with silent_server() as port:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        with tracking(folder, ["mlflow", "tensorboard"], said.append, limit_s=8.0):
            deadline = time.monotonic() + 120
            while not folder.tensorboard.exists() and time.monotonic() < deadline:
                time.sleep(0.1)
            begun = time.monotonic()
        assert time.monotonic() - begun < 60  # of 8 that were given, on a busy machine
    assert [x for x in said if x.startswith("mlflow: 300 points are not sent yet")], said
    assert f"muster track {folder.path} --log-to mlflow" in said[-1]
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert track(folder, ["mlflow", "tensorboard"], print) == []
    for name in ("mlflow", "tensorboard"):
        assert logged(READERS[name](folder)) == EXPECTED


#: Of each trouble one tracker is tried always.
ALWAYS = {("hangs at once", "tensorboard"), ("cannot write", "tensorboard")}
TROUBLES = ("hangs at once", "hangs midway", "cannot write", "goes on", "two at once")


@pytest.mark.parametrize(
    ("trouble", "name"),
    [
        pytest.param(trouble, name, marks=[pytest.mark.slow] * ((trouble, name) not in ALWAYS))
        for trouble in TROUBLES
        for name in READERS
    ],
)
def test_no_trouble_costs_a_point(
    trouble: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders, said = [gang_folder(tmp_path / "run", lines(0, BATCH))], []
    rest = lines(BATCH, BATCH * BATCHES - BATCH)
    place = {
        "tensorboard": folders[0].tensorboard,
        "wandb": folders[0].trackers / "wandb",
        "mlflow": folders[0].trackers / "mlflow.db",
        "trackio": tmp_path / "trackio",
    }[name]
    if trouble.startswith("hangs"):
        with tracking(folders[0], [name], said.append, limit_s=1.0):
            process = wait_for(name)
            if trouble == "hangs midway":
                wait_until(lambda: '"mark": {' in read(folders[0].tracker_position(name)))
            process.suspend()
            add_lines(folders[0], rest)
            begun = time.monotonic()
        assert time.monotonic() - begun < 60, "nobody waits for it"
        assert "points are not sent yet" in said[-1] and not psutil.pid_exists(process.pid)
    elif trouble == "cannot write":
        add_lines(folders[0], rest)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.mkdir() if name == "mlflow" else place.touch()
        with tracking(folders[0], [name], said.append, limit_s=30.0, most_tries=1):
            pass
        assert "300 points are not sent yet" in said[-1]
        place.rmdir() if name == "mlflow" else place.unlink()
    elif trouble == "goes on":
        with tracking(folders[0], [name], said.append, limit_s=120.0):
            pass
        add_lines(folders[0], rest)
    else:
        folders.append(gang_folder(tmp_path / "other", lines(0, BATCH)))
        shared = f"sqlite:///{tmp_path / 'shared.db'}"
        if name == "mlflow":
            monkeypatch.setenv("MLFLOW_TRACKING_URI", shared)
        with (
            tracking(folders[0], [name], said.append, limit_s=120.0, longest_pause_s=0.5),
            tracking(folders[1], [name], said.append, limit_s=120.0, longest_pause_s=0.5),
        ):
            for folder in folders:
                add_lines(folder, rest)
        for folder in folders if name == "mlflow" else []:
            assert track(folder, [name], print) == []
            assert logged(in_mlflow(folder, shared)) == EXPECTED
        if name == "mlflow":
            return
    for folder in folders:
        assert track(folder, [name], print) == []
        assert logged(READERS[name](folder)) == EXPECTED


@pytest.mark.slow
def test_w_and_b_online_without_its_service_keeps_the_points_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, said = gang_folder(tmp_path / "run", lines(0, BATCH * BATCHES)), []
    port = free_port()
    with monkeypatch.context() as online:
        online.setenv("WANDB_MODE", "online")
        online.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
        online.setenv("WANDB_API_KEY", "0123456789" * 4)
        online.setenv("WANDB_INIT_TIMEOUT", "5")
        with tracking(folder, ["wandb"], said.append, limit_s=120.0, most_tries=1):
            pass
        assert "300 points are not sent yet" in said[-1]
        assert "0123456789" not in "\n".join([*said, *_texts(folder)])
    assert track(folder, ["wandb"], print) == []
    assert logged(READERS["wandb"](folder)) == EXPECTED


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_run_that_ends_by_an_error_does_not_keep_silent(tmp_path: Path) -> None:
    folder, said = gang_folder(tmp_path / "run", lines(0, 3)), []
    with (
        pytest.raises(ZeroDivisionError),
        tracking(folder, ["tensorboard"], said.append) as keepers,
    ):
        raise ZeroDivisionError
    assert keepers[0].is_done or "muster track" in said[-1]


def test_a_log_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    folder, said = gang_folder(tmp_path / "it's a run", lines(0, 3)), []
    folder.tracker_log("tensorboard").mkdir(parents=True)
    with tracking(folder, ["tensorboard"], said.append, limit_s=120.0, most_tries=1):
        pass
    assert "Is a directory" in said[-1]
    assert said[-1].endswith("it'\"'\"'s a run' --log-to tensorboard")


def test_one_that_refuses_is_told_of_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, said = gang_folder(tmp_path / "run", lines(0, 3)), []
    port = free_port()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://someone:open-sesame@127.0.0.1:{port}")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "token-of-mine")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with tracking(folder, ["mlflow"], said.append, limit_s=120.0, most_tries=1):
        pass
    assert "3 points are not sent yet" in said[-1]
    everything = "\n".join([*said, *_texts(folder)])
    assert "open-sesame" not in everything and "token-of-mine" not in everything


def _texts(folder: RunFolder) -> Iterator[str]:
    for path in folder.path.rglob("*"):
        if path.is_file():
            yield path.read_bytes().decode("utf-8", "replace")
