"""What the dashboard costs and how fast it is, beside those of others that are installed.

python benchmarks/dashboard.py              # about 75 minutes: one of them is a busy hour
python benchmarks/dashboard.py --quick

A finished sweep of 100,000 tasks is made through the ledger's own code, and looked at in Chromium:
the first contentful paint of its table, sorting by another column and filtering by another word
each time, as the page asks for them, and 50 curves of 2,000 points from the data to the second
frame. Further: all files together, compressed; what an idle run sends; tasks per second with ten
viewers of its table and without, alternating, medians; the memory of the server while a run records
50 tasks a second and somebody looks at its table. The same first paint, with the bytes that came,
for TensorBoard (50 curves of 2,000 points) and optuna-dashboard (10,000 trials), each where it is
installed. Without playwright and Chromium the browser's part is left out.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import os
import shutil
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import psutil
from tests.made_runs import made_sweep

import muster
from measuring import alternate, held, machine, table, write_json
from muster.farm import canonical
from muster.farm.ledger.store import Ledger, NewTask
from muster.farm.task import AttemptRecord, Finished, Outcome
from muster.web.folder import id_of

Record = dict[str, float]
STATIC = Path(muster.__file__).parent / "web/static"
GOALS = {
    "first paint of 100,000 tasks, ms": 1000.0, "sort, ms": 300.0, "filter, ms": 300.0,
    "50 curves of 2,000 points, ms": 150.0, "all files, compressed, kB": 120.0,
    "idle run, bytes/s": 0.0, "cost of 10 viewers, %": 2.0,
    "growth of the server's memory, %": 10.0,
}  # fmt: skip
TARGET = "def small(seed: int):\n    return {'seed': seed}\n"


@contextmanager
def server(folder: Path, root: Path) -> Iterator[tuple[int, str, int]]:
    """The port, the token and the process of ``muster web ROOT``."""
    output = folder / "web-output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "muster", "web", str(root)], stdout=file, stderr=file,
            env={**os.environ, "XDG_STATE_HOME": str(folder / "state")},
        )  # fmt: skip
    try:
        while "ends it" not in output.read_text():
            assert process.poll() is None, output.read_text()
            time.sleep(0.05)
        address = urlsplit(next(w for w in output.read_text().split() if w.startswith("http://")))
        yield address.port or 0, address.fragment, process.pid
    finally:
        process.terminate()
        process.wait()


@contextmanager
def viewer(port: int, token: str, run: str, *, has_table: bool = True) -> Iterator[list[bytes]]:
    """Somebody who looks at a run, or its table: what the stream has sent, as it comes."""
    known = {"Authorization": f"Bearer {token}"}
    if has_table:
        rows = f"http://127.0.0.1:{port}/api/run/{run}/tasks?limit=200"
        with suppress(OSError):  # a run that is just beginning; its table is wanted from now on
            urllib.request.urlopen(urllib.request.Request(rows, headers=known)).read()
    address = f"http://127.0.0.1:{port}/api/stream?run={run}"
    request = urllib.request.Request(address, headers=known)
    got: list[bytes] = []
    answer = urllib.request.urlopen(request)

    def read() -> None:
        with suppress(OSError, ValueError, AttributeError, HTTPException):
            while data := answer.read1(65536):
                got.append(data)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield got
    finally:
        answer.fp.raw._sock.shutdown(socket.SHUT_RDWR)
        thread.join()


# ---------------------------------------------------------------------- in the browser

ASK = """async (paths) => { const taken = []; for (const path of paths) {
  const begin = performance.now(); await (await fetch(path)).json();
  taken.push(performance.now() - begin); } return taken; }"""
COLUMNS = ("loss", "accuracy", "lr", "width", "opt", "seed", "seconds")
DRAW = """async (path) => { const found = await (await fetch(path)).json();
  const lines = found.series.map((one) => one.y), box = document.body;
  const begin = performance.now();
  new uPlot({ width: 1200, height: 400, series: [{}, ...lines.map(() => ({ stroke: "#07c" }))] },
    [found.series[0].x, ...lines], box);
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  return [performance.now() - begin, found.series.length]; }"""
PAINT = """() => new Promise((done) => new PerformanceObserver((seen) => {
  for (const one of seen.getEntriesByName("first-contentful-paint")) done(one.startTime);
}).observe({ type: "paint", buffered: true }))"""


@contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        chromium = play.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        yield chromium
        chromium.close()


def can_browse() -> bool:
    return bool(shutil.which("chromium") and importlib.util.find_spec("playwright"))


def painted(chromium: Any, address: str, repeats: int, **context: Any) -> tuple[float, float]:
    """Milliseconds to the first contentful paint, a median, and kB that came until it was quiet."""
    times, sizes = [], []
    for _ in range(repeats):
        with closing(chromium.new_context(**context)) as tab:
            page, got = tab.new_page(), [0]
            page.on("requestfinished", lambda r, g=got: g.append(r.sizes()["responseBodySize"]))
            page.goto(address)
            times.append(page.evaluate(PAINT))
            page.wait_for_timeout(2000)
            sizes.append(sum(got) / 1000)
    return statistics.median(times), statistics.median(sizes)


def looked_at(root: Path, folder: Path, repeats: int) -> Record:
    run = id_of(root / "big")
    with server(folder, root) as (port, token, _), browser() as chromium:
        front, base = f"http://127.0.0.1:{port}", f"/api/run/{run}/tasks?limit=200"
        known = {"extra_http_headers": {"Authorization": f"Bearer {token}"}}
        paint, size = painted(chromium, f"{front}/run/{run}/tasks", repeats, **known)
        page = chromium.new_context(**known).new_page()
        page.goto(f"{front}/run/{run}")
        page.evaluate(ASK, [base])
        sort = page.evaluate(ASK, [f"{base}&sort={name}" for name in COLUMNS[:repeats]])
        filters = [f"lr>0.00{n}%20width=64" for n in range(1, repeats + 1)]
        chosen = page.evaluate(ASK, [f"{base}&filter={text}&sort=loss" for text in filters])
        again = page.evaluate(ASK, [f"{base}&filter={filters[-1]}&sort=loss"] * repeats)
        drawn = [
            page.evaluate(DRAW, f"/api/run/{run}/curves?name=loss&px=1000") for _ in range(repeats)
        ]
        assert {number for _, number in drawn} == {50}
    return {
        "first paint of 100,000 tasks, ms": paint,
        "bytes of the page, kB": size,
        "sort, ms": statistics.median(sort),
        "filter, ms": statistics.median(chosen),
        "the same again, from memory, ms": statistics.median(again),
        "50 curves of 2,000 points, ms": statistics.median(took for took, _ in drawn),
    }


# ---------------------------------------------------------------------- the server and the runs


def files_kb() -> float:
    files = [path for path in STATIC.rglob("*") if path.suffix in (".js", ".css", ".svg")]
    return sum(len(gzip.compress(path.read_bytes(), 9)) for path in files) / 1000


def idle_bytes_per_s(root: Path, folder: Path, seconds: float) -> float:
    """Without the comments that keep a connection open."""
    with (
        server(folder, root) as (port, token, _),
        viewer(port, token, id_of(root / "big"), has_table=False) as got,
    ):
        time.sleep(3.0)
        before = len(got)
        time.sleep(seconds)
        lines = b"".join(got[before:]).splitlines()
    return sum(len(line) for line in lines if not line.startswith(b":")) / seconds


def rate(folder: Path, num_tasks: int, viewers: int) -> float:
    """Tasks per second of a sweep that ``viewers`` look at."""
    root = folder / f"rate-{time.monotonic_ns()}"
    root.mkdir()
    (root / "target.py").write_text(TARGET)
    run = root / "runs" / "run"
    command = [sys.executable, "-m", "muster", "sweep", "target.py:small", "--seeds",
               str(num_tasks), "--devices", "cpu:2", "--quiet", "--run-dir", str(run)]  # fmt: skip
    with ExitStack() as stack:
        sweep = subprocess.Popen(command, cwd=root)
        if viewers:
            while not (run / "ledger.sqlite").exists():
                time.sleep(0.02)
            port, token, _ = stack.enter_context(server(root, root / "runs"))
            for _ in range(viewers):
                stack.enter_context(viewer(port, token, id_of(run)))
        assert sweep.wait() == 0
    assert muster.Run(run).status().counts["done"] == num_tasks
    with closing(sqlite3.connect(run / "ledger.sqlite")) as ledger:
        sql = "SELECT min(started_s), max(started_s + seconds) FROM attempts WHERE task_id > ?"
        first, last = ledger.execute(sql, (num_tasks // 2,)).fetchone()
    return num_tasks / 2 / (last - first)  # the second half: the viewers are there


def growth_percent(folder: Path, seconds: float) -> tuple[float, float]:
    """How much the server's memory grows while a run records and is looked at, from a fifth of the
    time on, and the MiB at the end."""
    root = folder / f"busy-{time.monotonic_ns()}"
    run = made_sweep(root / "run", 1000, num_curves=1)
    encoded = canonical.payload_and_key("train.py:run")
    sizes = []
    with (
        closing(Ledger(run.ledger)) as ledger,
        server(folder, root) as (port, token, pid),
        viewer(port, token, id_of(run.path)) as got,
    ):
        begin, seed = time.monotonic(), 10**6
        while (now := time.monotonic() - begin) < seconds:
            ledger.begin()
            new = [encoded({"lr": 0.1, "seed": seed + n}) for n in range(10)]
            target = ledger.target_id("train.py:run")
            ledger.add_tasks(NewTask(key, target, payload) for payload, key in new)
            ended = [
                AttemptRecord(task.task_id, task.token, 1, Finished(
                    task.task_id, task.token, Outcome.OK, time.time(), 0.1, 0, 0, 100.0))
                for task in ledger.claim(10)
            ]  # fmt: skip
            values = [(canonical.encode({"loss": 0.5, "accuracy": 0.5}), None) for _ in ended]
            ledger.record_done(ended, values)
            ledger.commit()
            seed += 10
            got.clear()
            if now > seconds / 5:
                sizes.append(psutil.Process(pid).memory_info().rss / 2**20)
            time.sleep(0.2)
    tenth = max(1, len(sizes) // 10)
    early, late = (statistics.median(part) for part in (sizes[:tenth], sizes[-tenth:]))
    return 100 * (late / early - 1), late


# ---------------------------------------------------------------------- others


@contextmanager
def other(command: list[str], port: int) -> Iterator[str]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(600):
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        return int(listening.getsockname()[1])


def tensorboard(folder: Path, repeats: int) -> tuple[float, float]:
    from torch.utils.tensorboard import SummaryWriter

    for curve in range(50):
        with closing(SummaryWriter(str(folder / f"tb/{curve}"))) as writer:
            for step in range(2000):
                writer.add_scalar("loss", 1 / (step + curve + 1), step)
    port = free_port()
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder / "tb"),
               "--port", str(port), "--load_fast", "false"]  # fmt: skip
    with other(command, port) as address, browser() as chromium:
        return painted(chromium, f"{address}/#timeseries", repeats)


def optuna_dashboard(folder: Path, repeats: int) -> tuple[float, float]:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    url = f"sqlite:///{folder / 'optuna.db'}"
    study = optuna.create_study(storage=url, sampler=optuna.samplers.RandomSampler(seed=0))
    space = {"lr": optuna.distributions.FloatDistribution(1e-5, 0.1, log=True)}
    study.add_trials([
        optuna.trial.create_trial(params={"lr": 0.01 + n * 1e-7}, distributions=space, value=n)
        for n in range(10_000)
    ])  # fmt: skip
    port = free_port()
    with other(["optuna-dashboard", url, "--port", str(port)], port) as address, browser() as it:
        return painted(it, f"{address}/dashboard/studies/1", repeats)


PARTS = ["browser", "files", "idle", "viewers", "memory", "others"]
OTHERS = {"tensorboard": tensorboard, "optuna_dashboard": optuna_dashboard}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=PARTS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    parts = given.only or PARTS
    repeats, rounds, num_tasks = (1, 1, 400) if given.quick else (7, 7, 20_000)
    idle_s, busy_s = (5.0, 10.0) if given.quick else (60.0, 3600.0)
    found: Record = {}
    peers: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        made_sweep(folder / "runs/big", 100_000, num_curves=51)
        if "browser" in parts and can_browse():
            found |= looked_at(folder / "runs", folder, repeats)
        if "files" in parts:
            found["all files, compressed, kB"] = files_kb()
        if "idle" in parts:
            found["idle run, bytes/s"] = idle_bytes_per_s(folder / "runs", folder, idle_s)
        if "viewers" in parts:
            rates = alternate(
                {
                    "alone": lambda: rate(folder, num_tasks, 0),
                    "ten viewers": lambda: rate(folder, num_tasks, 10),
                },
                rounds,
            )
            alone, seen = (statistics.median(values) for values in rates.values())
            found["tasks/s without viewers"] = alone
            found["cost of 10 viewers, %"] = 100 * (1 - seen / alone)
        if "memory" in parts:
            growth, size = growth_percent(folder, busy_s)
            found |= {"growth of the server's memory, %": growth, "the server's memory, MiB": size}
        if "others" in parts and can_browse() and not given.quick:
            for name, measure in OTHERS.items():
                if importlib.util.find_spec(name):
                    peers[name] = measure(folder, repeats)
    rows = [
        [name, f"{value:,.1f}", f"{GOALS[name]:,.0f}" if name in GOALS else "",
         held(value <= GOALS[name]) if name in GOALS else ""]
        for name, value in found.items()
    ]  # fmt: skip
    rows += [[f"{name}: first paint, ms", f"{ms:,.1f}", "", ""] for name, (ms, _) in peers.items()]
    rows += [[f"{name}: came, kB", f"{size:,.1f}", "", ""] for name, (_, size) in peers.items()]
    table(["what", "median", "goal", ""], rows)
    names = ("playwright", "starlette", "uvicorn", "tensorboard", "optuna-dashboard")
    write_json(given.json, {"machine": machine(*names), "found": found, "others": peers})


if __name__ == "__main__":
    main()
