"""The HTML of the dashboard's pages: readable without a script, and nothing in it is a run's."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from importlib import resources
from typing import Any

import pytest
from tests.hostile_texts import HOSTILE

from muster.web.pages.bodies import BODIES, Shell, render

STATIC = resources.files("muster.web") / "static"


def head(name: str = "first") -> dict[str, Any]:
    return {
        "id": "1f2e", "name": name, "path": f"/runs/{name}", "kind": "sweep", "state": "failed",
        "tabs": ["overview", "tasks", "errors", "about"], "seconds": 75.0, "rate": 2.5,
        "eta_s": [60.0, 120.0], "best": {"name": "loss", "value": 0.25, "task": "ab"},
        "verdict": {"level": "bad", "text": f"2 of 9 tasks failed: {name}",
                    "causes": [{"text": name, "count": 2, "task": "ab"}]},
        "counts": {"done": 6, "failed": 2, "running": 1, "waiting": 0, "total": 9},
    }  # fmt: skip


def pages(text: str) -> dict[str, dict[str, Any]]:
    """Every page with ``text`` wherever a run can bring one."""
    return {
        "runs": {"runs": [head(text)]},
        "overview": {**head(text), "slots": [], "alerts": [{"level": "bad", "text": text}]},
        "tasks": {"columns": [{"key": "state", "label": text, "group": "system"},
                              {"key": "lr", "label": "lr", "group": "setting", "numeric": True}],
                  "total": 2, "offset": 0, "rows": [{"key": text, "cells": [text, 0.1]}]},
        "task": {"key": "ab", "name": text, "state": "failed", "settings": {text: text},
                 "result": {"loss": math.nan}, "attempts": [{"outcome": text}],
                 "error": {"text": text, "trace": text}, "command": text,
                 "files": [{"name": text, "bytes": 9, "href": "/run/1f2e/file/x"}]},
        "search": {"goals": [{"name": text, "direction": "minimise"}],
                   "history": [{"n": 1, "task": text, "value": 1.0, "best": 1.0}],
                   "importance": [{"name": text, "value": 0.5}], "rungs": [{"step": 3}]},
        "training": {"ranks": [{"rank": 0, "host": text, "state": text, "phases": {text: 1.5}}],
                     "stall": {"text": text, "stacks": text}, "evaluations": [{text: text}],
                     "figures": [{"name": text, "value": 1, "unit": text}]},
        "map": {"stages": [{"name": text, "in": 9}], "chunks": [{"index": 0, "state": text}],
                "rejects": [{"stage": text, "reason": text, "sample": text}]},
        "errors": {"groups": [{"text": text, "count": 2, "tasks": [text], "trace": text}]},
        "about": {"command": text, "options": [{"name": text, "value": text, "origin": text}],
                  "environment": {text: text}},
        "devices": {"devices": [{"index": 0, "name": text, "busy": 0.5, "lease": text,
                                 "processes": [{"pid": 1, "user": text}]}]},
        "compare": {"columns": [text], "settings": [{"name": text, "values": [text]}]},
        "login": {},
        "error": {"title": text, "text": text, "hint": text},
    }  # fmt: skip


class _Reader(HTMLParser):
    """The elements, attributes and texts of a page; what stands in the island is apart."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.island, self._open = "", "", ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open == "script":
            self.island += data
        else:
            self.text += data


def shown(page: str, text: str = "first") -> _Reader:
    run = None if page in ("runs", "devices", "compare", "login", "error") else head(text)
    return _Reader(render(page, pages(text)[page], run=run))


def test_every_page_is_tested() -> None:
    assert set(pages("x")) == set(BODIES)


@pytest.mark.parametrize("page", BODIES)
def test_a_page_is_readable_before_any_script(page: str) -> None:
    found = shown(page, "a word of the run")
    assert "a word of the run" in found.text or page == "login"
    if page in ("overview", "tasks", "errors"):
        assert "2 of 9 tasks failed" in found.text
        assert "6" in found.text


@pytest.mark.parametrize("page", BODIES)
def test_no_text_of_a_run_makes_markup(page: str) -> None:
    plain = [name for name, _ in shown(page).tags]
    for kind, text in HOSTILE.items():
        if kind == "long" and page != "task":
            continue  # it takes its time
        found = shown(page, text or "-")
        names = [name for name, _ in found.tags]
        assert sorted(names) == sorted(plain)
        for _, attributes in found.tags:
            assert not any(name.startswith("on") or name == "style" for name in attributes)
            assert not str(attributes.get("href", "")).startswith("javascript:")


@pytest.mark.parametrize("page", BODIES)
def test_the_island_is_the_answer_and_json(page: str) -> None:
    for text in ("</script><script>alert(1)</script>", "\u2028"):
        island = json.loads(shown(page, text).island)
        assert island["page"] == page
        if page == "runs":
            assert island["data"]["runs"][0]["name"] == text
        if page == "task":
            assert island["data"]["result"] == {"loss": None}


def test_nothing_is_inline_and_everything_is_ours() -> None:
    for page in BODIES:
        for name, attributes in shown(page).tags:
            if name == "script":
                assert attributes.get("type") == "application/json" or attributes["src"]
            assert name != "style"
            for source in (attributes.get("src"), attributes.get("href")):
                assert source is None or re.match(r"/|#", source)


def test_links_of_a_copy_lead_to_its_files() -> None:
    shell = Shell(root="../../", suffix=".html", live=False)
    found = _Reader(render("tasks", pages("x")["tasks"], run=head(), shell=shell))
    links = [attributes.get("href") for name, attributes in found.tags if name == "a"]
    assert "../../index.html" in links
    assert "../../run/1f2e.html" in links
    assert "../../run/1f2e/tasks.html" in links
    assert "../../run/1f2e/task/x.html" in links


def test_a_table_of_many_rows_shows_the_first_fifty() -> None:
    rows = [{"key": str(one), "cells": [f"row {one}", 1]} for one in range(200)]
    data = {**pages("x")["tasks"], "rows": rows, "total": 100_000}
    found = _Reader(render("tasks", data, run=head()))
    assert "row 49" in found.text
    assert "row 50" not in found.text
    assert "100,000 tasks" in found.text


def test_examples_of_a_cause_say_of_how_many() -> None:
    group = {"text": "x", "count": 130, "failed": 120, "tasks": ["ab", "cd"], "trace": ""}
    assert (
        "Tasks ab cd of 120 that failed"
        in _Reader(render("errors", {"groups": [group]}, run=head())).text
    )


def test_vendored_files_are_those_of_the_manifest() -> None:
    folder = STATIC / "vendor"
    lines = (folder / "MANIFEST").read_text().splitlines()
    told = [line.split(" | ") for line in lines if not line.startswith("#")]
    for name, version, licence, digest in told:
        assert version
        assert licence
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    names = {one.name for one in folder.iterdir() if not one.name.endswith("LICENSE")}
    assert names == {name for name, *_ in told} | {"MANIFEST"}


def test_all_files_of_the_pages_are_small() -> None:
    def files(place: Any) -> list[Any]:
        return [file for one in place.iterdir() for file in (files(one) if one.is_dir() else [one])]

    sizes = {one.name: len(gzip.compress(one.read_bytes())) for one in files(STATIC)}
    assert sum(sizes.values()) < 120_000, sizes
