"""``muster web`` as a real process: who is let in, what is shown, and how it ends.

Where each line on security is tested (guard: tests/unit/web/test_web_guard.py, token:
test_web_token.py, pages: test_web_pages.py beside it, browser: test_web_browser.py, live:
test_web_live.py, stream: test_web_stream.py):

- only GET and HEAD, and POST for what is named: guard, test_what_is_not_named_is_not_allowed; here,
  test_every_refusal_is_a_sentence_and_carries_the_headers
- Host: guard, test_any_other_host_is_misdirected; a name that means this machine: browser,
  test_another_site_in_the_same_browser_reads_nothing_and_does_nothing
- Origin and Sec-Fetch-Site: guard, test_an_origin_that_is_sent_must_be_ours,
  test_a_request_of_another_site_is_refused, test_a_typed_address_is_a_page_and_never_data; browser,
  test_another_site_in_the_same_browser_reads_nothing_and_does_nothing
- nothing without the token: here, test_without_the_token_nothing_of_any_run_is_shown
- the token's file: token, test_the_token_is_this_users_alone_and_stays,
  test_a_token_that_others_may_know_is_refused,
  test_a_link_in_the_place_of_the_token_is_not_followed
- the token stands in no address, page, storage or Referer: browser, test_another_site_…, and `look`
- the cookie: here, test_the_token_becomes_a_cookie_of_this_port; of one start, as the key: token,
  test_a_cookie_and_a_key_are_of_one_start, and live, test_a_sweep_is_live_…; Bearer: token,
  test_a_bearer_is_the_token_itself
- guessing: token, test_secrets_are_compared_in_the_same_time,
  test_after_five_failures_each_further_one_waits_for_its_turn; here,
  test_five_wrong_tokens_are_free
- the socket: here, test_a_socket_is_for_its_owner_alone
- the policy and the other headers: guard, test_a_page_may_load_nothing_but_what_comes_from_here;
  obeyed and told: browser, test_another_site_…; here,
  test_what_a_browser_has_refused_is_said_for_who_is_let_in_and_not_without_end
- what runs bring is text: browser, test_what_runs_bring_is_text_on_every_page; pages,
  test_no_text_of_a_run_makes_markup
- files of a run: here, test_a_file_of_a_task_is_saved_and_never_run
- actions: guard, test_an_action_needs_a_header_and_a_type_that_no_form_has; stream,
  test_a_run_is_cancelled_and_tried_again_as_by_the_command_line; only where they are allowed: live,
  test_a_run_of_each_kind_is_cancelled_by_clicking; here, POST to act
- whoever looks writes nothing: browser, test_every_page_is_for_everybody
- no address that others reach, unless it is said: here, test_it_listens_on_this_machine_alone,
  test_what_is_refused_at_the_start; guard, test_a_public_name_is_known_where_the_user_has_said_it
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import psutil
import pytest
from tests.web_server import WebServer, web_server

Main = Callable[..., subprocess.CompletedProcess[str]]

WORK = """
def square(x, ctx):
    print("hello", x)
    if x == 3:
        raise ValueError("three <script>alert(1)</script> is bad")
    (ctx.folder / "out.html").write_text("<script>alert(2)</script>")
    (ctx.folder / "no \\udcff text.txt").write_text("as it is")
    return {"y": x * x, "huge": 2**60}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("web")
    (folder / "work.py").write_text(WORK)
    words = ["sweep", "work.py:square", "--grid", "x=1,2,3", "--devices", "cpu:1", "--quiet"]
    command = [sys.executable, "-m", "muster", *words, "--run-dir", "runs/squares"]
    assert subprocess.run(command, cwd=folder, check=False).returncode == 1
    return folder


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[WebServer]:
    with web_server(place) as found:
        yield found


# ---------------------------------------------------------------------- who is let in


def test_it_listens_on_this_machine_alone(server: WebServer) -> None:
    found = psutil.Process(server.process.pid).net_connections()
    assert [one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN] == ["127.0.0.1"]


def test_without_the_token_nothing_of_any_run_is_shown(server: WebServer) -> None:
    run = server.runs()["squares"]["id"]
    wrong = {"authorization": "Bearer " + "x" * 43}
    for path in ("/api/runs", f"/api/run/{run}", f"/run/{run}", "/api/stream",
                 f"/run/{run}/file/logs/worker-0.log"):  # fmt: skip
        for headers in ({}, wrong, {"cookie": f"muster-{server.port}=x"}):
            answer = server.ask(path, headers=headers, knows_token=False)
            assert answer.status == 401 and b"squares" not in answer.body
    door = server.ask("/", knows_token=False)
    assert door.status == 200 and "login.js" in door.text and b"squares" not in door.body
    assert server.ask("/static/login.js", knows_token=False).status == 200


