"""A copy of the dashboard in a real Chromium, opened from the disk: nothing answers but files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.made_runs import made_sweep
from tests.tracked import gang_folder

from muster.web.export import export
from muster.web.folder import id_of

CHROMIUM = shutil.which("chromium")
READY = "document.documentElement.dataset.ready === '1'"


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
def test_a_copy_that_is_opened_from_the_disk_does_what_a_server_would(tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    lines = [{"kind": "train", "step": n, "loss": 1 / (n + 1)} for n in range(50)]
    train = gang_folder(tmp_path / "runs/train", lines)
    sweep = made_sweep(tmp_path / "runs/sweep", 60, num_curves=2, num_points=50)
    export([tmp_path / "runs"], tmp_path / "copy")
    front = (tmp_path / "copy").as_uri()
    complaints: list[str] = []
    asked: list[str] = []
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(90_000)
        page.on("console", lambda told: complaints.append(told.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda one: one.url.startswith(("file:", "data:")) or complaints.append(one.url),
        )
        page.goto(f"{front}/index.html")
        page.get_by_role("link", name="sweep", exact=True).click()
        page.get_by_role("link", name="Tasks", exact=True).click()
        page.wait_for_function(READY)
        page.locator("[data-search]").fill("width=64 state=done")
        page.get_by_text("12 tasks", exact=True).wait_for()
        page.locator("[data-search]").fill("")
        page.locator("a[href*='/task/']").first.click()
        page.locator("canvas").nth(1).wait_for()
        page.goto(f"{front}/run/{id_of(train.path)}/training.html")
        page.locator("canvas").first.wait_for()
        page.goto(f"{front}/run/{id_of(sweep.path)}/errors.html")
        page.get_by_text("KeyError").first.wait_for()
        browser.close()
    assert complaints == []
    assert {address.partition(":")[0] for address in asked} <= {"file", "data"}
