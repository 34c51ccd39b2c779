"""The dashboard as an ASGI application: who may ask, then what is answered."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, unquote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from muster.base.errors import MusterError, UsageError
from muster.base.shown_text import one_line
from muster.web import guard
from muster.web.content.index import Defects, data_of, explained, file_of
from muster.web.content.plain import to_json
from muster.web.folder import Folders, opened
from muster.web.guard import Credentials
from muster.web.pages.bodies import BODIES, Shell, render
from muster.web.query import BadQuery, Query, Refused, act
from muster.web.stream import Watchers

STATIC = Path(__file__).parent / "static"
_MOST_BODY = 16 * 1024
_MOST_REPORTS = 20
_PART = 256 * 1024
_STATIC_FILES = {
    path.relative_to(STATIC).as_posix(): path for path in STATIC.rglob("*") if path.is_file()
}


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """What every answer is made from. ``tell``: says a line where the dashboard was started.
    ``ending`` is set when it is about to end.
    """

    folders: Folders
    place: guard.Place
    credentials: Credentials
    tell: Callable[[str], None]
    ending: threading.Event = field(default_factory=threading.Event)


def make_app(board: Dashboard) -> ASGIApp:
    answers = _Answers(board)
    routes = [
        Route("/", answers.top_page("runs")),
        Route("/devices", answers.top_page("devices")),
        Route("/compare", answers.top_page("compare")),
        Route("/run/{run}", answers.page),
        Route("/run/{run}/file/{path:path}", answers.file),
        Route("/run/{run}/task/{task}", answers.page),
        Route("/run/{run}/{page}", answers.page),
        Route("/api/run/{run}", answers.json),
        Route("/api/run/{run}/task/{task}", answers.json),
        Route("/api/run/{run}/act", answers.act, methods=["POST"]),
        Route("/api/run/{run}/{name}.{suffix}", answers.table),
        Route("/api/run/{run}/{page}", answers.json),
        Route("/api/stream", answers.stream),
        Route("/api/{page}", answers.top_json),
        Route("/static/{path:path}", answers.static),
        Route("/login", answers.login, methods=["POST"]),
        Route("/csp-report", answers.csp_report, methods=["POST"]),
    ]
    inner = Starlette(routes=routes, exception_handlers={404: _not_found})
    return Guarded(inner, board)


class Guarded:
    """Refuses before anything is routed, and puts the headers on whatever is answered."""

    def __init__(self, inner: ASGIApp, board: Dashboard) -> None:
        self._inner = inner
        self._board = board

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in message["headers"]}
                more = [(n.encode(), v.encode()) for n, v in guard.HEADERS.items()]
                message["headers"] = [*message["headers"], *(p for p in more if p[0] not in own)]
            await send(message)

        answer = await self._refused(Request(scope))
        try:
            await (answer or self._inner)(scope, receive, with_headers)
        except ClientDisconnect:
            return

    async def _refused(self, request: Request) -> Response | None:
        """The answer to those who are not let in; None for the others."""
        method, path, headers = request.method, request.url.path, request.headers
        found = guard.refusal(self._board.place, method, path, headers)
        if found is not None:
            return _say(request, found.status, found.text, headers=found.headers)
        if guard.is_open(method, path):
            return None
        if self._is_known(headers):
            if guard.is_action(method, path) and not self._may_act(headers):
                text = "To change a run, open the address that `muster web` has printed."
                return _say(request, 403, text)
            return None
        if "authorization" in headers and not await self._board.credentials.failed():
            return _say(request, 429, "Too many wrong tokens at once.")
        if guard.is_door(method, path):
            return HTMLResponse(render("login", {}))
        if path.startswith("/api/"):
            text = "The token is missing or wrong: open the address that `muster web` has printed."
            return _say(request, 401, text)
        return HTMLResponse(render("login", {}), 401)

    def _is_known(self, headers: Mapping[str, str]) -> bool:
        credentials = self._board.credentials
        if credentials.has_bearer(headers.get("authorization", "")):
            credentials.succeeded()
            return True
        if guard.is_foreign(headers):
            return False
        return credentials.has_cookie(headers["host"], headers.get("cookie", ""))

    def _may_act(self, headers: Mapping[str, str]) -> bool:
        """Who sends the token itself needs no more than the header; a cookie is not enough."""
        credentials, given = self._board.credentials, headers["x-muster"]
        if credentials.has_bearer(headers.get("authorization", "")):
            return given == "1"
        return credentials.is_action_key(given)


class _Answers:
    def __init__(self, board: Dashboard) -> None:
        self._board = board
        self._defects = Defects(board.tell)
        self._watchers = Watchers(board.folders, self._defects)
        self._num_reports = 0

    # ------------------------------------------------------------------ pages and their data

    async def page(self, request: Request) -> Response:
        return await self._page(request, _page_of(request), request.path_params["run"])

    def top_page(self, name: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return await self._page(request, name, None)

        return answer

    async def _page(self, request: Request, name: str, run: str | None) -> Response:
        try:
            return HTMLResponse(await run_in_threadpool(self._html, name, run, request))
        except MusterError as error:
            self._defects.note(error.__cause__)
            return _problem_page(error)

    def _html(self, name: str, run: str | None, request: Request) -> str:
        folders, query = self._board.folders, _query(request)
        top = None if run is None else self._head(run, query)
        data = data_of(folders, name, run, query)
        if name not in BODIES:
            raise UsageError(f"There is no page {name[:40]!r}.")
        shell = Shell(actions=self._board.place.allows_actions)
        with explained(run):
            return render(name, data, run=top, shell=shell)

    def _head(self, run: str, query: Query) -> dict[str, Any]:
        """The head of a run, with the place in its stream from which the page goes on. That comes
        first: what happens while the page is made is then told twice, and never lost.
        """
        with explained(run):
            seq = self._watchers.of_run(self._board.folders.find(run)).position()
        return {"seq": seq, **data_of(self._board.folders, "head", run, query)}

    async def stream(self, request: Request) -> Response:
        """Events of one run, or of all. ``after``: the last id seen; ``log``: whose log is read."""
        run, query = request.query_params.get("run"), request.query_params
        try:
            watcher = self._watchers.of_all()
            if run:
                folder = await run_in_threadpool(self._board.folders.find, run)
                watcher = self._watchers.of_run(folder)
        except MusterError as error:
            return _problem(error)
        after = request.headers.get("last-event-id") or query.get("after", "")
        events = watcher.events(after, query.get("log"), self._board.ending.is_set)
        return StreamingResponse(events, media_type="text/event-stream")

    async def json(self, request: Request) -> Response:
        return await self._json(request, _page_of(request), request.path_params["run"])

    async def top_json(self, request: Request) -> Response:
        return await self._json(request, request.path_params["page"], None)

    async def _json(self, request: Request, name: str, run: str | None) -> Response:
        try:
            body = await run_in_threadpool(self._body, name, run, request)
        except MusterError as error:
            self._defects.note(error.__cause__)
            return _problem(error)
        return Response(body, media_type="application/json")

    def _body(self, name: str, run: str | None, request: Request) -> bytes:
        folders, query = self._board.folders, _query(request)

        def make() -> bytes:
            return to_json(data_of(folders, name, run, query))

        if run is None or name == "log":  # a stream says of one log only that there is more of it
            return make()
        with explained(run):
            watcher = self._watchers.of_run(folders.find(run))
        return watcher.shared(str(request.url), make)

    async def table(self, request: Request) -> Response:
        """Tasks or curves to be saved, written while they are read."""
        asked = request.path_params
        try:
            name, text = await run_in_threadpool(
                file_of, self._board.folders, asked["name"], asked["suffix"], asked["run"],
                _query(request),
            )  # fmt: skip
        except MusterError as error:
            self._defects.note(error.__cause__)
            return _problem(error)
        return StreamingResponse(
            text, media_type={"csv": "text/csv", "json": "application/json"}[asked["suffix"]],
            headers={"content-disposition": _to_save(name)},
        )  # fmt: skip

    async def act(self, request: Request) -> Response:
        asked = await _object(request)
        try:
            folder = await run_in_threadpool(self._board.folders.find, request.path_params["run"])
            return _json_answer(await run_in_threadpool(act, folder, asked))
        except Refused as error:
            return _problem(error, 409)
        except MusterError as error:
            return _problem(error)

    # ------------------------------------------------------------------ files

    async def static(self, request: Request) -> Response:
        path = _STATIC_FILES.get(request.path_params["path"])
        if path is None:
            return _say(request, 404, "There is no such file.")
        return FileResponse(path, headers={"cache-control": "no-cache"})

    async def file(self, request: Request) -> Response:
        """A file of a task: to be saved, never to be run."""
        try:
            folder = await run_in_threadpool(self._board.folders.find, request.path_params["run"])
        except MusterError as error:
            return _problem(error)
        # As it was sent: the name of a file need not be UTF-8.
        sent = request.scope["raw_path"].decode("latin-1").partition("/file/")[2]
        name = unquote(sent, errors="surrogateescape")
        try:
            if name.partition("/")[0] not in ("artifacts", "figures", "logs"):
                raise FileNotFoundError
            file = await run_in_threadpool(opened, folder.path, name)
        except PermissionError:
            return _say(request, 403, "Whoever started the dashboard may not read this file.")
        except OSError:
            return _say(request, 404, "There is no such file.")
        # Sent is what was opened and judged, as long as it is now, whatever bears its name later.
        size = os.fstat(file.fileno()).st_size
        return StreamingResponse(
            _parts(file, 0 if request.method == "HEAD" else size),
            media_type="application/octet-stream",
            headers={
                **guard.FILE_HEADERS, "content-length": str(size),
                "content-disposition": _to_save(name.rpartition("/")[2]),
            },
        )  # fmt: skip

    # ------------------------------------------------------------------ the door

    async def login(self, request: Request) -> Response:
        credentials, host = self._board.credentials, request.headers["host"]
        token = (await _object(request)).get("token")
        if not isinstance(token, str) or not credentials.is_token(token):
            if not await credentials.failed():
                return _say(request, 429, "Too many wrong tokens at once.")
            return _say(request, 403, "This token is wrong.")
        credentials.succeeded()
        answer = _json_answer({"act": credentials.action_key()})
        name, value = credentials.cookie(host)
        answer.set_cookie(name, value, httponly=True, samesite="strict", path="/")
        return answer

    async def csp_report(self, request: Request) -> Response:
        """What a browser has refused to do in one of our pages is a defect of ours: say so."""
        report = await _object(request)
        if self._num_reports < _MOST_REPORTS:
            self._num_reports += 1
            found = one_line(str(report.get("csp-report", report)))
            self._board.tell(f"A browser has refused a part of a page: {found}")
        return Response(status_code=204)


def _parts(file: IO[bytes], size: int) -> Iterator[bytes]:
    with file:
        while size > 0 and (part := file.read(min(size, _PART))):
            size -= len(part)
            yield part


def _to_save(name: str) -> str:
    return f"attachment; filename*=utf-8''{quote(os.fsencode(name))}"


def _page_of(request: Request) -> str:
    known = request.path_params
    return str(known.get("page", "task" if "task" in known else "") or "overview")


def _query(request: Request) -> Query:
    pairs = list(request.query_params.multi_items())
    if "task" in request.path_params:
        pairs.append(("task", request.path_params["task"]))
    return Query(pairs)


async def _object(request: Request) -> dict[str, Any]:
    """The JSON object that was posted; empty for anything else."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MOST_BODY:
            return {}
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _json_answer(
    data: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(to_json(data), status, dict(headers or {}), media_type="application/json")


def _problem(error: MusterError, status: int | None = None) -> Response:
    text, _, hint = str(error).partition("\nHint: ")
    known = 400 if isinstance(error, BadQuery) else 404 if isinstance(error, UsageError) else 503
    return _json_answer({"error": text, "hint": hint}, status or known)


def _problem_page(error: MusterError) -> Response:
    text, _, hint = str(error).partition("\nHint: ")
    if isinstance(error, BadQuery):
        return _error_page("Not understood", f"{text} {hint}", 400)
    if isinstance(error, UsageError):
        return _error_page("Not found", f"{text} {hint}", 404)
    return _error_page("Cannot be read", f"{text} {hint}", 200)


def _say(
    request: Request, status: int, text: str, headers: Mapping[str, str] | None = None
) -> Response:
    if request.url.path.startswith("/api/") or request.method == "POST":
        return _json_answer({"error": text, "hint": ""}, status, headers)
    title = "Not found" if status == 404 else "Refused"
    return _error_page(title, text, status, headers)


def _error_page(
    title: str, text: str, status: int, headers: Mapping[str, str] | None = None
) -> Response:
    html = render("error", {"title": title, "text": text.strip()})
    return HTMLResponse(html, status, dict(headers or {}))


async def _not_found(request: Request, error: Exception) -> Response:
    return _say(request, 404, "There is no such page.")
