"""``--notify``: one message per cause, to servers that answer, hang, refuse and redirect."""

from __future__ import annotations

import contextlib
import email
import email.policy
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.hostile_texts import HOSTILE, orders_in
from tests.programs import read_program
from tests.unit.api.test_lending import on_machine

from muster.api.start import notify, services
from muster.api.start.notify import read_place
from muster.api.start.services import notifying
from muster.base.errors import UsageError
from muster.devices.leases import Lease, acquire
from muster.run.folder import RunFolder

MusterMain = Callable[..., subprocess.CompletedProcess[str]]
TOKEN = "tk_0123456789abcdef"


class Server(ThreadingHTTPServer):
    """Answers with ``statuses`` one after another, the last for ever."""

    daemon_threads = True

    def __init__(self, *statuses: int, location: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.statuses, self.location = list(statuses), location
        self.got: list[tuple[str, dict[str, str], bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def causes(self) -> list[str]:
        return [json.loads(body)["cause"] for _, _, body in self.got]


class _Handler(BaseHTTPRequestHandler):
    server: Any

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.path, dict(self.headers), body))
        statuses = self.server.statuses
        status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
        self.send_response(status)
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


@contextmanager
def serving(*statuses: int, location: str = "") -> Iterator[Server]:
    with Server(*statuses, location=location) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "_FIRST_PAUSE_S", 0.02)


def tell(folder: Path, *places: str, limit_s: float = 60.0) -> list[str]:
    """Each cause twice; what could not be sent."""
    said: list[str] = []
    end_s = services.END_S
    services.END_S = limit_s
    try:
        with notifying(RunFolder(folder / "run"), places, said.append) as notifier:
            for _ in range(2):
                notifier.tell("failure", "a task\x1b[2J said hf_abcdefghijkl <!channel>")
                notifier.tell("ended", "all is over", 1)
    finally:
        services.END_S = end_s
    return said


def test_one_message_per_cause_and_tried_again_after_an_error(tmp_path: Path) -> None:
    with serving(500, 429, 200) as server:
        assert tell(tmp_path, f"webhook:{server.url}/hook") == []
        assert server.causes() == ["failure", "failure", "failure", "ended"]
        first = json.loads(server.got[0][2])
        assert first["run"] == "run" and first["exit_code"] is None
        assert "hf_abc" not in first["text"] and "\x1b" not in first["text"]


def test_what_each_service_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\nmore\n")
    with serving(200) as server:
        monkeypatch.setenv("CHAT", f"{server.url}/chat?key=secret")
        places = (
            "slack:env:CHAT", "discord:env:CHAT",
            f"webhook:{server.url}/w,token=file:{tmp_path}/token",
            f"ntfy:{server.url}/topic",
        )  # fmt: skip
        for place in places:
            assert tell(tmp_path, place) == []
        slack, discord, webhook, ntfy = server.got[::2]
    assert slack[0] == "/chat?key=secret"
    assert "&lt;!channel&gt;" in json.loads(slack[2])["text"]
    assert json.loads(discord[2])["allowed_mentions"] == {"parse": []}
    assert webhook[1]["Authorization"] == f"Bearer {TOKEN}"
    assert ntfy[0] == "/topic" and ntfy[1]["Title"] == "muster: run: failure"


#: What a name or a text may hold that a chat, a header or a terminal would obey.
ASKS = {
    **HOSTILE,
    "mentions": "@everyone @here <!channel> <!everyone> <@U012AB3CD> <#C1|x> <@&5>",
    "a header": "x\r\nBcc: all@example.org\r\nX-Title: y\r\n\r\nbody",
    "folded": "x\n continued\n\tX: y",
    "wide and long": "日" * 1400,
}
_NAMES = {what: text for what, text in ASKS.items() if text.strip() and "\0" not in text}
SENDMAIL = """#!/bin/sh
printf '%s\\n' "$@" > {place}/words; cat > {place}/mail
"""


