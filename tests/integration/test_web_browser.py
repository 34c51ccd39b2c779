"""The dashboard in a real Chromium. Console errors and reports of the policy fail every test."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.browser import PATIENCE_MS, REBOUND, Look, chromium, files_served, look, run_id
from tests.fixtures.old_runs.old_runs import unpack
from tests.hostile_texts import HOSTILE as HOSTILE_TEXTS
from tests.made_runs import hostile_sweep, hostile_training, made_sweep
from tests.web_server import WebServer, web_server

OLD = Path(__file__).parents[1] / "fixtures/old_runs/0.1.0"
WORK = """
def trial(lr, width, ctx):
    for step in range(1, 10):
        ctx.log(step, loss=abs(lr - 0.01) + width / step)
    return {"loss": abs(lr - 0.01) + width / 10}
"""
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each kind."""
    folder = tmp_path_factory.mktemp("browser")
    for name in ("train-done", "agent-done", "map-done", "run-failed"):
        unpack(OLD / f"{name}.tar.xz", folder)
    (folder / "work.py").write_text(WORK)
    made_sweep(folder / "runs" / "big", 3000, num_curves=3, num_points=300)
    words = ["sweep", "work.py:trial", "--trials", "8", "--space", "lr=log(1e-4,1e-1)",
             "--space", "width=int(8,64)", "--minimize", "loss", "--devices", "cpu:1", "--quiet",
             "--run-dir", "runs/search"]  # fmt: skip
    subprocess.run([sys.executable, "-m", "muster", *words], cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[WebServer]:
    with web_server(place) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


#: Each page once, of a run that has it; and those for which there is seldom time.
ESSENTIAL = ["", "devices", "big", "big/tasks", "big/task/1", "search/search",
             "train-done/training", "map-done/map", "run-failed/errors"]  # fmt: skip
OTHERS = ["compare", "nowhere", "big/errors", "big/about", "search", "train-done", "map-done",
          "agent-done", "agent-done/training", "run-failed", "run-failed/training",
          "run-failed/about"]  # fmt: skip


def address(server: WebServer, page: str) -> str:
    """Of a page that is given by the name of its run: ``big/tasks``."""
    name, slash, rest = page.partition("/")
    if name == "compare":
        run = run_id(server, "big")
        keys = [row["key"] for row in server.ask(f"/api/run/{run}/tasks?limit=2").json["rows"]]
        return f"/compare?run={run}&task={keys[0]}&task={keys[1]}"
    return f"/run/{run_id(server, name)}{slash}{rest}" if name in server.runs() else f"/{page}"


@pytest.mark.parametrize(
    ("pages", "rules"),
    [(ESSENTIAL, ("color-contrast",)),
     pytest.param(ESSENTIAL + OTHERS, (), marks=pytest.mark.slow)],
    ids=["essential", "all"],
)  # fmt: skip
def test_every_page_is_for_everybody(
    browser: Any, server: WebServer, place: Path, pages: list[str], rules: tuple[str, ...]
) -> None:
    """Light and dark, wide and 360 px: no serious finding of axe-core, nothing wider than the
    window. Whoever looks changes nothing in a run. ``rules``: of the second look; none for all.
    """
    before = contents(place / "runs")
    with look(browser, server) as tab:
        for page in pages:
            if page == "nowhere":  # a page of ours that says that there is none
                tab.page.goto(f"http://{server.host}/nowhere")
            else:
                tab.go(address(server, page))
            tab.page.wait_for_load_state("load")
            found = [tab.accessibility()]
            tab.page.emulate_media(color_scheme="dark")
            tab.page.set_viewport_size({"width": 360, "height": 740})
            found += [tab.accessibility(*rules)]
            assert found == [[], []], page
            assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360, page
            tab.page.emulate_media(color_scheme="light")
            tab.page.set_viewport_size({"width": 1280, "height": 800})
        tab.wrong = [one for one in tab.wrong if "404" not in one]  # Chromium notes "nowhere"
        tab.context.clear_cookies()
        tab.page.goto(f"http://{server.host}/")
        assert "token" in tab.text() and tab.accessibility() == []
    assert contents(place / "runs") == before


def contents(folder: Path) -> dict[str, bytes]:
    """What is in the files, without what SQLite makes beside a ledger that somebody reads."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*") if path.is_file() and not path.name.endswith(("-shm", "-wal"))
    }  # fmt: skip


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


#: Whether the address says what the page shows: it follows some times a second.
SETTLED = """(async () => (await import('/static/lib.js')).inUrl().toString()
  === new URLSearchParams(location.search).toString())()"""


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
        tab.until(SETTLED)
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


@pytest.mark.parametrize("num_tasks", [3000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_long_table_is_seen_to_its_end_and_only_rows_in_sight_are_in_the_document(
    browser: Any, server: WebServer, place: Path, num_tasks: int
) -> None:
    name = "big" if num_tasks == 3000 else "huge"
    if name == "huge":
        made_sweep(place / "runs" / name, num_tasks)
    run, last = run_id(server, name), num_tasks - 1

    def key(offset: int, query: str = "") -> str:
        answer = server.ask(f"/api/run/{run}/tasks?offset={offset}&limit=1{query}")
        return f"/run/{run}/task/{answer.json['rows'][0]['key']}"

    with look(browser, server) as tab:
        tab.go(f"/run/{run}/tasks")

        def sees(row: int, href: str) -> None:
            tab.until(f"document.querySelector('#row-{row} a')?.getAttribute('href') === '{href}'")
            tab.until(f"(() => {{ const row = document.querySelector('#row-{row}')"
                      ".getBoundingClientRect(), box = document.querySelector('.grid')"
                      ".getBoundingClientRect(); return row.top >= box.top - 1 &&"
                      " row.bottom <= box.bottom + 1; })()")  # fmt: skip
            assert tab.page.locator("tbody tr").count() < 80

        tab.page.hover(".grid")
        for _ in range(3):
            tab.page.mouse.wheel(0, num_tasks * 30)
        sees(last, key(last))
        tab.page.mouse.wheel(0, -num_tasks * 90)
        sees(0, key(0))
        tab.page.focus(".grid table")
        tab.page.keyboard.press("End")
        sees(last, key(last))
        tab.page.keyboard.press("PageUp")
        tab.page.keyboard.press("Home")
        sees(0, key(0))
        tab.page.evaluate(f"document.querySelector('.grid').scrollTop = {num_tasks // 2} * 30")
        sees(num_tasks // 2, key(num_tasks // 2))
        tab.until(f"new URLSearchParams(location.search).get('at') === '{num_tasks // 2}'")
        tab.page.click("th button[title=loss]")
        tab.page.click("th button[title=loss]")
        sees(0, key(0, "&sort=loss&desc=1"))
        tab.page.fill("input[data-search]", "width=64")
        sees(0, key(0, "&sort=loss&desc=1&filter=width%3D64"))
        assert tab.text(".total") == f"{num_tasks // 5:,} tasks"


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


def test_a_link_holds_a_brush_and_a_zoom(browser: Any, server: WebServer) -> None:
    run = run_id(server, "search")
    kept = "document.querySelector('canvas.parallel').getAttribute('aria-label')"
    with look(browser, server) as tab, look(browser, server) as other:
        tab.go(f"/run/{run}/search")
        tab.until(f"{kept}.includes('8 are kept')")
        # The first axis is at the left, with its highest value 34 px from the top.
        width = (tab.page.locator("canvas.parallel").bounding_box() or {})["width"]
        tab.drag("canvas.parallel", (46 / width, 36), (46 / width, 150))
        tab.until(f"!{kept}.includes('8 are kept')")
        tab.until(f"location.search.includes('brush=') && {SETTLED}")
        number = tab.page.locator("table.trials tbody tr").count()
        assert 0 < number < 8 and f"{number} of 8 trials pass" in tab.text()
        other.page.goto(tab.page.url)
        other.ready()
        assert other.text("table.trials") == tab.text("table.trials")
        tab.page.mouse.click(*centre(tab, "canvas.parallel", 46 / width))  # lets it go
        tab.until(f"{kept}.includes('8 are kept')")
        tab.until("!location.search.includes('brush=')")

        run = run_id(server, "big")
        key = server.ask(f"/api/run/{run}/tasks?limit=1").json["rows"][0]["key"]
        points = "document.querySelector('.card [data-points]')?.dataset.points"
        tab.go(f"/run/{run}/task/{key}")
        tab.until(f"{points} === '300'")
        tab.drag(".card .u-over", (0.25, 80), (0.5, 80))
        tab.until(f"location.search.includes('x=') && {SETTLED}")
        tab.until(f"{points} !== '300' && {points} > 60 && {points} < 90")
        other.page.goto(tab.page.url)
        other.ready()
        other.until(f"{points} === '{tab.page.evaluate(points)}'")
        tab.page.locator(".card .u-over").first.dblclick()
        tab.until(f"{points} === '300'")


def centre(tab: Look, selector: str, share: float) -> tuple[float, float]:
    box = tab.page.locator(selector).first.bounding_box()
    assert box is not None
    return box["x"] + share * box["width"], box["y"] + box["height"] / 2


def test_what_runs_bring_is_text_on_every_page(browser: Any, tmp_path: Path) -> None:
    hostile_sweep(tmp_path / "runs" / HOSTILE)
    hostile_training(tmp_path / "runs" / "training")
    alive = "main img, main script, main iframe, main object, main [onerror], main base, main form"
    with web_server(tmp_path) as server, look(browser, server) as tab:
        [sweep, train] = [run_id(server, name) for name in (HOSTILE, "training")]
        column = f"cols=number,p{[*HOSTILE_TEXTS].index('html')}"
        pages = [f"/run/{sweep}{page}" for page in
                 ("", f"/tasks?{column}", "/task/1", "/errors")]  # fmt: skip
        pages += [f"/run/{train}{page}" for page in ("/training", "/errors")]
        assert HOSTILE in tab.text()
        for page in [*pages, f"/compare?run={sweep}&task=1"]:
            tab.go(page)
            tab.page.wait_for_load_state("load")
            assert tab.page.locator(alive).count() == 0, page
            assert tab.page.locator("main a[href^='javascript']").count() == 0, page
            if page.endswith((column, "/task/1", f"{sweep}/errors", "/training")):
                assert "<script>alert(1)" in tab.text(), page


OTHER_SITE = """<!doctype html><title>Elsewhere</title><body><script>
const at = "http://127.0.0.1:PORT", act = at + "/api/run/RUN/act", told = {};
const heard = async (name, work) => {
  try { await work; told[name] = "done"; } catch { told[name] = "refused"; }
};
const loaded = (name, kind, what) => heard(name, new Promise((done, fail) => document.body.append(
  Object.assign(document.createElement(kind), { onload: done, onerror: fail, ...what }))));
const post = { method: "POST", body: '{"action": "cancel"}', credentials: "include" };
const headers = { "Content-Type": "application/json", "X-Muster": "1" };
const known = { credentials: "include" }, blind = { mode: "no-cors" };
const stream = () => new Promise((done, fail) => {
  const source = new EventSource(at + "/api/stream", { withCredentials: true });
  source.onopen = done;
  source.onerror = () => { source.close(); fail(); };
});
Promise.all([
  heard("data", fetch(at + "/api/runs", known)),
  heard("data unseen", fetch(at + "/api/runs", { ...known, ...blind })),
  heard("action", fetch(act, { ...post, headers })),
  heard("action unseen", fetch(act, { ...post, ...blind })),
  heard("stream", stream()),
  loaded("image", "img", { src: at + "/static/icon.svg" }),
  loaded("script", "script", { src: at + "/static/app.js" }),
  loaded("style", "link", { rel: "stylesheet", href: at + "/static/style.css" }),
]).then(() => { window.told = told; });
</script><iframe name="framed" src="http://127.0.0.1:PORT/"></iframe>
<form method="post" action="http://127.0.0.1:PORT/api/run/RUN/act" enctype="text/plain">
<input name="{}"></form>"""


def test_another_site_in_the_same_browser_reads_nothing_and_does_nothing(
    browser: Any, place: Path, tmp_path: Path
) -> None:
    """It is on this machine too, so that the cookie is sent; and a name of another's that means
    this machine opens nothing. What gets into a page all the same, the policy stops and tells.
    """
    with (
        web_server(place, "--allow-actions") as server,
        files_served(tmp_path) as port,
        closing(browser.new_context()) as context,
    ):
        run = run_id(server, "search")
        text = OTHER_SITE.replace("PORT", str(server.port)).replace("RUN", run)
        (tmp_path / "index.html").write_text(text)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        # A path that is the name of another host leads nowhere else.
        page.goto(f"http://{server.host}//{REBOUND}:{port}/#{server.token}")
        page.get_by_text("There is no such page").wait_for()
        assert page.url.startswith(f"http://{server.host}//")
        assert page.inner_text("h1") == "Not found"
        context.clear_cookies()
        page.goto(f"http://{server.host}/#{server.token}")
        page.wait_for_selector("html[data-ready]")
        assert server.token not in page.url and page.evaluate("location.hash") == ""
        assert server.token not in page.evaluate("JSON.stringify([document.cookie, localStorage])")
        page.evaluate(
            """() => { const add = (kind, what) => document.body.append(
              Object.assign(document.createElement(kind), what));
            add("script", { textContent: "window.ran = 1" });
            add("img", { src: "http://127.0.0.1:1/x.png" });
            add("div", { innerHTML: "<b onclick='1' style='color: red'>x</b>" }); }"""
        )
        assert page.evaluate("window.ran") is None
        deadline = time.monotonic() + 120
        while server.output.read_text().count("A browser has refused a part") < 3:
            assert time.monotonic() < deadline, server.output.read_text()
            page.wait_for_timeout(50)

        answers: list[tuple[str, int]] = []
        page.on("response", lambda one: answers.append((urlsplit(one.url).path, one.status)))
        page.goto(f"http://127.0.0.1:{port}/index.html")
        while (told := page.evaluate("window.told")) is None:
            assert time.monotonic() < deadline
            page.wait_for_timeout(50)
        assert set(told.values()) == {"refused"}, told
        framed = page.frame("framed")
        assert framed is not None and framed.url.startswith("chrome-error:")
        with page.expect_navigation():
            page.evaluate("document.forms[0].submit()")
        assert "another site" in page.content()
        let_in = {path for path, status in answers if status < 400} - {"/csp-report"}
        assert let_in <= {"/", "/index.html"}, answers  # the door, which is the same for everybody

        found = page.goto(f"http://{REBOUND}:{server.port}/")
        assert found.status == 421 and "search" not in page.content()
        assert "asked" not in server.output.read_text()
