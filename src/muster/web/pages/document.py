"""A whole page: its head, the run's verdict and tabs, its content, and its data for the scripts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from muster.web.content.plain import to_json
from muster.web.pages.bodies import BODIES
from muster.web.pages.markup import Html, Links, run_head, tag

#: Which pages draw curves, and so load what draws them.
_WITH_CURVES = frozenset({"task", "search", "training", "compare", "overview", "devices", "map"})
_TITLES = {
    "runs": "Runs", "overview": "Overview", "tasks": "Tasks", "search": "Search",
    "training": "Training", "map": "Map", "errors": "Errors", "about": "About",
    "devices": "Devices", "compare": "Compare", "login": "Log in",
}  # fmt: skip


@dataclass(frozen=True)
class Shell:
    """Where a page stands: ``root`` leads to the first page, ``suffix`` ends each page's path.

    ``live``: a server answers; else it is a copy in files. ``actions``: it may change runs.
    """

    root: str = "/"
    suffix: str = ""
    live: bool = True
    actions: bool = False


def render(
    page: str,
    data: Mapping[str, Any],
    *,
    run: Mapping[str, Any] | None = None,
    shell: Shell | None = None,
) -> str:
    """The document of ``page``; ``data``: its answer under /api, ``run``: the head of its run."""
    shell = shell or Shell()
    links = Links(shell.root, shell.suffix)
    title = str(data.get("name") or "Task") if page == "task" else _TITLES.get(page, "muster")
    names = [title] if run is None else [title, str(run["name"])]
    if page == "error":
        names = [str(data["title"])]
    script = "login.js" if page == "login" else "app.js"
    body = BODIES[page](data, links, run)
    return "<!DOCTYPE html>\n" + tag(
        "html",
        tag("head",
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", " · ".join([*names, "muster"])),
            tag("link", rel="icon", href=links.static("icon.svg"), type="image/svg+xml"),
            tag("link", rel="stylesheet", href=links.static("style.css")),
            tag("link", rel="stylesheet", href=links.static("vendor/uPlot.min.css"))
            if page in _WITH_CURVES else None,
            tag("script", src=links.static("vendor/uPlot.iife.min.js"), defer=True)
            if page in _WITH_CURVES else None,
            tag("script", src=links.static(script), type="module")),
        tag("body",
            tag("a", "Skip to the content", href="#content", class_="skip"),
            _top(page, links, run),
            tag("main",
                run_head(run, page, links) if run is not None else None,
                tag("div", body, id="body"),
                id="content", tabindex="-1"),
            _island({"page": page, "run": run, "data": data, "shell": asdict(shell)})),
        lang="en",
    )  # fmt: skip


def _top(page: str, links: Links, run: Mapping[str, Any] | None) -> Html:
    def entry(label: str, path: str, name: str) -> Html:
        here = "page" if page == name else None
        return tag("a", label, href=links.to(path), aria_current=here)

    inner = [] if page == "login" else [
        entry("Runs", "", "runs"), entry("Devices", "devices", "devices"),
    ]  # fmt: skip
    crumb = tag("span", str(run["name"]), class_="crumb") if run is not None else None
    return tag(
        "header",
        tag("a", "muster", href=links.to(""), class_="brand"),
        tag("nav", *inner, aria_label="Main"),
        crumb,
        tag("span", id="live", role="status", class_="live"),
        class_="top",
    )


def _island(content: Mapping[str, Any]) -> Html:
    """Data that no HTML can end: ``<`` is written as JSON's escape."""
    text = to_json(content).decode()
    safe = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return tag("script", Html(safe), type="application/json", id="data")
