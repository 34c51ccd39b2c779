"""``--notify``: who is told that a run has ended, failed for the first time, stalled or paused.

Each place has a thread of its own, which tries again after growing pauses. A run never waits for
one while it works, and some seconds at its end; then it says what was not sent. An address or a
token that is a secret comes from the environment or a file, and is in no message, record or error.
"""

from __future__ import annotations

import contextlib
import json
import platform
import queue
import re
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from muster.base import processes
from muster.base.errors import MusterError, UnknownNameError, UsageError
from muster.base.settings import child_environment, secret
from muster.base.shown_text import count, one_line, secrets_of, without_secrets
from muster.base.signals import Interrupted, stop_code
from muster.run.folder import RunFolder

Cause = Literal["ended", "failure", "stalled", "paused", "budget"]
KINDS = ("command", "webhook", "slack", "discord", "ntfy", "mail")
#: Chats whose whole address is a secret, and by which kind they are told.
_CHATS = {"slack.com": "slack", "discord.com": "discord", "discordapp.com": "discord"}
#: How long the end of a run waits for what is not sent yet, and that of one which failed.
END_S, HURRY_S = 10.0, 3.0
_MOST_TRIES, _FIRST_PAUSE_S = 6, 1.0
_REPLY_S, _COMMAND_S = 10.0, 30.0
_MOST_TEXT, _MOST_WAITING = 1500, 16
_ADDRESS = re.compile(r"[^\s,;:<>-][^\s,;:<>]*@[^\s,;:<>]+")


class Place(NamedTuple):
    """``text``: as it is typed, which holds no secret. ``token``: where that of a server is."""

    kind: str
    where: str
    token: str
    text: str


Hold = Callable[[subprocess.Popen[bytes]], None]


class Message(NamedTuple):
    cause: Cause
    run: str
    path: str
    host: str
    text: str
    exit_code: int | None = None

    @property
    def title(self) -> str:
        return f"{self.run}: {self.cause}"


class Failed(Exception):
    """``is_final``: to try again is in vain."""

    def __init__(self, why: str, *, is_final: bool = False) -> None:
        super().__init__(why)
        self.is_final = is_final


# --------------------------------------------------------------------- what is typed


def read_place(text: str) -> Place:
    """What ``--notify`` says; UsageError for what it cannot mean, and for a secret in it."""
    kind, _, where = text.partition(":")
    if kind not in KINDS:
        raise UnknownNameError("kind of --notify", one_line(kind, 20), KINDS)
    token = ""
    if kind in ("webhook", "ntfy"):
        where, _, token = where.partition(",token=")
        if token and not _is_kept(token):
            raise _open_secret(kind, f"{kind}:…,token=env:NAME")
    if kind == "command":
        _words(where)
        if secrets_of(_words(where)) or without_secrets(where) != where:
            raise _open_secret(kind, "let the command read it from a file")
    elif kind == "mail":
        if not _ADDRESS.fullmatch(where):
            raise UsageError(
                "--notify mail: this is no address.", hint="write mail:me@example.org."
            )
    elif not _is_kept(where):
        _check_url(kind, where)
        parts = urlsplit(where)
        host = f".{parts.hostname}".rstrip(".")
        name = next((chat for end, chat in _CHATS.items() if host.endswith(f".{end}")), kind)
        has_secret = parts.username or parts.password or parts.query
        if name in ("slack", "discord") or has_secret or without_secrets(where) != where:
            raise _open_secret(kind, f"{name}:file:~/.{name}-url or {name}:env:NAME")
    return Place(kind, where, token, text)


def check_places(texts: Sequence[str]) -> None:
    """UsageError where a place cannot be reached from here: a variable or a file is missing."""
    for text in texts:
        place = read_place(text)
        if place.kind == "mail":
            _sendmail()
        elif place.kind != "command":
            _resolve(place)


def _is_kept(text: str) -> bool:
    return text.startswith(("env:", "file:"))


def _open_secret(kind: str, instead: str) -> UsageError:
    return UsageError(
        f"--notify {kind}: a secret does not belong on a command line, which others see and "
        "run.json keeps.",
        hint=f"put it into a variable or a file: {instead}.",
    )


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError:
        words = []
    if not words:
        raise UsageError("--notify command: this is no command.", hint="write command:'say done'.")
    return words


