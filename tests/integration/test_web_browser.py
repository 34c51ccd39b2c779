"""The dashboard in a real Chromium. Console errors and reports of the policy fail every test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.browser import chromium, look
from tests.made_runs import made_sweep
from tests.web_server import WebServer, web_server

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

def trial(lr, width, ctx):
    for step in range(1, 10):
        ctx.log(step, loss=abs(lr - 0.01) + width / step)
    return {"loss": abs(lr - 0.01) + width / 10}
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
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    (folder / "work.py").write_text(WORK)
    made_sweep(folder / "runs" / "big", 3000, num_curves=3, num_points=300)
    muster(folder, "sweep", "work.py:trial", "--trials", "8", "--space", "lr=log(1e-4,1e-1)",
           "--space", "width=int(8,64)", "--minimize", "loss", "--devices", "cpu:1", "--quiet",
           "--run-dir", "runs/search")  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[WebServer]:
    with web_server(place) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def muster(place: Path, *words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "muster", *words], cwd=place, check=False, capture_output=True
    )
    assert done.returncode in (0, 1), done.stderr.decode()


@contextmanager
def gated(place: Path, *asked: str) -> Iterator[subprocess.Popen[bytes]]:
    """A sweep of two tasks that wait at each step until a file go-STEP is there."""
    words = ["sweep", *(asked or ("work.py:gated", "--grid", f"text={HOSTILE}")), "--grid", "x=1,2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "muster", *words, "--devices", "cpu:2", "--quiet",
         "--run-dir", "runs/gated"],
        cwd=place, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield process
    finally:
        for step in (1, 2, 3):
            (place / f"go-{step}").touch()
        process.kill()
        process.wait()


@contextmanager
def talking(place: Path) -> Iterator[None]:
    """A script of one rank that says a word for each file say-N."""
    (place / "talk.py").write_text(TALK)
    process = subprocess.Popen(
        [sys.executable, "-m", "muster", "run", "--devices", "cpu:1", "--quiet", "--run-dir",
         "runs/talk", "talk.py"],
        cwd=place, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield
    finally:
        for word in (1, 2, 3, 4):
            (place / f"say-{word}").touch()
        process.wait(timeout=120)


def run_id(server: WebServer, name: str) -> str:
    return str(server.runs()[name]["id"])


PAGES = ["/", "", "/tasks", "/task", "/search"]
#: Tables and names with values, drawn by the same parts as the others.
PLAIN = [
    pytest.param(page, marks=pytest.mark.slow)
    for page in ("/devices", "/errors", "/about", "/compare")
]


@pytest.mark.parametrize("page", [*PAGES, *PLAIN])
def test_every_page_is_for_everybody(browser: Any, server: WebServer, page: str) -> None:
    """Light, dark and narrow; no serious finding of axe-core, nothing wider than the window."""
    run = run_id(server, "search" if page == "/search" else "big")
    task = server.ask(f"/api/run/{run}/tasks?limit=2").json["rows"]
    path = {
        "/": "/", "/devices": "/devices", "/task": f"/run/{run}/task/{task[0]['key']}",
        "/compare": f"/compare?run={run}&task={task[0]['key']}&task={task[1]['key']}",
    }.get(page, f"/run/{run}{page}")  # fmt: skip
    with look(browser, server) as tab:
        tab.go(path)
        tab.page.wait_for_load_state("load")
        assert tab.accessibility() == []
        tab.page.emulate_media(color_scheme="dark")
        assert tab.accessibility("color-contrast") == []
        tab.page.set_viewport_size({"width": 360, "height": 740})
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360


def test_pages_say_the_essential_without_scripts(browser: Any, server: WebServer) -> None:
    run = run_id(server, "big")
    context = browser.new_context(
        java_script_enabled=False, extra_http_headers={"authorization": f"Bearer {server.token}"}
    )
    try:
        page = context.new_page()
        page.goto(f"http://{server.host}/run/{run}/tasks")
        text = page.inner_text("main")
        assert "60 failed of 3,000" in text
        assert "3,000 tasks" in text
        assert page.locator("tbody tr").count() == 50
        page.goto(f"http://{server.host}/")
        assert "big" in page.inner_text("main")
    finally:
        context.close()


def test_the_table_sorts_filters_and_a_link_is_the_view(browser: Any, server: WebServer) -> None:
    run = run_id(server, "big")
    with look(browser, server) as tab:
        tab.go(f"/run/{run}/tasks")
        tab.page.click("th button[title=loss]")
        tab.until("document.querySelector('th[aria-sort=ascending]')?.textContent === 'loss▲'")
        tab.page.fill("input[data-search]", "width=64 loss<2")
        tab.until("!document.querySelector('.total').textContent.startsWith('3,000')")
        want = server.ask(
            f"/api/run/{run}/tasks?sort=loss&filter=width%3D64%20loss%3C2&limit=3"
        ).json
        tab.until(f"document.querySelector('.total').textContent === '{want['total']:,} tasks'")
        first = tab.page.get_attribute("tbody tr[id=row-0] a", "href")
        assert first == f"/run/{run}/task/{want['rows'][0]['key']}"
        seen, address = tab.text(".grid"), tab.page.url
    with look(browser, server) as other:
        other.page.goto(address)
        other.ready()
        assert other.text(".grid") == seen
        assert other.page.input_value("input[data-search]") == "width=64 loss<2"


def test_a_wrong_filter_is_said_and_the_rows_stay(browser: Any, server: WebServer) -> None:
    with look(browser, server) as tab:
        tab.go(f"/run/{run_id(server, 'big')}/tasks")
        tab.page.fill("input[data-search]", "nonesuch>3")
        tab.page.wait_for_selector(".total .failure")
        assert tab.page.locator("tbody tr[id=row-0]").count() == 1
        tab.wrong = [one for one in tab.wrong if "400" not in one]  # Chromium notes the answer


def test_only_rows_in_sight_are_in_the_document(browser: Any, server: WebServer) -> None:
    run = run_id(server, "big")
    with look(browser, server) as tab:
        tab.go(f"/run/{run}/tasks")
        assert tab.page.locator("tbody tr").count() < 80
        tab.page.evaluate("document.querySelector('.grid').scrollTop = 2500 * 30")
        tab.page.wait_for_selector("tbody tr[id=row-2500] a")
        want = server.ask(f"/api/run/{run}/tasks?offset=2500&limit=1").json["rows"][0]["key"]
        href = tab.page.get_attribute("tbody tr[id=row-2500] a", "href")
        assert href == f"/run/{run}/task/{want}"
        assert tab.page.locator("tbody tr").count() < 80
        tab.until("new URLSearchParams(location.search).get('at') === '2500'")


def test_keys_move_choose_search_and_help(browser: Any, server: WebServer) -> None:
    run = run_id(server, "big")
    with look(browser, server) as tab:
        tab.go(f"/run/{run}/tasks")
        tab.until("document.querySelector('table[role=grid]')")
        for key in "jjkj":
            tab.page.keyboard.press(key)
        assert tab.page.get_attribute("tr.cursor", "id") == "row-1"
        tab.page.keyboard.press("x")
        assert "Compare 1" in tab.text(".tools")
        tab.page.keyboard.press("/")
        assert tab.page.evaluate("document.activeElement.matches('[data-search]')")
        tab.page.keyboard.press("Escape")
        tab.page.keyboard.press("?")
        assert tab.page.is_visible("dialog")
        tab.page.keyboard.press("Escape")
        tab.until("!document.querySelector('dialog').open")
        # While the focus is on its way back from the dialog, a key may still go there.
        tab.until("!document.activeElement.closest('dialog')")
        tab.page.wait_for_timeout(300)
        tab.page.keyboard.press("Enter")
        tab.page.wait_for_url("**/task/*")


def test_a_sweep_is_live_and_no_point_is_lost_or_doubled(browser: Any, place: Path) -> None:
    """Both processes are killed while somebody looks."""
    with gated(place) as process, web_server(place) as server, look(browser, server) as tab:
        tab.until("[...document.querySelectorAll('a[data-row]')].some(a => a.text === 'gated')")
        run = run_id(server, "gated")
        tab.go(f"/run/{run}")
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
            tab.until("document.querySelector('#live').textContent === 'live'")
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
def test_an_overview_follows_a_run_that_goes_on(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(WORK)
    with (
        gated(tmp_path, "work.py:apart") as process,
        web_server(tmp_path) as server,
        look(browser, server) as tab,
    ):
        tab.until("[...document.querySelectorAll('a[data-row]')].some(a => a.text === 'gated')")
        tab.go(f"/run/{run_id(server, 'gated')}")
        tab.until("document.querySelector('#head .counts')?.innerText.includes('running')")
        assert "Most recent" not in tab.text()
        (tmp_path / "end-1").touch()
        tab.until("document.querySelector('#body').innerText.includes('Most recent')")
        assert process.poll() is None
        # A server that takes long is not asked again before it has answered.
        assert tab.page.evaluate(NEVER_TWICE) == 1
        (tmp_path / "end-2").touch()


@pytest.mark.slow
def test_the_log_of_a_rank_is_followed_over_a_break(browser: Any, place: Path) -> None:
    with talking(place), web_server(place) as server, look(browser, server) as tab:
        tab.until("[...document.querySelectorAll('a[data-row]')].some(a => a.text === 'talk')")
        tab.go(f"/run/{run_id(server, 'talk')}/training")
        tab.until("document.querySelector('.log')?.innerText.includes('hello')")
        (place / "say-1").touch()
        tab.until("document.querySelector('.log').innerText.includes('word 1')")
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        tab.until("/reconnecting|lost/.test(document.querySelector('#live').textContent)")
        (place / "say-2").touch()
        with web_server(place, "--port", str(server.port)):
            tab.until("document.querySelector('.log').innerText.includes('word 2')")
            (place / "say-3").touch()
            tab.until("document.querySelector('.log').innerText.includes('word 3')")
            (place / "say-4").touch()
            tab.until("document.querySelector('.log').innerText.includes('word 4')")
            lines = tab.text(".log")
            assert [lines.count(f"word {n}") for n in (1, 2, 3, 4)] == [1, 1, 1, 1]


@pytest.mark.slow
def test_actions_are_offered_only_where_they_are_allowed(
    browser: Any, server: WebServer, place: Path
) -> None:
    run = run_id(server, "big")
    with look(browser, server) as tab:
        tab.go(f"/run/{run}")
        assert "Retry what failed" not in tab.text()
    with web_server(place, "--allow-actions") as other, look(browser, other) as tab:
        tab.go(f"/run/{run}")
        assert "Retry what failed" in tab.text()
        # A page of this port has the key that an action needs beside the cookie.
        ended = run_id(server, "search")
        said = tab.page.evaluate(
            "async (id) => (await (await import('/static/lib.js')).act(id, 'cancel')).said", ended
        )
        assert "nothing" in said
