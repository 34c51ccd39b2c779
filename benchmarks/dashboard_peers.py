"""How a page is looked at, and other dashboards with the same curves, for `dashboard.py`: each in a
process of its own, whose way out of this machine is shut.

Ray's is not among them: it has neither curves nor a table of results, and needs ray[default].
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

#: Nobody listens at port 9, and whoever asks for a proxy asks there; the rest are their own words.
SHUT = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9"),
    **dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9"),
    "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost", "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "GRADIO_ANALYTICS_ENABLED": "False",
    "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
}  # fmt: skip
_START_S = 120.0


class Runs(NamedTuple):
    """What is made for each of them, below ``folder``."""

    folder: Path
    curves: int
    points: int


class Serving(NamedTuple):
    command: list[str]
    env: dict[str, str]
    page: str


class Peer(NamedTuple):
    """``needs``: the module that is it. ``make``: makes its runs, and says how they are served."""

    needs: str
    make: Callable[[Runs, int], Serving]

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.needs) is not None


PAINT = """() => new Promise((done) => new PerformanceObserver((seen) => {
  for (const one of seen.getEntriesByName("first-contentful-paint")) done(one.startTime);
}).observe({ type: "paint", buffered: true }))"""


@contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    names = "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"  # nothing is asked of another machine
    with sync_playwright() as play:
        chromium = play.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", f"--host-resolver-rules={names}"],
        )
        yield chromium
        chromium.close()


def can_browse() -> bool:
    return bool(shutil.which("chromium") and importlib.util.find_spec("playwright"))


class Seen(NamedTuple):
    """``last_ms``: when the picture changed last, within a third of a second or so."""

    paint_ms: float
    last_ms: float
    kb: float
    bytes_per_s: float


def seen(chromium: Any, address: str, repeats: int, **context: Any) -> Seen:
    """Medians of opening a page until it stands still for three seconds, a minute at most."""
    from playwright.sync_api import Error

    found = []
    for _ in range(repeats):
        with closing(
            chromium.new_context(viewport={"width": 1280, "height": 1000}, **context)
        ) as tab:
            page, got = tab.new_page(), [0]
            page.on("requestfinished", lambda r, g=got: g.append(r.sizes()["responseBodySize"]))
            begin = now = last = time.perf_counter()
            page.goto(address, wait_until="commit")
            picture = b""
            while now - last < 3.0 and now - begin < 60.0:
                now = time.perf_counter()
                with suppress(Error):  # a page that has just begun may have no picture
                    if (after := page.screenshot()) != picture:
                        picture, last = after, now
                page.wait_for_timeout(100)
            came = sum(got)
            page.wait_for_timeout(5000)
            kept = (sum(got) - came) / 5.0
            found.append(Seen(page.evaluate(PAINT), 1000 * (last - begin), came / 1000, kept))
    return Seen(*(statistics.median(values) for values in zip(*found, strict=True)))


def first_paint(chromium: Any, address: str, **context: Any) -> float:
    with closing(chromium.new_context(**context)) as tab:
        page = tab.new_page()
        page.goto(address)
        return float(page.evaluate(PAINT))


# ---------------------------------------------------------------------- the others


@contextmanager
def served(peer: Peer, runs: Runs) -> Iterator[str]:
    """The address of its page. Raises AssertionError where it talks to another machine."""
    port = _free_port()
    found = peer.make(runs, port)
    with subprocess.Popen(
        found.command, env={**os.environ, **SHUT, **found.env}, cwd=runs.folder,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            _wait_for(port, process)
            yield f"http://127.0.0.1:{port}{found.page}"
            assert (far := _far(process.pid)) == [], far
        finally:
            for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                with suppress(psutil.NoSuchProcess):
                    one.terminate()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, "it has ended"
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise AssertionError("it does not listen")


def _far(pid: int) -> list[str]:
    """The addresses of other machines that it has a connection to."""
    process = psutil.Process(pid)
    return [
        f"{one.raddr.ip}:{one.raddr.port}"
        for each in (process, *process.children(recursive=True))
        for one in each.net_connections("inet")
        if one.raddr and not one.raddr.ip.removeprefix("::ffff:").startswith(("127.", "::1"))
    ]


def _free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        return int(listening.getsockname()[1])


def _made(code: str, runs: Runs, env: dict[str, str]) -> None:
    """Run it where its settings are those of the server."""
    words = [sys.executable, "-c", code, str(runs.folder), str(runs.curves), str(runs.points)]
    subprocess.run(words, env={**os.environ, **SHUT, **env}, cwd=runs.folder, check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip


def _tensorboard(runs: Runs, port: int) -> Serving:
    code = """