@pytest.mark.parametrize("what", ASKS)
def test_hostile_texts_ask_for_nothing_wherever_they_are_sent(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the text of a message, and as the name of the run's folder, which its title shows."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sendmail").write_text(SENDMAIL.format(place=tmp_path))
    (tmp_path / "bin" / "sendmail").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    name = _NAMES.get(what, "run").replace("/", "|")[:60]
    run, said = RunFolder(tmp_path / name), list[str]()
    with serving(200) as server:
        monkeypatch.setenv("CHAT", f"{server.url}/chat")
        places = (
            "slack:env:CHAT", "discord:env:CHAT", f"ntfy:{server.url}/topic",
            f"webhook:{server.url}/w", "mail:me@example.org",
        )  # fmt: skip
        for place in places:
            with notifying(run, [place], said.append) as notifier:
                notifier.tell("failure", ASKS[what])
        slack, discord, ntfy, webhook = server.got
    assert said == []
    shown = json.loads(slack[2])["text"]
    assert "<" not in shown and ">" not in shown and orders_in(shown) == []
    assert json.loads(discord[2])["allowed_mentions"] == {"parse": []}
    assert orders_in(json.loads(discord[2])["content"]) == []
    assert len(json.loads(discord[2])["content"]) <= 2000
    usual = {"Host", "Accept-Encoding", "Content-Length", "User-Agent", "Connection"}
    assert set(ntfy[1]) == usual | {"Title"} and ntfy[1]["Title"].isascii()
    assert set(slack[1]) == set(webhook[1]) == usual | {"Content-Type"}
    assert orders_in(ntfy[2].decode()) == [] and len(ntfy[2]) <= 4096
    assert orders_in(json.loads(webhook[2])["text"]) == []
    mail = email.message_from_bytes((tmp_path / "mail").read_bytes(), policy=email.policy.default)
    headers = {"To", "Subject", "Content-Type", "Content-Transfer-Encoding", "MIME-Version"}
    assert set(mail.keys()) == headers and mail["To"] == "me@example.org"
    assert orders_in(mail["Subject"]) == [] and "\n" not in mail["Subject"]
    assert orders_in(mail.get_content()) == []
    assert (tmp_path / "words").read_text().split() == ["-i", "--", "me@example.org"]


@pytest.mark.thorough
def test_no_secret_is_in_the_process_list_while_a_run_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at whenever a server is told something, by what every user of the machine can see."""
    seen: list[bytes] = []

    class Looks(_Handler):
        def do_POST(self) -> None:
            for place in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    seen.append(place.read_bytes())
            told.touch()
            super().do_POST()

    told = tmp_path / "told"
    (tmp_path / "job.py").write_text(  # the second task is at work when the first is told of
        "import time\nfrom pathlib import Path\n\ndef f(x: int):\n"
        "    until = time.monotonic() + 60\n"
        f"    while x and not Path({str(told)!r}).exists() and time.monotonic() < until:\n"
        "        time.sleep(0.02)\n"
        "    return 1 / x\n"
    )
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setitem(globals(), "_Handler", Looks)
    with serving(200) as server:
        environment = {**os.environ, "CHAT": f"{server.url}/{TOKEN}"}
        words = [
            sys.executable, "-m", "muster", "sweep", "job.py:f", "--grid", "x=0,1", "--devices",
            "cpu:2", "--keep-going", "--run-dir", "run", "--notify", "slack:env:CHAT", "--notify",
            f"webhook:{server.url}/w,token=file:{tmp_path}/token",
        ]  # fmt: skip
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1, done.stderr
        assert sorted(path for path, _, _ in server.got) == sorted([f"/{TOKEN}", "/w"] * 2)
    assert any(b"muster\0sweep" in line for line in seen)
    assert any(b"muster.farm.worker" in line for line in seen)
    assert not any(TOKEN.encode() in line for line in seen)
    assert TOKEN not in done.stdout + done.stderr
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or TOKEN.encode() not in path.read_bytes(), path


def test_no_secret_follows_a_redirect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK_TOKEN", TOKEN)
    with serving(200) as elsewhere, serving(307, location=f"{elsewhere.url}/stolen") as server:
        (line,) = tell(tmp_path, f"webhook:{server.url}/hook,token=env:HOOK_TOKEN")
        assert elsewhere.got == [] and len(server.got) == 2, "and it is not tried again"
    assert line.endswith("2 messages not sent (failure, ended): it redirects elsewhere, which is "
                         "not followed")  # fmt: skip
    assert TOKEN not in line


def test_a_server_that_hangs_refuses_or_vanishes_costs_the_end_some_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as hangs, socket.socket() as refuses, serving(200) as works:
        hangs.bind(("127.0.0.1", 0))
        hangs.listen()
        refuses.bind(("127.0.0.1", 0))  # and does not listen
        ports = [one.getsockname()[1] for one in (hangs, refuses)]
        monkeypatch.setenv("URL", f"http://127.0.0.1:{ports[1]}/{TOKEN}")
        began = time.monotonic()
        said = tell(
            tmp_path, f"webhook:http://127.0.0.1:{ports[0]}/a", "slack:env:URL",
            f"webhook:{works.url}/b", limit_s=3.0,
        )  # fmt: skip
        assert time.monotonic() - began < 60
        assert works.causes() == ["failure", "ended"]
    assert [line.partition(": ")[0] for line in said] == [
        f"--notify webhook:http://127.0.0.1:{ports[0]}/a", "--notify slack:env:URL",
    ]  # fmt: skip
    assert "Connection refused" in said[1] and TOKEN not in "".join(said)


def test_a_command_gets_the_message_and_may_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "_MOST_TRIES", 2)
    script = tmp_path / "tell.sh"
    script.write_text(f'#!/bin/sh\n{{ cat; echo "$MUSTER_NOTIFY_CAUSE"; }} >> {tmp_path}/told\n')
    script.chmod(0o755)
    assert tell(tmp_path, f"command:{script}") == []
    told = (tmp_path / "told").read_text()
    assert '"cause": "failure"' in told and told.endswith("ended\n")
    assert "exit code 1" in tell(tmp_path, "command:false")[0]
    assert "does not start" in tell(tmp_path, "command:/nowhere/to/be found")[0]
    monkeypatch.setattr(notify, "_COMMAND_S", 0.3)
    (line,) = tell(tmp_path, "command:sleep 1000")
    assert line.endswith("(failure, ended): it does not end in time")


def test_a_command_does_not_outlive_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "END_S", 0.1)
    told, said = tmp_path / "told", list[str]()
    place = f"command:sh -c 'echo $$ > {told}; exec sleep 1000'"
    deadline = time.monotonic() + 60
    with notifying(RunFolder(tmp_path / "run"), [place], said.append) as notifier:
        notifier.tell("ended", "all is over")
        while not (told.exists() and told.read_text().strip()) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert said[0].endswith("1 message not sent (ended): no answer in time")
    pid = int(told.read_text())
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not psutil.pid_exists(pid)


def test_the_end_does_not_wait_for_a_long_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "_FIRST_PAUSE_S", 600.0)
    with serving(500, 200) as server:
        assert tell(tmp_path, f"webhook:{server.url}/hook") == []
        assert server.causes() == ["failure", "failure", "ended"]


def test_an_exception_is_an_end(tmp_path: Path) -> None:
    with serving(200) as server:
        with (
            pytest.raises(UsageError),
            notifying(RunFolder(tmp_path), [f"webhook:{server.url}"], print),
        ):
            raise UsageError("no device")
        deadline = time.monotonic() + 60
        while not server.got and time.monotonic() < deadline:
            time.sleep(0.01)
        (message,) = [json.loads(body) for _, _, body in server.got]
    assert message["cause"] == "ended" and message["exit_code"] == 2
    assert message["text"].endswith("no device")


REFUSED = {
    "a kind": ("pager:me", "Unknown kind of --notify 'pager'"),
    "an open chat": (f"slack:https://hooks.slack.com/{TOKEN}", "does not belong on a command line"),
    "a chat as a webhook": ("webhook:https://hooks.slack.com/services/x", "slack:env:NAME"),
    "another": ("webhook:https://discord.com/api/webhooks/1/x", "does not belong on a command"),
    "a query": (f"webhook:https://host/x?key={TOKEN}", "does not belong on a command line"),
    "a user": (f"webhook:https://me:{TOKEN}@host/x", "does not belong on a command line"),
    "an open token": (f"webhook:https://host/x,token={TOKEN}", "does not belong on a command line"),
    "a token in a command": (f"command:curl --token {TOKEN} x", "does not belong on a command"),
    "plain http": ("webhook:http://example.org/x", "http is read by everyone"),
    "a file": ("webhook:ftp://host/x", "this is not an address"),
    "no host": ("ntfy:https:///x", "this is not an address"),
    "a line break": ("webhook:https://host/x\r\nX: y", "this is not an address"),
    "no command": ("command:", "this is not a command"),
    "a flag for an address": ("mail:-oQ/tmp@x", "this is not an address"),
    "two addresses": ("mail:a@b,c@d", "this is not an address"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_refused_without_the_secret(name: str) -> None:
    text, why = REFUSED[name]
    with pytest.raises(UsageError) as caught:
        read_place(text)
    assert why in str(caught.value)
    assert TOKEN not in str(caught.value)


def test_what_is_missing_is_said_before_anything_begins(
    tmp_path: Path, muster_main: MusterMain, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.py").write_text("def f(x: int):\n    return x\n")
    line = "sweep job.py:f --grid x=1 --on inline --devices cpu:1 --run-dir run".split()
    monkeypatch.delenv("NOWHERE", raising=False)
    for place, why in (
        ("slack:env:NOWHERE", "the variable NOWHERE is not set"),
        ("slack:file:nowhere", "cannot read nowhere"),
        (f"webhook:https://host/x,token={TOKEN}", "does not belong"),
    ):
        done = muster_main(*line, "--notify", place)
        assert done.returncode == 2 and why in done.stderr and TOKEN not in done.stderr
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("BAD", f"http://example.org/{TOKEN}")
    done = muster_main(*line, "--notify", "slack:env:BAD")
    assert done.returncode == 2 and "use https" in done.stderr and TOKEN not in done.stderr


@pytest.mark.thorough
def test_a_sweep_tells_and_its_record_has_no_secret(
    tmp_path: Path, muster_main: MusterMain, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.py").write_text("def f(x: int):\n    return 1 / x\n")
    with serving(200) as server:
        monkeypatch.setenv("CHAT", f"{server.url}/{TOKEN}")
        line = "sweep job.py:f --grid x=0,1 --on inline --devices cpu:1 --run-dir run --keep-going"
        flags = ("--notify", "slack:env:CHAT", "--notify", f"webhook:{server.url}/w")
        done = muster_main(*line.split(), *flags)
        assert done.returncode == 1, done.stderr
        again = muster_main(*line.replace("x=0,1", "x=0,1,2").split(), *flags)
        assert again.returncode == 1, again.stderr
        found = [json.loads(body) for path, _, body in server.got if path == "/w"]
    assert [one["cause"] for one in found] == ["failure", "ended", "ended"]
    assert found[1]["exit_code"] == 1 and "1 done, 1 failed" in found[1]["text"]
    assert sum(path == f"/{TOKEN}" for path, _, _ in server.got) == 3
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or TOKEN.encode() not in path.read_bytes(), path


@pytest.mark.thorough
def test_a_map_in_stages_ends_once(tmp_path: Path, muster_main: MusterMain) -> None:
    (tmp_path / "s.py").write_text(
        "def f(r):\n    return {'a': 1 / r['a']}\ndef g(r):\n    return r\nBOTH = [f, g]\n"
    )
    (tmp_path / "in.jsonl").write_text('{"a": 0}\n{"a": 1}\n')
    line = "map s.py:BOTH --input in.jsonl --output o.jsonl --stage-by-stage --devices cpu:1"
    with serving(200) as server:
        place = f"webhook:{server.url}/w"
        done = muster_main(*line.split(), "--run-dir", "run", "--notify", place)
        assert done.returncode == 1, done.stderr
        assert server.causes() == ["ended"], "a record was rejected, and the next stage began"


def _later(call: Callable[[], object], ready: Callable[[], object]) -> threading.Thread:
    def wait() -> None:
        while not ready():
            time.sleep(0.02)
        call()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize("how", ["timed out", "interrupted", "refused"])
@pytest.mark.parametrize(
    "line",
    [
        "sweep job.py:f --grid x=1 --devices 1",
        "map job.py:f --input in.jsonl --output o.jsonl --devices 1",
        "run --gpus 1 job.py",
    ],
)
def test_a_run_that_ends_in_the_queue_tells(
    line: str, how: str, tmp_path: Path, muster_main: MusterMain, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = acquire("GPU-0", "other", on_machine(tmp_path, monkeypatch, 1))
    (tmp_path / "job.py").write_text("def f(x):\n    return x\n")
    (tmp_path / "in.jsonl").write_text('{"a": 1}\n')
    assert isinstance(lease, Lease)
    until_s = time.time() + 1.5

    def waits() -> bool:
        return bool(list((tmp_path / "leases").glob("*.ticket")))

    more, code, text, thread = ("--wait=0.3s",), 3, "Waited 0.", None
    if how == "interrupted":
        more, code, text = ("--wait",), 75, "SIGTERM ended it"
        thread = _later(lambda: os.kill(os.getpid(), signal.SIGTERM), waits)
        code = 130 if line.startswith("run") else 75
    if how == "refused":
        clock = datetime.fromtimestamp(until_s).isoformat()
        more, code, text = ("--wait", "--until", clock), 75, f"It is --until {clock}"
        thread = _later(lease.release, lambda: waits() and time.time() > until_s)
    with serving(200) as server:
        command, *rest = line.split()
        told = ("--notify", f"webhook:{server.url}")
        done = muster_main(command, *more, *told, "--run-dir", "run", *rest)
    if thread is not None:
        thread.join()
    lease.release()
    assert done.returncode == code, done.stderr
    assert server.causes() == ["ended"]
    message = json.loads(server.got[0][2])
    assert text in message["text"] and message["exit_code"] in (code, 75), message


#: What happens to a run, the causes that are told then, in their order, and the exit code.
CAUSES = {
    "paused": (
        "sweep job.py:fails --grid x=1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,"
        "24,25,26,27,28,29,30 --devices cpu:1 --retries 0",
        ["failure", "paused"], 1,
    ),
    "budget": (
        "sweep job.py:waits --grid x=1,2,3,4,5,6 --devices cpu:1 --max-gpu-hours 0.0003",
        ["budget", "ended"], 75,
    ),
    "budget of a map": (
        "map job.py:record --input in.jsonl --output o.jsonl --chunk-rows 1 --devices cpu:1 "
        "--max-gpu-hours 0.0003", ["budget", "ended"], 75,
    ),
    "stalled": (
        "train slow.py:Slow --batch-size 8 --no-tensorboard --devices cpu:2 --num-workers 0 "
        "--sleep-after 80 --stall-timeout 3 --max-restarts 0", ["stalled", "ended"], 1,
    ),
    "a rank that fails": ("run --devices cpu:1 fails.py", ["ended"], 1),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", CAUSES)
def test_each_cause_is_told_once(what: str, tmp_path: Path, muster_main: MusterMain) -> None:
    line, causes, code = CAUSES[what]
    (tmp_path / "job.py").write_text(
        "import time\ndef fails(x: int):\n    raise ValueError('alike')\n"
        "def waits(x: int):\n    time.sleep(0.5)\n    return x\n"
        "def record(r):\n    time.sleep(0.5)\n    return r\n"
    )
    (tmp_path / "in.jsonl").write_text('{"a": 1}\n' * 12)
    (tmp_path / "fails.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "slow.py").write_text(read_program("pausing_task.py"))
    command = f"sh -c 'echo $MUSTER_NOTIFY_CAUSE >> {tmp_path}/told'"
    first, *rest = line.split()
    done = muster_main(first, "--run-dir", "r", "--notify", f"command:{command}", *rest)
    assert done.returncode == code, done
    assert (tmp_path / "told").read_text().split() == causes, done
