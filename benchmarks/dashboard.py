"""What the dashboard costs and how fast it is, beside those of others that are installed.

python benchmarks/dashboard.py              # about 90 minutes: one of them is a busy hour
python benchmarks/dashboard.py --only viewers memory --memory-minutes 10
python benchmarks/dashboard.py --quick

A finished sweep of 100,000 tasks is looked at in Chromium: the first contentful paint of its table
(of a server that knows it, and of one that has just started); sorting by another column and a
filter that is new each time, as the page asks for them, and from the click until the rows are seen;
and 50 curves of 2,000 points from the data to the second frame. Further: all files together,
compressed; what an idle run sends; what ten viewers of its table cost a sweep of tasks that do
nothing on all cores; the memory of the server while a run records 50 tasks a second and somebody
looks at its table.

The viewers ask as pages do, and share the processors with the sweep. Machines drift within seconds
by more than the goal, so the server of the pages is stopped for a tenth of a second and goes on for
as long, in turn. In stretches of 5 s the spans in which it goes on are compared with those in which
it is stopped: by tasks per second, and by processor time, which is told from what else the machine
does: what the sweep's processes use for a task, and the server's share of all cores, which the
sweep has otherwise. The medians of the ratios are judged by their 95 % intervals. What happened
while it was stopped the server tells afterwards, so this is up to twice what viewers cost. Until
28 November 2026 slices of two seconds with viewers and without were compared, by tasks per second
alone.

`others`: 50 curves of 2,000 points in one page of ours and of each dashboard that is installed: the
first contentful paint, when the picture changed last, the bytes until then, and the bytes a second
after that, while nothing happens. Without playwright and Chromium the browser's parts are left out.
"""

from __future__ import annotations

import argparse
import gzip
import os
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPException
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import psutil
from tests.made_runs import go_on, made_sweep

import muster
from dashboard_peers import PEERS, Runs, Seen, browser, can_browse, first_paint, seen, served
from measuring import at_most, goal, interval, machine, processor_s, table, write_json
from muster.farm.ledger.store import Ledger
from muster.web.folder import id_of

