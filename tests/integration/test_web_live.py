"""Pages in a real Chromium beside runs that go on, are killed, or are ended from a page."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.browser import Look, chromium, look, run_id
from tests.made_runs import go_on, made_sweep
from tests.ports import free_port
from tests.web_server import web_server

from muster.farm.ledger.store import Ledger

WORK = """
import time
from pathlib import Path

def gated(x, text, ctx):
    for step in range(1, 4):
        while not Path(f"go-{step}").exists():
            time.sleep(0.01)
        ctx.log(step, loss=x / step)
    return {"y": x * 2}

def apart(x):
    while not Path(f"end-{x}").exists():
        time.sleep(0.01)

def fragile(x):
    while x > 1:
        time.sleep(0.01)
    if not Path("mended").exists():
        raise ValueError("broken")
    return {"y": x}

def trial(lr):
    while True:
        time.sleep(0.01)

def word(record):
    while True:
        time.sleep(0.01)
"""
TALK = """
import sys
import time
from pathlib import Path

print("hello", flush=True)
for word in range(1, 5):
    while not Path(f"say-{word}").exists():
        time.sleep(0.01)
    print("word", word, flush=True)
    sys.stdout.buffer.write(b"not a character: \\xff\\n")
    sys.stdout.buffer.flush()
"""
LINE = Path(__file__).parents[1] / "fixtures/old_runs/programs/line.py"
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "talk.py").write_text(TALK)
    (tmp_path / "words.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    shutil.copy(LINE, tmp_path)
    return tmp_path


@contextmanager
def running(place: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command of muster, whose run is runs/it. Files in ``place`` let it go on."""
    process = subprocess.Popen(
        [sys.executable, "-m", "muster", words[0], "--quiet", "--run-dir", "runs/it", *words[1:]],
        cwd=place, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield process
    finally:
        for name in ("go-1", "go-2", "go-3", "end-1", "end-2", "say-1", "say-2", "say-3", "say-4"):
            (place / name).touch()
        process.terminate()
        try:
            process.wait(timeout=120)
        finally:
            process.kill()


def to_the_run(tab: Look, page: str = "") -> str:
    """Opens a page of the run as soon as it is there and works."""
    tab.until("[...document.querySelectorAll('a[data-row]')].some(a => a.text === 'it')")
    run = run_id(tab.server, "it")
    tab.go(f"/run/{run}{page}")
    tab.until("document.querySelector('#head .v-working, #head .v-bad')")
    return run


def back_in(tab: Look) -> None:
    """A server that was started again takes nothing that the one before has given: the page says
    so, and goes on when its address was opened, in whatever tab.
    """
    tab.until("document.querySelector('#live').textContent.includes('open the address')")
    other = tab.context.new_page()
    other.goto(f"http://{tab.server.host}/#{tab.server.token}")
    other.wait_for_selector("html[data-ready]")
    other.close()
    tab.until("document.querySelector('#live').textContent === 'live'")
    tab.wrong = [one for one in tab.wrong if "401" not in one]  # Chromium notes the answer


def test_a_sweep_is_live_and_no_point_is_lost_or_doubled(browser: Any, place: Path) -> None:
    """Both processes are killed while somebody looks."""
    words = ["sweep", "work.py:gated", "--grid", f"text={HOSTILE}", "--grid", "x=1,2"]
    with (
        running(place, *words, "--devices", "cpu:2") as process,
        web_server(place, "--port", str(free_port())) as server,
        look(browser, server) as tab,
    ):
        run = to_the_run(tab)
        tab.until("document.querySelector('#head .counts')?.innerText.includes('running')")
        key = server.ask(f"/api/run/{run}/tasks?limit=1").json["rows"][0]["key"]
        tab.go(f"/run/{run}/task/{key}")
        assert HOSTILE in tab.text("main")
        (place / "go-1").touch()
        tab.until("document.querySelector('[data-points=\"1\"]')")
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        tab.until("/reconnecting|lost/.test(document.querySelector('#live').textContent)")
        (place / "go-2").touch()
        with web_server(place, "--port", str(server.port)):
            back_in(tab)
            tab.until("document.querySelector('[data-points=\"2\"]')")
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            tab.until("document.querySelector('#head .v-paused, #head .v-bad')")
            assert tab.text("#live") == "live"
            assert tab.page.locator("[data-points='2']").count() == 1


NEVER_TWICE = """async () => {
  const { atMost } = await import("/static/lib.js");
  let now = 0, most = 0, times = 0;
  const asked = atMost(10, async () => {
    now += 1; times += 1; most = Math.max(most, now);
    await new Promise((done) => setTimeout(done, 100));
    now -= 1;
  });
  const timer = setInterval(asked, 5);
  while (times < 3) await new Promise((done) => setTimeout(done, 20));
  clearInterval(timer); asked.stop();
  return most; }"""


@pytest.mark.slow
def test_an_overview_follows_a_run_that_goes_on(browser: Any, place: Path) -> None:
    words = ["sweep", "work.py:apart", "--grid", "x=1,2", "--devices", "cpu:2"]
    with (
        running(place, *words) as process,
        web_server(place) as server,
        look(browser, server) as tab,
    ):
        to_the_run(tab)
        tab.until("document.querySelector('#head .counts')?.innerText.includes('running')")
        assert "Most recent" not in tab.text()
        (place / "end-1").touch()
        tab.until("document.querySelector('#body').innerText.includes('Most recent')")
        assert process.poll() is None
        # A server that takes long is not asked again before it has answered.
        assert tab.page.evaluate(NEVER_TWICE) == 1


@pytest.mark.slow
def test_the_log_of_a_rank_is_followed_over_a_break(browser: Any, place: Path) -> None:
    with (
        running(place, "run", "--devices", "cpu:1", "talk.py"),
        web_server(place, "--port", str(free_port())) as server,
        look(browser, server) as tab,
    ):
        to_the_run(tab, "/training")
        tab.until("document.querySelector('.log')?.innerText.includes('hello')")
        (place / "say-1").touch()
        tab.until("document.querySelector('.log').innerText.includes('word 1')")
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        tab.until("/reconnecting|lost/.test(document.querySelector('#live').textContent)")
        (place / "say-2").touch()
        with web_server(place, "--port", str(server.port)):
            back_in(tab)
            tab.until("document.querySelector('.log').innerText.includes('word 2')")
            (place / "say-3").touch()
            tab.until("document.querySelector('.log').innerText.includes('word 3')")
            (place / "say-4").touch()
            tab.until("document.querySelector('.log').innerText.includes('word 4')")
            lines = tab.text(".log")
            assert [lines.count(f"word {n}") for n in (1, 2, 3, 4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("seconds", [2.0, pytest.param(180.0, marks=pytest.mark.slow)])
def test_pages_beside_a_busy_run_do_not_grow(browser: Any, tmp_path: Path, seconds: float) -> None:
    num_open = 120 * int(seconds + 2)
    run = made_sweep(tmp_path / "runs/it", 400, num_curves=1, num_points=10, num_open=num_open)
    steps = count(100, 20)
    with (
        closing(Ledger(run.ledger)) as ledger,
        web_server(tmp_path) as server,
        look(browser, server) as table,
        look(browser, server) as curve,
    ):
        name = run_id(server, "it")
        table.go(f"/run/{name}/tasks?at=400")
        curve.go(f"/run/{name}/task/1")
        curve.until("document.querySelector('[data-points]')")

        def works(seconds: float) -> None:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                go_on(ledger, next(steps), 20)
                table.page.wait_for_timeout(100)
            done = server.ask(f"/api/run/{name}").json["counts"]["done"]
            for tab in (table, curve):
                tab.until(f"document.querySelector('#head .counts').innerText.includes('{done:,}')")

        works(0.5)
        before = [table.held(), curve.held()]
        works(seconds)
        for was, now in zip(before, [table.held(), curve.held()], strict=True):
            assert now["Nodes"] <= 1.1 * was["Nodes"] + 50
            assert now["JSEventListeners"] <= 1.1 * was["JSEventListeners"] + 20
            assert now["JSHeapUsedSize"] <= 1.1 * was["JSHeapUsedSize"] + 200_000


# ---------------------------------------------------------------------- actions


CANCEL = "button:text-is('Cancel this run')"
RELEASE = "button:text-is('Give a device back')"
RETRY = "button:text-is('Retry what failed')"


COUNTED = "document.querySelector('#head .counts')?.innerText.replace(/\\s+/g, ' ')"


def test_a_device_is_given_back_and_a_task_and_a_run_are_cancelled_by_clicking(
    browser: Any, place: Path
) -> None:
    words = ["sweep", "work.py:fragile", "--grid", "x=1,2,3", "--devices", "cpu:3"]
    with (
        running(place, *words) as process,
        web_server(place, "--allow-actions") as server,
        look(browser, server) as tab,
    ):
        run = to_the_run(tab)
        tab.until(f"{COUNTED}?.includes('failed 1') && {COUNTED}.includes('running 2')")
        tab.agrees = False
        tab.page.click(CANCEL)
        assert process.poll() is None

        tab.agrees = True
        tab.page.click(RELEASE)
        tab.until("document.querySelector('#head').innerText.includes('gives back cpu:')")
        [third] = server.ask(f"/api/run/{run}/tasks?filter=x%3D3").json["rows"]
        tab.go(f"/run/{run}/task/{third['key']}")
        tab.page.click("button:text-is('Cancel this task')")
        tab.until(f"{COUNTED}?.includes('cancelled 1') && {COUNTED}.includes('running 1')")
        tab.page.wait_for_selector("h2.task .s-cancelled")
        assert tab.page.locator("button:text-is('Cancel this task')").count() == 0
        assert process.poll() is None

        tab.page.click(CANCEL)
        tab.until("document.querySelector('#head').innerText.includes('asked its coordinator')")
        assert process.wait(120) == 130
        tab.page.wait_for_selector(RETRY)
        assert tab.page.locator(CANCEL).count() == tab.page.locator(RELEASE).count() == 0
        assert tab.questions == [
            "Cancel this run? What is done stays.",
            "Give one device back, after the task in hand? The run goes on with the others.",
            "Cancel this task? The others go on.",
            "Cancel this run? What is done stays.",
        ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sweep", "search"])
def test_what_has_failed_is_tried_again_by_clicking(browser: Any, place: Path, kind: str) -> None:
    words = ["sweep", "work.py:fragile", "--devices", "cpu:1", "--quiet", "--run-dir", "runs/it"]
    words += ["--grid", "x=1"] if kind == "sweep" else [
        "--space", "x=uniform(0,1)", "--trials", "1", "--minimize", "y"]  # fmt: skip
    command = [sys.executable, "-m", "muster", *words]
    subprocess.run(command, cwd=place, check=False, stdout=subprocess.DEVNULL)
    with web_server(place, "--allow-actions") as server, look(browser, server) as tab:
        to_the_run(tab)
        (place / "mended").touch()
        tab.agrees = True
        tab.page.click(RETRY)
        tab.until(f"{COUNTED}?.includes('done 1')")
        assert tab.page.locator(RETRY).count() == 0
        assert tab.questions == ["Try the failed tasks again, on this machine?"]


OF_EACH_KIND = {
    "search": ["sweep", "work.py:trial", "--space", "lr=log(1e-4,1e-1)", "--trials", "4",
               "--minimize", "y"],
    "map": ["map", "work.py:word", "--input", "words.jsonl", "--output", "out.jsonl"],
    "train": ["train", "line.py:Line", "--epochs", "1000000"],
    "agent": ["train", "line.py:Walker", "--num-steps", "100000000"],
    "run": ["run", "talk.py"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", OF_EACH_KIND)
def test_a_run_of_each_kind_is_cancelled_by_clicking(browser: Any, place: Path, kind: str) -> None:
    """Whoever looks without --allow-actions sees no button, and is refused."""
    command, target, *words = OF_EACH_KIND[kind]
    with (
        running(place, command, "--devices", "cpu:1", target, *words) as process,
        web_server(place) as shown,
        web_server(place, "--allow-actions") as server,
        look(browser, shown) as viewer,
        look(browser, server) as tab,
    ):
        run = to_the_run(viewer)
        assert viewer.page.locator("button:has-text('Cancel')").count() == 0
        headers = {"content-type": "application/json", "x-muster": "1"}
        body = b'{"action": "cancel"}'
        answer = shown.ask(f"/api/run/{run}/act", "POST", headers=headers, body=body)
        assert answer.status == 405 and "--allow-actions" in answer.text
        to_the_run(tab)
        tab.agrees = True
        if kind in ("search", "map"):
            tab.page.click(RELEASE)  # its only one
            tab.until("document.querySelector('#head').innerText.includes('keeps one')")
            tab.wrong = [one for one in tab.wrong if "409" not in one]  # Chromium notes the answer
        else:
            assert tab.page.locator(RELEASE).count() == 0
        tab.page.click(CANCEL)
        assert process.wait(120) in (75, 130)
        tab.until("document.querySelector('#head .v-paused, #head .v-bad')")
        assert tab.page.locator(CANCEL).count() == 0
        assert tab.page.locator(RETRY).count() == 0  # nothing has failed, or it is resumed instead