import sys
from torch.utils.tensorboard import SummaryWriter
for curve in range(int(sys.argv[2])):
    with SummaryWriter(f"{sys.argv[1]}/tensorboard/{curve}") as writer:
        for step in range(int(sys.argv[3])):
            writer.add_scalar("loss", 1 / (step + curve + 1), step)
"""
    _made(code, runs, {})
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", "tensorboard", "--port",
               str(port), "--host", "127.0.0.1", "--load_fast", "false"]  # fmt: skip
    return Serving(command, {}, "/#timeseries")


def _trackio(runs: Runs, port: int) -> Serving:
    code = """
import sys
from trackio.sqlite_storage import SQLiteStorage
for curve in range(int(sys.argv[2])):
    steps = range(int(sys.argv[3]))
    SQLiteStorage.bulk_log("curves", f"run-{curve}",
                           [{"loss": 1 / (step + curve + 1)} for step in steps], list(steps))
"""
    env = {"TRACKIO_DIR": str(runs.folder / "trackio")}
    _made(code, runs, env)
    show = ("import trackio; trackio.show('curves', open_browser=False, share=False, "
            f"host='127.0.0.1', server_port={port})")  # fmt: skip
    return Serving([sys.executable, "-c", show], env, "/?project=curves")


def _mlflow(runs: Runs, port: int) -> Serving:
    code = """
import sys
from mlflow import MlflowClient
from mlflow.entities import Metric
client = MlflowClient(f"sqlite:///{sys.argv[1]}/mlflow.db")
made = client.create_experiment("curves")
for curve in range(int(sys.argv[2])):
    run = client.create_run(made, run_name=f"run-{curve}").info.run_id
    points = [Metric("loss", 1 / (n + curve + 1), n, n) for n in range(int(sys.argv[3]))]
    for at in range(0, len(points), 1000):
        client.log_batch(run, points[at:at + 1000])
    client.set_terminated(run)
"""
    _made(code, runs, {})
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri",
               "sqlite:///mlflow.db", "--host", "127.0.0.1", "--port", str(port),
               "--workers", "1", "--default-artifact-root", "mlflow"]  # fmt: skip
    return Serving(command, {}, "/#/experiments/1/runs?compareRunsMode=CHART")


def _optuna_dashboard(runs: Runs, port: int) -> Serving:
    """It shows trials, not curves: 10,000 of them."""
    code = """
import sys
import optuna
optuna.logging.set_verbosity(optuna.logging.ERROR)
study = optuna.create_study(storage=f"sqlite:///{sys.argv[1]}/optuna.db",
                            sampler=optuna.samplers.RandomSampler(seed=0))
space = {"lr": optuna.distributions.FloatDistribution(1e-5, 0.1, log=True)}
study.add_trials([
    optuna.trial.create_trial(params={"lr": 0.01 + n * 1e-7}, distributions=space, value=n)
    for n in range(10_000)
])
"""
    _made(code, runs, {})
    command = ["optuna-dashboard", f"sqlite:///{runs.folder / 'optuna.db'}", "--port", str(port)]
    return Serving(command, {}, "/dashboard/studies/1")


PEERS = {
    "TensorBoard": Peer("tensorboard", _tensorboard),
    "trackio": Peer("trackio", _trackio),
    "MLflow": Peer("mlflow", _mlflow),
    "optuna-dashboard": Peer("optuna_dashboard", _optuna_dashboard),
}