def _check_url(kind: str, url: str) -> None:
    """UsageError, without the address, for one that is not safe to send to."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        host, parts = "", urlsplit("")
    if not host or parts.scheme not in ("http", "https") or re.search(r"[\s\x00-\x1f\x7f]", url):
        raise UsageError(f"--notify {kind}: this is no address.", hint="write https://HOST/PATH.")
    if parts.scheme == "http" and not _is_loopback(host):
        raise UsageError(
            f"--notify {kind}: http is read by everyone on the way.", hint="use https."
        )


def _is_loopback(host: str) -> bool:
    import ipaddress

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _resolve(place: Place) -> tuple[str, str]:
    """The address and the token, which nobody is shown."""
    url, token = _value(place.kind, place.where), _value(place.kind, place.token)
    _check_url(place.kind, url)
    if token and re.search(r"[^\x21-\x7e]", token):
        raise UsageError(f"--notify {place.kind}: the token has characters that no token has.")
    return url, token


def _value(kind: str, text: str) -> str:
    source, _, name = text.partition(":")
    if not _is_kept(text):
        return text
    if source == "env":
        if found := secret(name):
            return found.strip()
        raise UsageError(f"--notify {kind}: the variable {name} is not set.", hint="export it.")
    try:
        lines = Path(name).expanduser().read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"--notify {kind}: cannot read {name}: {why}.") from None
    if not lines[0].strip():
        raise UsageError(f"--notify {kind}: the first line of {name} is empty.")
    return lines[0].strip()


def _sendmail() -> str:
    found = shutil.which("sendmail") or shutil.which("sendmail", path="/usr/sbin:/usr/lib")
    if found is None:
        raise UsageError(
            "--notify mail needs the program sendmail, which this machine lacks.",
            hint="let a command send it: --notify command:'…'.",
        )
    return found


# --------------------------------------------------------------------- how it is sent


def send(place: Place, message: Message, hold: Hold) -> None:
    """Send one message, once; raises Failed, and UsageError where a secret has gone. ``hold`` gets
    the process that sends it, where there is one."""
    match place.kind:
        case "command":
            more = {"CAUSE": message.cause, "RUN": message.path, "TEXT": message.text}
            environment = {f"MUSTER_NOTIFY_{name}": value for name, value in more.items()}
            body = json.dumps(message._asdict()).encode()
            _call(_words(place.where), body, environment, hold)
        case "mail":
            from email.message import EmailMessage

            mail = EmailMessage()
            mail["To"], mail["Subject"] = place.where, f"muster: {message.title}"
            mail.set_content(f"{message.text}\n\n{message.host}:{message.path}\n")
            _call([_sendmail(), "-i", "--", place.where], bytes(mail), {}, hold)
        case "ntfy":
            title = message.title.encode("ascii", "backslashreplace").decode()
            _post(*_resolve(place), message.text.encode(), {"Title": f"muster: {title}"})
        case _:
            body = json.dumps(_document(place.kind, message)).encode()
            _post(*_resolve(place), body, {"Content-Type": "application/json"})


def _document(kind: str, message: Message) -> dict[str, Any]:
    text = f"{message.title} ({message.host})\n{message.text}"
    if kind == "slack":  # < begins a mention or a link
        return {"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}
    if kind == "discord":
        return {"content": text[:_MOST_TEXT], "allowed_mentions": {"parse": []}}
    return message._asdict()


def _post(url: str, token: str, body: bytes, headers: dict[str, str]) -> None:
    import http.client  # with ssl 30 modules, which a run that tells nobody does without
    import ssl

    parts = urlsplit(url)
    host = parts.hostname or ""
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        trust = ssl.create_default_context()
        connection = http.client.HTTPSConnection(host, parts.port, timeout=_REPLY_S, context=trust)
    else:
        connection = http.client.HTTPConnection(host, parts.port, timeout=_REPLY_S)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    given = {**headers, "User-Agent": "muster", "Connection": "close"}
    if token:
        given["Authorization"] = f"Bearer {token}"
    try:
        connection.request("POST", path, body, given)
        status = connection.getresponse().status
    except ssl.SSLCertVerificationError:
        raise Failed("its certificate is not trusted", is_final=True) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        word = error.strerror if isinstance(error, OSError) else None
        word = "no answer in time" if isinstance(error, TimeoutError) else word
        raise Failed(word or type(error).__name__) from None
    finally:
        connection.close()
    if 300 <= status < 400:  # whoever stands there was not named by the user
        raise Failed("it redirects elsewhere, which is not followed", is_final=True)
    if not 200 <= status < 300:
        is_final = 400 <= status < 500 and status not in (408, 429)
        raise Failed(f"it answers with status {status}", is_final=is_final)


def _call(words: Sequence[str], text: bytes, environment: dict[str, str], hold: Hold) -> None:
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, env=child_environment(environment),
        )  # fmt: skip
    except OSError as error:
        raise Failed(f"it does not start: {error.strerror}", is_final=True) from None
    with process:
        hold(process)
        try:
            process.communicate(text, timeout=_COMMAND_S)
        except subprocess.TimeoutExpired:
            raise Failed("it does not end in time") from None
        finally:
            if process.poll() is None:
                processes.signal_group(process.pid, processes.KILL)
    if process.returncode:
        raise Failed(f"it ends with exit code {process.returncode}")


class _Courier(threading.Thread):
    """Sends to one place. ``left``: the causes that are not sent, ``why``: the last failure."""

    def __init__(self, place: Place) -> None:
        super().__init__(name=f"muster-notify-{place.kind}", daemon=True)
        self.place = place
        self.left: list[Cause] = []
        self.why = ""
        self._queue: queue.Queue[Message | None] = queue.Queue(_MOST_WAITING)
        self._is_ending = threading.Event()
        self._is_cut = False
        self._process: subprocess.Popen[bytes] | None = None

    def take(self, message: Message) -> None:
        self.left.append(message.cause)
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(message)

    def finish(self) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._is_ending.set()

    def cut(self) -> None:
        """Let no process that sends outlive the run."""
        self._is_cut = True
        self._hold(self._process)

    def run(self) -> None:
        while not self._is_cut and (message := self._queue.get()) is not None:
            pause_s = _FIRST_PAUSE_S
            for _ in range(_MOST_TRIES):
                if self._is_cut or self._sends(message):
                    break
                if self._is_ending.wait(pause_s):  # a long pause would outlast the end's patience
                    self._is_ending.clear()
                    pause_s = _FIRST_PAUSE_S / 2
                pause_s *= 2

    def _sends(self, message: Message) -> bool:
        """Whether it has been sent, or never will be."""
        try:
            send(self.place, message, self._hold)
        except (Failed, MusterError) as error:
            self.why = one_line(str(error).partition("\n")[0], 200)
            return not isinstance(error, Failed) or error.is_final
        except Exception as error:  # whatever it says may hold the address
            self.why = type(error).__name__
            return True
        self.left.remove(message.cause)
        return True

    def _hold(self, process: subprocess.Popen[bytes] | None) -> None:
        self._process = process  # before the question, or a `cut` in between would miss it
        if self._is_cut and process is not None and process.poll() is None:
            processes.signal_group(process.pid, processes.KILL)


class Notifier:
    """Tells every place of each cause once. ``tell`` returns at once."""

    def __init__(self, folder: RunFolder, places: Sequence[Place]) -> None:
        self._folder = folder
        self._told: set[Cause] = set()
        self._couriers = [_Courier(place) for place in places]
        self._host = platform.node()
        for courier in self._couriers:
            courier.start()

    def tell(self, cause: Cause, text: str, exit_code: int | None = None) -> None:
        if cause in self._told:
            return
        self._told.add(cause)
        text = without_secrets(one_line(text, _MOST_TEXT))
        whole = RunFolder(self._folder.whole)
        path = str(whole.path.absolute())
        message = Message(cause, one_line(whole.name), path, self._host, text, exit_code)
        for courier in self._couriers:
            courier.take(message)

    def close(self, limit_s: float, warn: Callable[[str], None]) -> None:
        """Wait so long for what is not sent, and say what is left then."""
        due_s = time.monotonic() + limit_s
        for courier in self._couriers:
            courier.finish()
        for courier in self._couriers:
            courier.join(max(0.0, due_s - time.monotonic()))
        for courier in self._couriers:
            if left := list(courier.left):
                why = courier.why or "no answer in time"
                courier.cut()
                messages = count(len(left), "message")
                warn(
                    f"--notify {courier.place.text}: {messages} not sent ({', '.join(left)}): {why}"
                )


@contextlib.contextmanager
def notifying(
    folder: RunFolder, texts: Sequence[str], warn: Callable[[str], None]
) -> Iterator[Notifier]:
    """A context of a start of a run; an exception that ends it is told as its end."""
    notifier = Notifier(folder, [read_place(text) for text in texts])
    try:
        yield notifier
    except BaseException as error:
        code = error.exit_code if isinstance(error, MusterError) else None
        text = str(error) or type(error).__name__
        if isinstance(error, Interrupted):
            code, text = stop_code(error.number), f"{error} ended it"
        notifier.tell("ended", f"{folder.whole}: {text}", code)
        notifier.close(HURRY_S, warn)
        raise
    notifier.close(END_S, warn)
