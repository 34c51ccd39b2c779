"""A page in plain HTML: its head, the run's verdict and tabs, its content, which the scripts then
draw in its place, and its data for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from muster.web.content.plain import to_json
from muster.web.pages.markup import (
    Html,
    Links,
    best_of,
    duration,
    facts,
    interval,
    join,
    moment,
    run_head,
    shown,
    size,
    state,
    summary,
    table,
    tag,
)

Data = Mapping[str, Any]
_MOST_ROWS = 50
_MOST_COLUMNS = 12


def _section(title: str, *content: object) -> Html:
    """Empty where nothing is in it."""
    inner = join(content)
    return tag("section", tag("h2", title), inner) if inner else inner


def _pre(text: Any) -> Html:
    return tag("pre", str(text), tabindex="0") if text else Html("")


def _runs(data: Data, links: Links, run: Data | None) -> Html:
    heads = [("Run", False), ("Kind", False), ("State", False), ("Done", True), ("Failed", True),
             ("Left", True), ("Best", True), ("Size", True), ("Changed", False),
             ("Verdict", False)]  # fmt: skip
    rows = []
    for one in data["runs"][:_MOST_ROWS]:
        counts = one.get("counts") or {}
        rows.append(
            [tag("a", shown(one["name"]), href=links.run(one["id"])), one.get("kind"),
             state(one.get("state")),
             _done(one.get("kind"), counts), counts.get("failed") or None,
             interval(one.get("eta_s")), best_of(one.get("best")), size(one.get("bytes")),
             moment(one.get("changed")), one.get("verdict")]
        )  # fmt: skip
    none = tag("p", "There are no runs here yet.", class_="empty") if not rows else None
    return join([tag("h1", "Runs"), table("Runs", heads, rows), none])


def _done(kind: Any, counts: Data) -> str | None:
    """Of a search it is not known how many trials there will be: it makes its tasks as it goes."""
    total, done = counts.get("total"), f"{counts.get('done', 0):,}"
    if not total:
        return None
    return done if kind == "search" else f"{done} of {total:,}"


def _overview(data: Data, links: Links, run: Data | None) -> Html:
    causes = (data.get("verdict") or {}).get("causes") or []
    rows = [
        [one.get("count"), _task_link(links, run, one.get("task"), shown(one.get("text")))]
        for one in causes
    ]
    alerts = [tag("li", one.get("text"), class_=f"a-{one.get('level')}")
              for one in data.get("alerts") or []]  # fmt: skip
    return join(
        [
            _section(
                "Why tasks failed", table("Causes", [("Tasks", True), ("Cause", False)], rows)
            ),
            tag("ul", *alerts, class_="alerts") if alerts else None,
            _section("Figures", summary(data)),
        ]
    )


def _task_link(links: Links, run: Data | None, key: Any, text: object) -> object:
    if run is None or key is None:
        return text
    return tag("a", text, href=links.task(run["id"], key))


def _tasks(data: Data, links: Links, run: Data | None) -> Html:
    columns = list(data["columns"])[:_MOST_COLUMNS]
    heads = [(str(one["label"]), bool(one.get("numeric"))) for one in columns]
    rows = []
    for row in data["rows"][:_MOST_ROWS]:
        cells: list[object] = list(row["cells"][: len(columns)])
        for at, column in enumerate(columns):
            if column["key"] == "state":
                cells[at] = state(cells[at])
        if cells:
            cells[0] = _task_link(
                links, run, row["key"], shown(cells[0]) if not isinstance(cells[0], Html)
                else cells[0],
            )  # fmt: skip
        rows.append(cells)
    number = int(data["total"])
    text = f"{number:,} {'task' if number == 1 else 'tasks'}"
    if number > len(rows):
        text += f", of which the first {len(rows)} are here"
    return join([tag("p", text, class_="note"), table("Tasks", heads, rows)])


def _task(data: Data, links: Links, run: Data | None) -> Html:
    error = data.get("error")
    attempts = data.get("attempts") or []
    names = list(dict.fromkeys(name for one in attempts for name in one))
    return join(
        [
            tag("h2", shown(data.get("name")), " ", state(data.get("state")), class_="task"),
            tag("div", tag("p", shown(error.get("text"))), _pre(error.get("trace")),
                class_="error") if error else None,
            facts([("Key", data.get("key")), ("Took", duration(data.get("seconds"))),
                   ("All attempts", duration(data.get("all_seconds"))),
                   ("GPU time", duration(data.get("gpu_seconds"))),
                   ("Energy, Wh", data.get("energy_wh")),
                   ("Peak memory, MiB", data.get("peak_mib"))]),
            _section("Settings", facts((data.get("settings") or {}).items())),
            _section("Result", facts((data.get("result") or {}).items())),
            _section("Attempts", table("Attempts", [(name, False) for name in names],
                                       ([one.get(name) for name in names] for one in attempts))),
            _section("Files", table("Files", [("File", False), ("Size", True)], (
                [tag("a", shown(one["name"]), href=one["href"]), size(one.get("bytes"))]
                for one in data.get("files") or []))),
            _section("To read its log in a terminal", _pre(data.get("command"))),
        ]
    )  # fmt: skip


def _search(data: Data, links: Links, run: Data | None) -> Html:
    history = [[one.get("trial"), _task_link(links, run, one.get("task"), shown(one.get("task"))),
                one.get("value"), one.get("best")]
               for one in (data.get("history") or [])[-_MOST_ROWS:]]  # fmt: skip
    rungs = [[one.get("step"), one.get("reached"), one.get("stopped"), one.get("promoted")]
             for one in data.get("rungs") or []]  # fmt: skip
    weights = [[one["name"], one["value"]] for one in data.get("importance") or []]
    goals = ", ".join(f"{one['direction']} {one['name']}" for one in data.get("goals") or [])
    return join(
        [
            tag("p", f"The goal is to {goals}.", class_="note") if goals else None,
            _section("Best so far", table("Trials", [("Trial", True), ("Task", False),
                     ("Value", True), ("Best so far", True)], history)),
            None if history else tag("p", "No trial has ended yet.", class_="empty"),
            _section("Importance", table("Importance", [("Parameter", False), ("Share", True)],
                     weights)),
            _section("Rungs", table("Rungs", [("Step", True), ("Reached", True),
                     ("Stopped", True), ("Promoted", True)], rungs)),
        ]
    )  # fmt: skip


def _training(data: Data, links: Links, run: Data | None) -> Html:
    stall = data.get("stall")
    figures = [(str(one["name"]), f"{shown(one.get('value'))} {one.get('unit') or ''}".strip())
               for one in data.get("figures") or []]  # fmt: skip
    ranks = data.get("ranks") or []
    phases = list(dict.fromkeys(name for one in ranks for name in one.get("phases") or {}))
    heads = [("Rank", True), ("Host", False), ("State", False), *((name, True) for name in phases)]
    rows = [[one.get("rank"), one.get("host"), state(one.get("state")),
             *(duration((one.get("phases") or {}).get(name)) for name in phases)]
            for one in ranks]  # fmt: skip
    points = [[one.get("step"), size(one.get("bytes")), moment(one.get("when"))]
              for one in data.get("checkpoints") or []]  # fmt: skip
    return join(
        [
            tag("div", tag("p", shown(stall.get("text"))), _pre(stall.get("stacks")),
                class_="error") if stall else None,
            facts(figures),
            _section("Ranks", table("Ranks", heads, rows)),
            _section("Evaluations", _records("Evaluations", data.get("evaluations") or [])),
            _section("Checkpoints", table("Checkpoints", [("Step", True), ("Size", True),
                     ("Saved", False)], points)),
        ]
    )  # fmt: skip


def _records(name: str, records: Any) -> Html:
    """Any list of objects as a table, any object as names and values, anything else as text."""
    if isinstance(records, Mapping):
        return facts(records.items())
    if isinstance(records, str):
        return _pre(records)
    found = [one for one in records or [] if isinstance(one, Mapping)][:_MOST_ROWS]
    names = list(dict.fromkeys(key for one in found for key in one))
    if not found:
        texts = [tag("li", shown(one)) for one in records or []]
        return tag("ul", *texts) if texts else Html("")
    heads = [(key, isinstance(found[0].get(key), int | float)) for key in names]
    return table(name, heads, ([one.get(key) for key in names] for one in found))


def _map(data: Data, links: Links, run: Data | None) -> Html:
    stages = [[one.get("name"), one.get("in"), one.get("out"), one.get("rejected"),
               one.get("lost")] for one in data.get("stages") or []]  # fmt: skip
    return join(
        [
            _section("Stages", table("Stages", [("Stage", False), ("In", True), ("Out", True),
                     ("Rejected", True), ("Lost", True)], stages)),
            _section("Rejects", _records("Rejects", data.get("rejects") or [])),
        ]
    )  # fmt: skip


def _errors(data: Data, links: Links, run: Data | None) -> Html:
    groups = [
        tag("section",
            tag("h2", f"{one.get('count')} × ", shown(one.get("text"))),
            tag("p", "First ", moment(one["first"]), ", last ", moment(one.get("last")), ".",
                class_="note") if one.get("first") else None,
            _examples(one, links, run),
            _pre(one.get("trace")))
        for one in data.get("groups") or []
    ]  # fmt: skip
    return join(groups) if groups else tag("p", "Nothing has failed.", class_="empty")


def _examples(group: Data, links: Links, run: Data | None) -> Html | None:
    """The first tasks that failed so, and of how many."""
    keys, failed = group.get("tasks") or [], group.get("failed") or 0
    if not keys:
        return None
    shown_keys = [part for key in keys for part in (" ", _task_link(links, run, key, shown(key)))]
    of = f" of {failed:,} that failed" if failed > len(keys) else None
    return tag("p", "Tasks", *shown_keys, of, class_="note")


def _about(data: Data, links: Links, run: Data | None) -> Html:
    named = (("Command", "command"), ("Options", "options"), ("Code", "code"),
             ("Environment", "environment"), ("Doctor", "doctor"), ("Plan", "plan"))  # fmt: skip
    return join(_section(title, _records(title, data.get(key))) for title, key in named)


def _devices(data: Data, links: Links, run: Data | None) -> Html:
    rows = [[one.get("index"), one.get("name"),
             None if one.get("busy") is None else f"{100 * one['busy']:.0f} %",
             one.get("memory_mib"), one.get("total_mib"), one.get("temperature"),
             one.get("power_w"), one.get("lease"),
             ", ".join(f"{shown(who.get('user'))}: {shown(who.get('pid'))}"
                       for who in one.get("processes") or [])]
            for one in data.get("devices") or []]  # fmt: skip
    heads = [("Device", True), ("Name", False), ("Busy", True), ("Used, MiB", True),
             ("Memory, MiB", True), ("°C", True), ("W", True), ("Held by", False),
             ("Processes", False)]  # fmt: skip
    none = tag("p", "This machine has no GPU that can be asked.", class_="empty")
    return join([tag("h1", "Devices"), table("Devices", heads, rows) if rows else none])


def _compare(data: Data, links: Links, run: Data | None) -> Html:
    columns = [str(one.get("label") if isinstance(one, Mapping) else one)
               for one in data.get("columns") or []]  # fmt: skip
    rows = [[one["name"], *one["values"]] for one in data.get("settings") or []]
    heads = [("Setting", False), *((name, False) for name in columns)]
    none = tag(
        "p",
        "Choose runs on the first page, or tasks in a table of tasks, to compare them here.",
        class_="empty",
    )
    return join([tag("h1", "Compare"), table("Settings", heads, rows) if rows else none])


def _login(data: Data, links: Links, run: Data | None) -> Html:
    return tag(
        "div",
        tag("h1", "This page needs its token"),
        tag("p", "Open the address that `muster web` has printed, with everything after its #.",
            id="told", role="status"),
        class_="login",
    )  # fmt: skip


def _error(data: Data, links: Links, run: Data | None) -> Html:
    hint = tag("p", shown(data.get("hint")), class_="note") if data.get("hint") else None
    return tag("div", tag("h1", shown(data.get("title"))), tag("p", shown(data.get("text"))), hint,
               class_="login")  # fmt: skip


BODIES: Mapping[str, Callable[[Data, Links, Data | None], Html]] = {
    "runs": _runs, "overview": _overview, "tasks": _tasks, "task": _task, "search": _search,
    "training": _training, "map": _map, "errors": _errors, "about": _about, "devices": _devices,
    "compare": _compare, "login": _login, "error": _error,
}  # fmt: skip


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
