"""A copy of the dashboard in a real Chromium, opened from the disk or from a plain server of files:
nothing answers but files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.browser import PATIENCE_MS, chromium, files_served
from tests.fixtures.old_runs.old_runs import unpack
from tests.made_runs import hostile_sweep, made_sweep

from muster.web.export import export
from muster.web.folder import Folders

OLD = Path(__file__).parents[1] / "fixtures/old_runs/0.1.0"
KINDS = ("train-done", "agent-done", "map-done", "run-failed")
READY = "document.documentElement.dataset.ready === '1'"


class Copy:
    """A tab with a copy below ``front``. What its console or its page says is in ``wrong``."""

    def __init__(self, browser: Any, front: str) -> None:
        self.front = front
        self.context = browser.new_context()
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.wrong: list[str] = []
        self.page.on("console", lambda told: self.wrong.append(told.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda one: self._asks(one.url))

    def _asks(self, url: str) -> None:
        if not url.startswith((self.front, "data:")):
            self.wrong.append(url)

    def go(self, path: str) -> None:
        self.page.goto(f"{self.front}/{path}.html")
        self.page.wait_for_function(READY)
        assert self.wrong == [], path


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("copied")
    for name in KINDS:
        unpack(OLD / f"{name}.tar.xz", place)
    made_sweep(place / "runs/sweep", 60, num_curves=2, num_points=50)
    hostile_sweep(place / "runs/<img src=x onerror=alert(1)>")
    export([place / "runs"], place / "copy")
    return place


@pytest.fixture(scope="module")
def browser() -> Any:
    with chromium() as found:
        yield found


def test_a_copy_does_what_a_server_would(browser: Any, copy: Path) -> None:
    """Every page of every kind of run from the disk, and what can be done in them."""
    tab = Copy(browser, (copy / "copy").as_uri())
    page = tab.page
    for name in ("compare", "devices"):
        tab.go(name)
    filtered(tab)
    page.locator("[data-search]").fill("")
    page.get_by_text("60 tasks", exact=True).wait_for()
    page.locator("a[href*='/task/']").first.click()  # the first tasks have curves
    page.locator("canvas").nth(1).wait_for()
    runs = {folder.path.name: folder.id for folder in Folders([copy / "runs"]).all()}
    assert len(runs) == len(KINDS) + 2
    for run in runs.values():
        tab.go(f"run/{run}")
        links = page.eval_on_selector_all("nav.tabs a", "all => all.map((one) => one.href)")
        assert len(links) >= 3
        for link in links[1:]:
            tab.go(link.removeprefix(f"{tab.front}/").removesuffix(".html"))
    tab.go(f"run/{runs['train-done']}/training")
    page.locator("canvas").first.wait_for()
    tab.go(f"run/{runs['sweep']}/errors")
    page.get_by_text("KeyError").first.wait_for()
    tab.context.close()
    assert tab.wrong == []


def test_a_plain_server_of_files_shows_a_copy(browser: Any, copy: Path) -> None:
    with files_served(copy / "copy") as port:
        tab = Copy(browser, f"http://127.0.0.1:{port}")
        filtered(tab)
        tab.context.close()
    assert tab.wrong == []


def filtered(tab: Copy) -> None:
    """Goes from the first page to the tasks of a sweep, and filters them."""
    tab.go("index")
    tab.page.get_by_role("link", name="sweep", exact=True).click()
    tab.page.get_by_role("link", name="Tasks", exact=True).click()
    tab.page.wait_for_function(READY)
    tab.page.locator("[data-search]").fill("width=64 state=done")
    tab.page.get_by_text("12 tasks", exact=True).wait_for()
