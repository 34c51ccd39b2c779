"""``--notify``: who is told that a run has ended, failed for the first time, stalled or paused.

Here is what is typed, and how one message is sent; the rest is in `services`. An address or a token
that is a secret comes from the environment or a file, and is in no message, record or error.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from muster.base import processes
from muster.base.errors import UnknownNameError, UsageError
from muster.base.settings import child_environment, secret
from muster.base.shown_text import one_line, secrets_of, without_secrets

if TYPE_CHECKING:
    import subprocess

Cause = Literal["ended", "failure", "stalled", "paused", "budget"]
KINDS = ("command", "webhook", "slack", "discord", "ntfy", "mail")
#: Chats whose whole address is a secret, and by which kind they are told.
_CHATS = {"slack.com": "slack", "discord.com": "discord", "discordapp.com": "discord"}
_REPLY_S, _COMMAND_S = 10.0, 30.0
MOST_TEXT = 1500
#: In bytes; what is longer becomes a file that is attached, or is refused.
_MOST_OF_NTFY = 4000
_ADDRESS = re.compile(r"[^\s,;:<>-][^\s,;:<>]*@[^\s,;:<>]+")


class Place(NamedTuple):
    """``text``: as it is typed, which holds no secret. ``token``: where that of a server is."""

    kind: str
    where: str
    token: str
    text: str


Hold = Callable[["subprocess.Popen[bytes]"], None]


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
                "--notify mail: this is not an address.", hint="write mail:me@example.org."
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
        raise UsageError(
            "--notify command: this is not a command.", hint="write command:'say done'."
        )
    return words


def _check_url(kind: str, url: str) -> None:
    """UsageError, without the address, for one that is not safe to send to."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        host, parts = "", urlsplit("")
    if not host or parts.scheme not in ("http", "https") or re.search(r"[\s\x00-\x1f\x7f]", url):
        raise UsageError(
            f"--notify {kind}: this is not an address.", hint="write https://HOST/PATH."
        )
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
        raise UsageError(
            f"--notify {place.kind}: the token has characters that a token cannot have."
        )
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
        why = error.strerror if isinstance(error, OSError) else "it is not text"
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
            mail.set_content(f"{message.text}\n\n{message.host}:{one_line(message.path)}\n")
            _call([_sendmail(), "-i", "--", place.where], bytes(mail), {}, hold)
        case "ntfy":
            title = message.title.encode("ascii", "backslashreplace").decode()
            body = message.text.encode()[:_MOST_OF_NTFY].decode(errors="ignore").encode()
            _post(*_resolve(place), body, {"Title": f"muster: {title}"})
        case _:
            body = json.dumps(_document(place.kind, message)).encode()
            _post(*_resolve(place), body, {"Content-Type": "application/json"})


def _document(kind: str, message: Message) -> dict[str, Any]:
    text = f"{message.title} ({message.host})\n{message.text}"
    if kind == "slack":  # < begins a mention or a link
        return {"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}
    if kind == "discord":
        return {"content": text[:MOST_TEXT], "allowed_mentions": {"parse": []}}
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
    import subprocess  # here: few runs call a program, and all read the options for it

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
