"""A copy of the pages in files, which a browser opens without a server.

A copy is made beside its place and takes it as a whole: a kill at any moment leaves the copy that
was there, or none. Scripts of pages that are opened from a disk may load neither modules nor data,
so the modules are packed into one script, and data comes as scripts too.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from muster.base.codec import write_json
from muster.base.errors import MusterError, SetupError, UsageError
from muster.web.content.index import data_of, explained
from muster.web.content.plain import to_json
from muster.web.folder import Folder, Folders
from muster.web.pages.bodies import Shell, render
from muster.web.query import Query

_STATIC = Path(__file__).parent / "static"
_MARK = "muster-copy.json"
_MOST_TASKS, _MOST_CURVES, _LOG_BYTES = 1000, 50, 64 * 1024
_TASKS_AT_ONCE = 500
_IMPORT = re.compile(r'(\bfrom|\bimport)(\s*)"\./([^"]+)"')


class Exported(NamedTuple):
    """``num_left_out``: tasks that have no page in the copy, because there are too many."""

    num_runs: int
    num_tasks: int
    num_left_out: int


def export(roots: Sequence[Path], target: Path) -> Exported:
    """Write the pages of all runs below ``roots`` into the folder ``target``.

    It may hold an earlier copy, which is replaced, or nothing. Raises UsageError where it holds
    something else, SetupError where it cannot be written.
    """
    _check(target)
    target = target.absolute()
    beside, old = (target.with_name(f".{target.name}.{word}") for word in ("partial", "old"))
    try:
        for left in (beside, old):  # by a copy that was killed
            shutil.rmtree(left, ignore_errors=True)
        beside.mkdir(parents=True)
        made = _Copy(Folders(roots), beside).write()
        write_json(beside / _MARK, made._asdict())
        if target.exists():
            target.rename(old)
        beside.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        why = error.strerror or str(error)
        if isinstance(error, shutil.Error):  # of every file that could not be copied
            why = str(error.args[0][0][-1]).rpartition("] ")[2]
        raise SetupError(
            f"Cannot write the copy at {target}: {why}.",
            hint="make room or choose another folder; what was there is untouched.",
        ) from error
    return made


def _check(target: Path) -> None:
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise UsageError(f"--export {target} is not a folder.", hint="name one that is new.")
    if target.is_dir() and any(target.iterdir()) and not (target / _MARK).is_file():
        raise UsageError(
            f"--export {target} holds something other than a copy of these pages.",
            hint="name a folder that is new or empty: an earlier copy is replaced.",
        )


class _Copy:
    def __init__(self, folders: Folders, place: Path) -> None:
        self._folders = folders
        self._place = place
        self._made = Exported(0, 0, 0)

    def write(self) -> Exported:
        shutil.copytree(_STATIC, self._place / "static", ignore=shutil.ignore_patterns("*.js"))
        (self._place / "static/vendor").mkdir(exist_ok=True)
        for script in _STATIC.glob("vendor/*.iife*.js"):
            shutil.copy(script, self._place / "static/vendor")
        (self._place / "static/copy.js").write_text(packed(_STATIC), "utf-8")
        for folder in self._folders.all():
            folder.count()  # nobody asks a second time
        for name in ("runs", "devices", "compare"):
            self._page(name, "index" if name == "runs" else name, None, Query(), None)
        for folder in self._folders.all():
            self._run(folder)
        return self._made

    def _run(self, folder: Folder) -> None:
        base = f"run/{folder.id}"
        try:
            head = data_of(self._folders, "head", folder.id, Query())
        except MusterError as error:
            self._html(base, "error", _problem(error), None)
            return
        self._made = self._made._replace(num_runs=self._made.num_runs + 1)
        if "tasks" in head["tabs"]:
            self._tasks(folder, head)
        for name in head["tabs"]:
            if name == "tasks":
                continue
            if name == "overview":
                self._page(name, base, folder.id, Query(), head)
            else:
                query = Query.of(importance=1) if name == "search" else Query()
                self._page(name, f"{base}/{name}", folder.id, query, head)
        if not {"training", "map"}.isdisjoint(head["tabs"]):
            self._data(f"{base}/curves", self._all_curves(folder, []))

    def _tasks(self, folder: Folder, head: dict[str, Any]) -> None:
        """The table, and a page for each of its tasks: the first ones, and those that other pages
        lead to."""
        base = f"run/{folder.id}"
        try:
            table = self._table(folder, [*_linked(head)])
        except MusterError as error:
            self._html(f"{base}/tasks", "error", _problem(error), head)
            return
        total, keys = table["total"], [row["key"] for row in table["rows"]]
        table["total"] = len(keys)
        if len(keys) < total:
            head["verdict"]["text"] += f" This copy holds {len(keys):,} of the tasks."
        self._data(f"{base}/tasks", table)
        self._html(f"{base}/tasks", "tasks", {**table, "rows": table["rows"][:50]}, head)
        logged = []
        for key in keys:
            data = self._page("task", f"{base}/task/{key}", folder.id, Query.of(task=key), head)
            logged += [key] if data.get("metrics") else []
            self._log(folder, key)
        self._data(f"{base}/curves", self._all_curves(folder, logged[:_MOST_CURVES]))
        self._made = self._made._replace(
            num_tasks=self._made.num_tasks + len(keys),
            num_left_out=self._made.num_left_out + total - len(keys),
        )

    def _table(self, folder: Folder, more: list[str]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        folder.table.prepare()  # all parts have the same columns
        for offset in range(0, _MOST_TASKS, _TASKS_AT_ONCE):
            query = Query.of(offset=offset, limit=_TASKS_AT_ONCE)
            part = data_of(self._folders, "tasks", folder.id, query)
            table = {**part, "rows": [*table.get("rows", ()), *part["rows"]], "offset": 0}
            if len(table["rows"]) >= part["total"]:
                return table
        known = {row["key"] for row in table["rows"]}
        for key in dict.fromkeys(more):
            if key not in known:
                query = Query.of(filter=f'"{key}"')
                table["rows"] += data_of(self._folders, "tasks", folder.id, query)["rows"]
        return table

    def _all_curves(self, folder: Folder, keys: list[str]) -> dict[str, Any]:
        """Every metric of these tasks, or of a run's ranks, or of a map."""
        tasks = [("task", key) for key in keys]
        empty: dict[str, Any] = {"names": [], "series": []}
        try:
            stored = folder.run.stored
            if not keys and not (stored.is_gang or stored.is_map):
                return empty
            names = data_of(self._folders, "curves", folder.id, Query(tasks))["names"]
            found = [
                data_of(self._folders, "curves", folder.id,
                        Query([*tasks, ("name", name), ("px", "300")]))["series"]
                for name in names
            ]  # fmt: skip
        except MusterError:
            return empty
        return {"names": names, "series": [one for series in found for one in series]}

    def _log(self, folder: Folder, key: str) -> None:
        """The end of what the task has printed."""
        query = Query.of(task=key, limit=_LOG_BYTES)
        try:
            log = data_of(self._folders, "log", folder.id, query)
        except MusterError:
            return
        self._data(f"run/{folder.id}/log/{key}", log)

    def _page(
        self, name: str, path: str, run: str | None, query: Query, head: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Write a page with its data beside; what cannot be read is a page that says so."""
        try:
            data = data_of(self._folders, name, run, query)
        except MusterError as error:
            self._html(path, "error", _problem(error), head)
            return {}
        for file in data.get("files") or ():
            file["href"] = None  # the copy does not hold them
        self._html(path, name, data, head)
        self._data("runs" if name == "runs" else path, data)
        return data

    def _html(self, path: str, name: str, data: Any, head: dict[str, Any] | None) -> None:
        shell = Shell(root="../" * path.count("/"), suffix=".html", live=False)
        try:
            with explained(path):
                text = render(name, data, run=head, shell=shell)
        except MusterError as error:  # without the head, which may be what is damaged
            text = render("error", _problem(error), shell=shell)
        src = f"{shell.root}static"
        text = text.replace(
            f'<script src="{src}/app.js" type="module">', f'<script src="{src}/copy.js" defer>'
        )
        self._put(f"{path}.html", text.encode())

    def _data(self, path: str, data: Any) -> None:
        text = json.dumps(to_json(data).decode())  # as a text: a name in it may be __proto__
        self._put(f"api/{path}.js", f"musterCopy(JSON.parse({text}));\n".encode())

    def _put(self, path: str, content: bytes) -> None:
        file = self._place / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def _linked(head: dict[str, Any]) -> Iterator[str]:
    """The tasks that the head of a run leads to."""
    yield from (cause["task"] for cause in head["verdict"]["causes"])
    if head["best"] and head["best"]["task"]:
        yield head["best"]["task"]


def _problem(error: MusterError) -> dict[str, str]:
    text, _, hint = str(error).partition("\nHint: ")
    return {"title": "This cannot be read", "text": text, "hint": hint}


def packed(static: Path) -> str:
    """All modules as one script that needs no server: each becomes an address of its own."""
    modules = {}
    for path in sorted([*static.glob("*.js"), *static.glob("vendor/*.module.js")]):
        # Those that import anything lie in the upper folder.
        modules[path.relative_to(static).as_posix()] = _IMPORT.sub(
            r'\1\2"muster/\3"', path.read_text("utf-8")
        )
    return _COPY.replace("MODULES", json.dumps(modules))


_COPY = """// Made by `muster web --export`: the modules of the pages, and what fetches their data.
(() => {
  const answers = new Map();
  window.musterCopy = (value) => { answers.set(document.currentScript, value); };
  window.fetch = (address) => new Promise((resolve) => {
    const script = document.createElement("script");
    script.src = String(address).replace(/\\.json$/, ".js");
    script.onload = () => resolve({ ok: true, status: 200, json: async () => answers.get(script) });
    script.onerror = () => resolve({ ok: false, status: 404, json: async () => ({}) });
    document.head.append(script);
  });
  const imports = {};
  for (const [name, source] of Object.entries(MODULES)) {
    imports["muster/" + name] = "data:text/javascript;charset=utf-8," + encodeURIComponent(source);
  }
  const map = document.createElement("script");
  map.type = "importmap";
  map.textContent = JSON.stringify({ imports });
  document.head.append(map);
  import("muster/app.js");
})();
"""