def test_the_token_becomes_a_cookie_of_this_port(server: WebServer) -> None:
    def login(token: str) -> tuple[int, str, object]:
        body = json.dumps({"token": token}).encode()
        kind = {"content-type": "application/json", "origin": f"http://{server.host}"}
        found = server.ask("/login", "POST", headers=kind, body=body, knows_token=False)
        return found.status, found.headers.get("set-cookie", ""), found.json.get("act")

    assert login("wrong") == (403, "", None)
    status, cookie, key = login(server.token)
    assert status == 200 and key and str(key) not in cookie
    value, *attributes = [part.strip().lower() for part in cookie.split(";")]
    assert value.startswith(f"muster-{server.port}=") and server.token.lower() not in value
    assert {"httponly", "samesite=strict", "path=/"} <= set(attributes)
    sent = {"cookie": cookie.partition(";")[0], "sec-fetch-site": "same-origin"}
    assert server.ask("/api/runs", headers=sent, knows_token=False).status == 200
    # Another program's cookie that is no cookie of the standard shuts nobody out.
    beside = {**sent, "cookie": f'prefs={{"a":1, "b":2}}; {sent["cookie"]}'}
    assert server.ask("/api/runs", headers=beside, knows_token=False).status == 200
    # A link on another site leads to the door, which is the same for everybody.
    linked = {**sent, "sec-fetch-site": "cross-site"}
    answer = server.ask("/", headers=linked, knows_token=False)
    assert answer.status == 200 and b"squares" not in answer.body


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"token": 1}', b"[" * 20_000, b"x" * 99_999])
def test_what_is_no_token_is_refused(server: WebServer, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = server.ask("/login", "POST", headers=headers, body=body, knows_token=False)
    assert answer.status == 403


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/api/runs", {"host": "evil.example"}, 421),
        ("GET", "/api/runs", {"origin": "http://evil.example"}, 403),
        ("GET", "/api/runs", {"sec-fetch-site": "cross-site"}, 403),
        ("DELETE", "/api/runs", {}, 405),
        ("PUT", "/", {}, 405),
        ("PATCH", "/static/app.js", {}, 405),
        ("POST", "/api/runs", {}, 405),
        ("POST", "/api/run/000000000000/act", {"x-muster": "1"}, 405),
        ("OPTIONS", "/", {}, 405),
        ("GET", "/nothing/here", {}, 404),
        ("GET", "/api/run/000000000000", {}, 404),
        ("GET", "/run/000000000000/tasks", {}, 404),
        ("GET", "/api/nothing", {}, 404),
        ("GET", "/%2e%2e/%2e%2e/etc/passwd", {}, 404),
        ("GET", "/static/../app.py", {}, 404),
        ("GET", "/static/%2e%2e/app.py", {}, 404),
        ("GET", "/static//etc/passwd", {}, 404),
        ("GET", "/static/%00", {}, 404),
        ("GET", "/login", {}, 405),
    ],
)  # fmt: skip
def test_every_refusal_is_a_sentence_and_carries_the_headers(
    server: WebServer, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    answer = server.ask(path, method, headers=headers)
    assert answer.status == status
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "Traceback" not in answer.text and "server" not in answer.headers


def test_what_a_browser_has_refused_is_said_for_who_is_let_in_and_not_without_end(
    place: Path,
) -> None:
    with web_server(place) as server:
        kind = {"content-type": "application/csp-report"}
        body = json.dumps({"csp-report": {"blocked-uri": "x\x1b[2Jy\n" * 50}}).encode()
        before = server.output.read_bytes()
        answer = server.ask("/csp-report", "POST", headers=kind, body=body, knows_token=False)
        assert answer.status == 401 and server.output.read_bytes() == before
        for _ in range(25):
            assert server.ask("/csp-report", "POST", headers=kind, body=body).status == 204
        said = server.output.read_bytes().removeprefix(before)
    assert said.count(b"A browser has refused") == 20 == said.count(b"\n")
    assert b"\x1b" not in said


def test_five_wrong_tokens_are_free(place: Path) -> None:
    with web_server(place) as server:
        body = json.dumps({"token": "guess"}).encode()
        begin = [server.ask("/login", "POST", body=body, knows_token=False) for _ in range(7)]
        assert {answer.status for answer in begin} == {403}
        assert server.ask("/api/runs").status == 200


# ---------------------------------------------------------------------- what is shown


def test_the_pages_say_what_the_data_say(server: WebServer) -> None:
    row = server.runs()["squares"]
    assert row["state"] == "failed" and row["counts"]["failed"] == 1 and row["counts"]["total"] == 3
    api, page = f"/api/run/{row['id']}", f"/run/{row['id']}"
    head = server.ask(api).json
    assert head["verdict"]["level"] == "bad"
    assert head["verdict"]["causes"][0]["count"] == 1
    for path in (page, f"{page}/tasks", f"{page}/errors", f"{page}/about", "/", "/devices"):
        answer = server.ask(path)
        assert answer.status == 200 and "<script>alert" not in answer.text, path
    tasks = server.ask(f"{api}/tasks?state=failed").json
    assert tasks["total"] == 1
    task = server.ask(f"{api}/task/{tasks['rows'][0]['key']}").json
    assert task["settings"] == {"x": 3} and "three" in task["error"]["trace"]
    log = server.ask(f"{api}/log?task={task['key']}").json
    assert log["text"] == "hello 3\n"
    assert server.ask(f"{page}/task/{task['key']}").status == 200
    assert server.ask(f"{api}/task/nothing").status == 404
    for query in ("sort=nothing", "filter=nothing>1", "offset=x", "filter=" + "x" * 2000):
        answer = server.ask(f"{api}/tasks?{query}")
        assert answer.status == 400 and answer.json["error"]


def test_tasks_are_sorted_filtered_and_paged(server: WebServer) -> None:
    api = f"/api/run/{server.runs()['squares']['id']}/tasks"

    def column(query: str, name: str) -> list[object]:
        found = server.ask(f"{api}?{query}").json
        at = [one["key"] for one in found["columns"]].index(name)
        return [row["cells"][at] for row in found["rows"]]

    assert sorted(column("", "x")) == [1, 2, 3]
    assert column("sort=x&desc=1", "x") == [3, 2, 1]
    assert column("sort=y", "x") == [1, 2, 3]  # without a value last, in both directions
    assert column("sort=y&desc=1", "x") == [2, 1, 3]
    assert column("sort=x&offset=1&limit=1", "x") == [2]
    assert column("filter=x>1+y>0", "x") == [2]
    assert column("filter=three", "x") == [3]
    assert set(column("state=done", "huge")) == {str(2**60)}  # a browser would round it


def test_a_file_of_a_task_is_saved_and_never_run(server: WebServer, place: Path) -> None:
    run = server.runs()["squares"]["id"]
    key = server.ask(f"/api/run/{run}/tasks?state=done").json["rows"][0]["key"]
    files = server.ask(f"/api/run/{run}/task/{key}").json["files"]
    assert [file["name"] for file in files] == ["no \\udcff text.txt", "out.html"]
    named = server.ask(files[0]["href"])
    assert named.status == 200 and named.text == "as it is"
    assert named.headers["content-disposition"].endswith("no%20%FF%20text.txt")
    answer = server.ask(files[1]["href"])
    assert answer.status == 200 and answer.text == "<script>alert(2)</script>"
    assert answer.headers["content-disposition"].startswith("attachment")
    assert answer.headers["content-type"] == "application/octet-stream"
    assert "sandbox" in answer.headers["content-security-policy"]
    artifacts = place / "runs/squares/artifacts"
    (artifacts / "secret").symlink_to("/etc/passwd")
    (artifacts / "folder").symlink_to("/etc")
    try:
        for name in ("artifacts/secret", "artifacts/folder/passwd", "artifacts", "run.json",
                     "artifacts/../run.json", "artifacts/%2e%2e/run.json", "requests/session",
                     "artifacts//etc/passwd", "ledger.sqlite"):  # fmt: skip
            assert server.ask(f"/run/{run}/file/{name}").status == 404, name
    finally:
        (artifacts / "secret").unlink()
        (artifacts / "folder").unlink()


def test_runs_that_cannot_be_read_say_so_beside_the_others(server: WebServer, place: Path) -> None:
    runs = place / "runs"
    made = [runs / name for name in ("torn", "empty", "newer", "lost")]
    for folder in made:
        shutil.copytree(runs / "squares", folder)
    (runs / "torn/ledger.sqlite").write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    (runs / "empty/run.json").write_text("")
    with sqlite3.connect(runs / "newer/ledger.sqlite") as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    (runs / "lost/ledger.sqlite").unlink()
    try:
        found = server.runs()
        assert found["squares"]["state"] == "failed"
        assert "damaged" in found["torn"]["verdict"] and "damaged" in found["empty"]["verdict"]
        assert "newer muster" in found["newer"]["verdict"]
        for name in ("torn", "empty", "newer", "lost"):
            run = found[name]["id"]
            for page in ("", "/tasks", "/task/1", "/log?task=1", "/errors", "/about", "/search",
                         "/training", "/map", "/curves"):  # fmt: skip
                html, data = server.ask(f"/run/{run}{page}"), server.ask(f"/api/run/{run}{page}")
                assert html.status in (200, 404) and "Traceback" not in html.text, (name, page)
                assert data.status in (200, 404, 503), (name, page)
                assert data.status == 200 or data.json["error"], (name, page)
    finally:
        for folder in made:
            shutil.rmtree(folder)
    gone = server.ask(f"/api/run/{found['torn']['id']}")
    assert gone.status in (404, 503) and gone.json["error"]


def test_a_root_that_is_not_there_yet_has_no_runs(tmp_path: Path) -> None:
    with web_server(tmp_path) as server:
        assert server.ask("/api/runs").json == {"runs": []}
        assert server.ask("/").status == 200


# ---------------------------------------------------------------------- how it ends


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_end_is_a_good_ending_also_while_somebody_looks(
    place: Path, number: int
) -> None:
    with web_server(place) as server, server.stream("") as stream:
        server.process.send_signal(number)
        assert list(stream.events()) == []
        assert server.process.wait(120) == 0
        assert "Traceback" not in server.output.read_text()


def test_a_browser_is_opened_without_the_token_among_its_words(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody on the machine sees the words of a process."""
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\nprintf "%s" "$*" > {tmp_path}/words\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    with web_server(place, "--open") as server:
        deadline = time.monotonic() + 120
        while not (
            words := (tmp_path / "words").read_text() if (tmp_path / "words").exists() else ""
        ):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        page = Path(unquote(urlsplit(words).path))
        assert server.token not in words and server.token in page.read_text()
        assert stat.S_IMODE(page.stat().st_mode) == 0o600


def test_a_socket_is_for_its_owner_alone(place: Path, tmp_path: Path) -> None:
    path = tmp_path / "door"
    with web_server(place, "--socket", str(path)) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert f"ssh -L 8765:{path}" in server.output.read_text()
        found = psutil.Process(server.process.pid).net_connections()
        assert not [one for one in found if one.status == psutil.CONN_LISTEN]
        for host, status in (("localhost:8765", b"200"), ("evil.example:8765", b"421")):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
                head = f"GET /api/runs HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
                client.sendall(f"{head}Authorization: Bearer {server.token}\r\n\r\n".encode())
                assert client.recv(100).split()[1] == status
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(120) == 0
        assert not path.exists()


def test_a_socket_that_a_killed_process_has_left_is_no_hindrance(
    place: Path, tmp_path: Path
) -> None:
    path = tmp_path / "door"
    with web_server(place, "--socket", str(path)):
        pass  # which kills it
    assert path.exists()
    with web_server(place, "--socket", str(path)):
        assert path.is_socket()


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--i-know-this-is-public", "0.0.0.0"], 2, "every address"),
        (["--i-know-this-is-public", "0"], 2, "every address"),
        (["--host", "0.0.0.0"], 2, "--host"),
        (["--port", "70000"], 2, "is not a port"),
        (["--socket", "x", "--port", "1"], 2, "takes the place of a port"),
        (["nothing"], 2, "is not a folder"),
        (["--socket", "work.py"], 3, "left alone"),
        (["--socket=~/work.py"], 3, "left alone"),
    ],
)
def test_what_is_refused_at_the_start(
    place: Path, words: list[str], code: int, says: str, muster_main: Main,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_STATE_HOME", str(place / "state"))
    monkeypatch.setenv("HOME", str(place))
    done = muster_main("web", *words, folder=place)
    assert done.returncode == code and says in done.stderr and "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_said(
    place: Path, server: WebServer, muster_main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(place / "state"))
    done = muster_main("web", "--port", str(server.port), folder=place)
    assert done.returncode == 3 and f"port {server.port}" in done.stderr


def test_no_other_command_loads_the_server() -> None:
    """The command line starts as fast as before: only this command imports a web server."""
    code = (
        "import sys, muster, muster.cli.main, muster.api.runs, muster.cli.commands.pages;"
        "print([name for name in sys.modules if name.split('.')[0] in ('starlette', 'uvicorn')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