Record = dict[str, float]
STATIC = Path(muster.__file__).parent / "web/static"
VIEWERS = ("cost of 10 viewers, tasks/s, %", "cost of 10 viewers, processor time, %")
#: How long the server of pages is stopped or goes on, in turn; what is compared.
SPAN_S, STRETCH_S = 0.1, 5.0
GOALS = {
    "first paint of 100,000 tasks, ms": 1000.0, "sort, ms": 300.0, "filter, ms": 300.0,
    "sort, until it is seen, ms": 300.0, "filter, until it is seen, ms": 300.0,
    "50 curves of 2,000 points, ms": 150.0, "all files, compressed, kB": 120.0,
    "idle run, bytes/s": 0.0, **dict.fromkeys(VIEWERS, 2.0),
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
    """Somebody who looks at a run: what the stream has sent, as it comes. Who looks at its table
    asks for the rows again when something has happened, once a second at most, as the page does.
    """
    front, known = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {token}"}

    def ask(path: str) -> Any:
        return urllib.request.urlopen(urllib.request.Request(front + path, headers=known))

    def rows() -> None:
        with ask(f"/api/run/{run}/tasks?limit=200") as answer:
            answer.read()

    got: list[bytes] = []
    if has_table:
        with suppress(OSError):  # a run that is just beginning; its table is wanted from now on
            rows()
    answer = ask(f"/api/stream?run={run}")

    def read() -> None:
        asked_s = time.monotonic()
        with suppress(OSError, ValueError, AttributeError, HTTPException):
            while data := answer.read1(65536):
                got.append(data)
                if has_table and time.monotonic() - asked_s >= 1.0:
                    rows()
                    asked_s = time.monotonic()

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
#: Clicks a column, or types a filter, and waits for the frame that shows the rows of the answer.
#: That is told by the answer and not by other rows alone, which two filters need not have.
SEE = """async ([selector, text, most]) => {
  const one = document.querySelector(selector), ask = window.fetch;
  const shown = () => document.querySelector(".grid tbody").textContent;
  const frame = () => new Promise((done) => requestAnimationFrame(done));
  if (!one) throw new Error("the page has no " + selector);
  const before = shown(), begin = performance.now();
  let came = 0;
  window.fetch = async (path, ...more) => {
    const answer = await ask(path, ...more);
    if (String(path).includes("/tasks")) came = performance.now();
    return answer;
  };
  if (text === null) one.click();
  else { one.value = text; one.dispatchEvent(new Event("input", { bubbles: true })); }
  try {
    while (!came || (shown() === before && performance.now() - came < 200)) {
      if (performance.now() - begin > most) throw new Error("no rows came for " + selector);
      await frame();
    }
  } finally { window.fetch = ask; }
  return shown() === before ? came - begin : performance.now() - begin; }"""


def looked_at(root: Path, folder: Path, repeats: int) -> Record:
    run = id_of(root / "big")
    with server(folder, root) as (port, token, _), browser() as chromium:
        front, base = f"http://127.0.0.1:{port}", f"/api/run/{run}/tasks?limit=200"
        known = {"extra_http_headers": {"Authorization": f"Bearer {token}"}}
        paints = [
            first_paint(chromium, f"{front}/run/{run}/tasks", **known) for _ in range(repeats + 1)
        ]
        page = chromium.new_context(**known).new_page()
        page.goto(f"{front}/run/{run}/tasks")
        page.evaluate(ASK, [base])
        names = COLUMNS[:repeats]
        most = 30_000.0
        sorts = [page.evaluate(SEE, [f"th button[title={name}]", None, most]) for name in names]
        filters = [f"lr>0.00{n} width=64" for n in range(1, repeats + 1)]
        typed = [page.evaluate(SEE, ["input[data-search]", text, most]) for text in filters]
        sort = page.evaluate(ASK, [f"{base}&sort={name}&desc=1" for name in names])
        others = [f"lr<0.00{n}%20width=32" for n in range(1, repeats + 1)]
        chosen = page.evaluate(ASK, [f"{base}&filter={text}&sort=loss" for text in others])
        page.goto(f"{front}/run/{run}")  # a page that has what draws
        drawn = [
            page.evaluate(DRAW, f"/api/run/{run}/curves?name=loss&px=1000") for _ in range(repeats)
        ]
        assert {number for _, number in drawn} == {50}
    return {
        "first paint of 100,000 tasks, ms": statistics.median(paints[1:]),
        "the same, of a server just started, ms": paints[0],
        "sort, ms": statistics.median(sort),
        "sort, until it is seen, ms": statistics.median(sorts),
        "filter, ms": statistics.median(chosen),
        "filter, until it is seen, ms": statistics.median(typed),
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


def sweep_of(folder: Path, num_tasks: int) -> tuple[list[str], Path, Path]:
    """A sweep of tasks that do nothing: its words, where they are said, and its folder."""
    root = folder / f"rate-{time.monotonic_ns()}"
    root.mkdir()
    (root / "target.py").write_text(TARGET)
    run = root / "runs" / "run"
    command = [sys.executable, "-m", "muster", "sweep", "target.py:small", "--seeds",
               str(num_tasks), "--devices", "cpu:2", "--quiet", "--run-dir", str(run)]  # fmt: skip
    return command, root, run


def tasks_of_a_minute(folder: Path) -> int:
    """As many as a sweep does here in 45 seconds, a million at most."""
    num = 100_000  # of fewer, the start takes much of the time
    command, root, _ = sweep_of(folder, num)
    begin = time.monotonic()
    subprocess.run(command, cwd=root, check=True)
    return min(10**6, int(45 * num / (time.monotonic() - begin)))


class Span(NamedTuple):
    """A part of a sweep. ``goes_on``: whether the server does, or is stopped; what the processes of
    the sweep and the server had used by its beginning.
    """

    begin_s: float
    goes_on: bool
    sweep_s: float
    server_s: float


class Cost(NamedTuple):
    """Of ten viewers, in a stretch of a sweep, in percent; ``server``: of a core."""

    rate: float
    processor: float
    server: float


def costs_of_viewers(folder: Path, num_tasks: int) -> list[Cost]:
    """One for each stretch of a sweep that ten viewers look at."""
    command, root, run = sweep_of(folder, num_tasks)
    with subprocess.Popen(command, cwd=root) as sweep:
        while not (run / "ledger.sqlite").exists():
            time.sleep(0.02)
        with server(root, root / "runs") as (port, token, pid), ExitStack() as stack:
            for _ in range(10):
                stack.enter_context(viewer(port, token, id_of(run)))
            time.sleep(3.0)  # the table is read for the first time
            spans = stopped_in_turn(sweep, psutil.Process(pid))
        assert sweep.wait() == 0
    with closing(sqlite3.connect(run / "ledger.sqlite")) as ledger:
        [ended] = zip(*ledger.execute("SELECT started_s + seconds FROM attempts"), strict=True)
    return viewers_cost(spans, sorted(ended))


def stopped_in_turn(sweep: subprocess.Popen[bytes], pages: psutil.Process) -> list[Span]:
    """Stop the server of pages every other span until the sweep has ended."""
    spans: list[Span] = []
    at_work = [sweep.pid, *(p.pid for p in psutil.Process(sweep.pid).children(recursive=True))]
    goes_on = True
    try:
        # What a worker has used is unknown once it has ended: then the sweep is as good as over.
        with suppress(OSError, psutil.Error):
            while sweep.poll() is None:
                used = [processor_s(pid) for pid in (*at_work, pages.pid)]
                spans.append(Span(time.time(), goes_on, sum(used[:-1]), used[-1]))
                time.sleep(SPAN_S)
                goes_on = not goes_on
                pages.resume() if goes_on else pages.suspend()
    finally:
        pages.resume()
    return spans


def viewers_cost(spans: Sequence[Span], ended: Sequence[float]) -> list[Cost]:
    """``ended``: when the tasks had, sorted. What belongs to no whole stretch is left out."""
    found = []
    per_stretch = 2 * round(STRETCH_S / SPAN_S / 2)
    for first in range(0, len(spans) - per_stretch, per_stretch):
        tasks, wall, sweep_s, server_s = ({True: 0.0, False: 0.0} for _ in range(4))
        for span, after in pairwise(spans[first : first + per_stretch + 1]):
            tasks[span.goes_on] += bisect(ended, after.begin_s) - bisect(ended, span.begin_s)
            wall[span.goes_on] += after.begin_s - span.begin_s
            sweep_s[span.goes_on] += after.sweep_s - span.sweep_s
            server_s[span.goes_on] += after.server_s - span.server_s
        if min(tasks.values()) == 0:
            continue
        rates = {goes_on: tasks[goes_on] / wall[goes_on] for goes_on in tasks}
        per_task = {goes_on: sweep_s[goes_on] / tasks[goes_on] for goes_on in tasks}
        cores = os.cpu_count() or 1
        found.append(
            Cost(
                100 * (1 - rates[True] / rates[False]),
                100 * (per_task[True] / per_task[False] - 1 + server_s[True] / wall[True] / cores),
                100 * sum(server_s.values()) / sum(wall.values()),
            )
        )
    return found


def growth_percent(folder: Path, seconds: float) -> tuple[float, float]:
    """How much the server's memory grows while a run records and is looked at, from a fifth of the
    time on, and the MiB at the end. All tasks of the run are there from the beginning.
    """
    root = folder / f"busy-{time.monotonic_ns()}"
    run = made_sweep(root / "run", 1000, num_curves=1, num_open=int(seconds * 50) + 100)
    sizes = []
    with (
        closing(Ledger(run.ledger)) as ledger,
        server(folder, root) as (port, token, pid),
        viewer(port, token, id_of(run.path)) as got,
    ):
        begin = time.monotonic()
        for turn in count():
            go_on(ledger, 10_000 + turn)
            got.clear()
            now = time.monotonic() - begin
            if now > seconds:
                break
            if now > seconds / 5:
                sizes.append(psutil.Process(pid).memory_info().rss / 2**20)
            time.sleep(max(0.0, 0.2 * (turn + 1) - now))
    tenth = max(1, len(sizes) // 10)
    early, late = (statistics.median(part) for part in (sizes[:tenth], sizes[-tenth:]))
    return 100 * (late / early - 1), late


# ---------------------------------------------------------------------- others


def compared(
    folder: Path, repeats: int, num_curves: int, num_points: int
) -> dict[str, Seen | None]:
    """The same number of curves in one page of each; None where it is not installed."""
    runs = Runs(folder / "others", num_curves, num_points)
    runs.folder.mkdir()
    run = made_sweep(
        runs.folder / "runs/curves", num_curves + 1, num_curves=num_curves, num_points=num_points
    ).path
    tasks = "&".join(f"task={number}" for number in range(1, num_curves + 1))
    with browser() as chromium:
        with server(runs.folder, run.parent) as (port, token, _):
            known = {"extra_http_headers": {"Authorization": f"Bearer {token}"}}
            page = f"http://127.0.0.1:{port}/compare?run={id_of(run)}&{tasks}"
            found: dict[str, Seen | None] = {"muster": seen(chromium, page, repeats, **known)}
        for name, peer in PEERS.items():
            found[name] = None
            if peer.is_installed:
                with served(peer, runs) as address:
                    found[name] = seen(chromium, address, repeats)
    return found


def said(name: str, value: float, intervals: dict[str, tuple[float, float]], busy_s: float) -> str:
    """With its 95 % interval, or with the time after which it was so."""
    if name in intervals:
        return "{:,.1f} [{:,.1f}, {:,.1f}]".format(value, *intervals[name])
    return f"{value:,.1f}{f' in {busy_s / 60:.1f} min' if name.startswith('growth') else ''}"


PARTS = ["browser", "files", "idle", "viewers", "memory", "others"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=PARTS)
    parser.add_argument("--memory-minutes", type=float)
    parser.add_argument("--idle-seconds", type=float)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    parts = given.only or (PARTS[:-1] if given.quick else PARTS)
    repeats, idle_s, busy_s = (1, 5.0, 10.0) if given.quick else (7, 60.0, 3600.0)
    sweeps = 1 if given.quick else given.repeats or 7
    curves = (5, 100) if given.quick else (50, 2000)
    repeats = given.repeats or repeats
    idle_s = given.idle_seconds or idle_s
    if given.memory_minutes:
        busy_s = 60 * given.memory_minutes
    found: Record = {}
    intervals: dict[str, tuple[float, float]] = {}
    verdicts: dict[str, bool | None] = {}  # of what is a difference of neighbours
    peers: dict[str, Seen | None] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if {"browser", "idle"} & {*parts}:
            made_sweep(folder / "runs/big", 100_000, num_curves=51)
        if "browser" in parts and can_browse():
            found |= looked_at(folder / "runs", folder, repeats)
        if "files" in parts:
            found["all files, compressed, kB"] = files_kb()
        if "idle" in parts:
            found["idle run, bytes/s"] = idle_bytes_per_s(folder / "runs", folder, idle_s)
        if "viewers" in parts:
            num_tasks = 20_000 if given.quick else tasks_of_a_minute(folder)
            costs = [cost for _ in range(sweeps) for cost in costs_of_viewers(folder, num_tasks)]
            if costs:  # a quick sweep may be over before there is one
                names = (*VIEWERS, "what their server takes of a core, %")
                for name, values in zip(names, zip(*costs, strict=True), strict=True):
                    found[name], intervals[name] = statistics.median(values), interval(values)
                    if name in GOALS:
                        verdicts[name] = at_most(values, GOALS[name])
        if "memory" in parts:
            growth, size = growth_percent(folder, busy_s)
            found |= {"growth of the server's memory, %": growth, "the server's memory, MiB": size}
        if "others" in parts and can_browse():
            peers = compared(folder, repeats, *curves)
    rows = [
        [name, f"{value:,.1f}", "{:,.1f} to {:,.1f}".format(*intervals.get(name, (value, value))),
         f"{GOALS[name]:,.0f}" if name in GOALS else "",
         goal(name, f"≤ {GOALS[name]:,.0f}", said(name, value, intervals, busy_s),
              verdicts.get(name, value <= GOALS[name]), shown=False)
         if name in GOALS else ""]
        for name, value in found.items()
    ]  # fmt: skip
    table(["what", "median", "95 % interval", "goal", ""], rows)
    if peers:
        print(f"\n{curves[0]} curves of {curves[1]:,} points")
        heads = ["in", "first paint, ms", "last change, ms", "came, kB", "then, bytes/s"]
        table(heads, [
            [name, "not installed"] + [""] * 3 if one is None else
            [name, *(f"{value:,.0f}" for value in one)] for name, one in peers.items()
        ])  # fmt: skip
    names = ("playwright", "starlette", "uvicorn", "tensorboard", "trackio", "mlflow", "optuna")
    record = {"machine": machine(*names), "found": found, "intervals": intervals, "others": peers}
    write_json(given.json, record)


if __name__ == "__main__":
    main()
