"""Who may ask for what: decided before anything is looked up, and the secret that lets in.

Browsers reach this machine's own addresses, from any page that somebody has open; so a request is
judged by its Host, its method, its Origin and Sec-Fetch-Site before it is told apart from others.
Other users of this machine reach the port as well; so everything but the door needs the token.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from starlette.requests import cookie_parser

from muster.base.errors import SetupError

READING = ("GET", "HEAD")

#: What every answer carries. A page may load what comes from here, and nothing that stands in it.
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
        "report-uri /csp-report"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
#: A file of a run in addition: it is saved, and what it holds runs nowhere.
FILE_HEADERS = {"content-security-policy": "sandbox; default-src 'none'; frame-ancestors 'none'"}

#: Posts beside actions: the token itself, and what a browser has refused to do.
_POSTS = ("/login", "/csp-report")
_BYTES = 32
_FREE_TRIES = 5
_DELAY_S = 1.0
_MOST_WAITING = 20


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where we listen. ``port``: None for a socket, to which any port may be forwarded.

    ``host``: a name beside those of this machine itself, where the user has said so.
    """

    port: int | None
    host: str = ""
    allows_actions: bool = False

    def knows(self, host: str) -> bool:
        """Whether a Host header names us: a page elsewhere may have made its name mean us."""
        name, port = _split(host)
        if name not in {"127.0.0.1", "localhost", "[::1]", self.host.lower() or "localhost"}:
            return False
        return port.isdigit() if self.port is None else port == str(self.port)


class Refusal(NamedTuple):
    status: int
    text: str
    headers: Mapping[str, str] = {}


def refusal(place: Place, method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
    """Why a request is not answered, whoever sends it; None where nothing speaks against it."""
    host = headers.get("host", "")
    if not place.knows(host):
        return Refusal(421, "This dashboard does not answer to that host name.")
    allowed = methods(place, path)
    if method not in allowed:
        words = "This dashboard is read-only: start it with --allow-actions to change runs from it."
        text = words if path.endswith("/act") else f"{method} is not allowed here."
        return Refusal(405, text, {"allow": ", ".join(allowed)})
    origin = headers.get("origin")
    if origin is not None and origin != f"http://{host}":
        return Refusal(403, "This request comes from another site.")
    site = headers.get("sec-fetch-site")
    is_page = method in READING and not path.startswith("/api/")
    if site not in ((None, "same-origin", "none") if is_page else (None, "same-origin")):
        if is_door(method, path):
            return None  # a link from elsewhere: the door is the same for everybody
        return Refusal(403, "This request comes from another site: open the dashboard itself.")
    if is_action(method, path):
        if not headers.get("x-muster"):
            return Refusal(403, "An action needs the header X-Muster.")
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return Refusal(415, "An action must be sent as JSON.")
    return None


def methods(place: Place, path: str) -> tuple[str, ...]:
    """What may be done at this address. Everything that is not named is refused."""
    if path in _POSTS:
        return ("POST",)
    if is_action("POST", path):
        return ("POST",) if place.allows_actions else ()
    return READING


def is_action(method: str, path: str) -> bool:
    return method == "POST" and path.startswith("/api/run/") and path.endswith("/act")


def is_door(method: str, path: str) -> bool:
    """Whether this is the first page, which lets in whoever has the token."""
    return method in READING and path == "/"


def is_open(method: str, path: str) -> bool:
    """Whether no token is needed: nothing of any run is in it."""
    return (method, path) == ("POST", "/login") or path.startswith("/static/")


def is_foreign(headers: Mapping[str, str]) -> bool:
    """Whether another site has sent the browser here; then its cookie counts for nothing."""
    return headers.get("sec-fetch-site") not in (None, "same-origin", "none")


def _split(host: str) -> tuple[str, str]:
    """Name and port; 80 where no port is given."""
    name, colon, port = host.rpartition(":")
    if not colon or port.endswith("]"):
        return host.lower(), "80"
    return name.lower(), port


def read_token(path: Path) -> str:
    """The token in this file, which is made where it is missing; nobody else may read it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            # Exclusively, so that no link of somebody else's is followed.
            made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return _read(path)
        with os.fdopen(made, "w") as file:
            token = secrets.token_urlsafe(_BYTES)
            file.write(token + "\n")
        return token
    except OSError as error:
        raise SetupError(f"Cannot keep the token in {path}: {error.strerror or error}.") from None


def _read(path: Path) -> str:
    opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(opened) as file:
        found = os.fstat(file.fileno())
        token = file.read(200).strip()
    is_private = found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077
    if not is_private or len(token) < _BYTES:
        raise SetupError(
            f"The token in {path} may be known to others, or is too short.",
            hint=f"remove it, and the next start makes a new one: rm {path}",
        )
    return token


class Credentials:
    """Compares in constant time, and makes those who guess wait."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._start = secrets.token_bytes(16)  # what an earlier server gave means nothing
        self._num_failed = 0
        self._num_waiting = 0
        self._turn = asyncio.Lock()

    def cookie(self, host: str) -> tuple[str, str]:
        """Name and value. Cookies know no ports, so the name has it: two dashboards, two names."""
        port = host.rpartition(":")[2]
        return f"muster-{port if port.isdigit() else 80}", self._value(host)

    def _value(self, host: str) -> str:
        said = b"cookie " + host.encode() + self._start
        return hmac.new(self._token, said, hashlib.sha256).hexdigest()

    def has_cookie(self, host: str, header: str) -> bool:
        name, value = self.cookie(host)
        return _same(cookie_parser(header).get(name, ""), value)

    def action_key(self) -> str:
        """What a page sends along with an action, beside its cookie. Browsers send the cookie to
        every port of this machine; this the page keeps where only pages of this port can read it.
        """
        return hmac.new(self._token, b"act" + self._start, hashlib.sha256).hexdigest()

    def is_action_key(self, text: str) -> bool:
        return _same(text, self.action_key())

    def has_bearer(self, header: str) -> bool:
        kind, _, token = header.partition(" ")
        return kind.lower() == "bearer" and self.is_token(token.strip())

    def is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode("utf-8", "replace"), self._token)

    async def failed(self) -> bool:
        """Note a wrong token. After a few of them each has to wait for its turn; False: too many
        are waiting.
        """
        self._num_failed += 1
        if self._num_failed <= _FREE_TRIES:
            return True
        if self._num_waiting >= _MOST_WAITING:
            return False
        self._num_waiting += 1
        try:
            async with self._turn:
                await asyncio.sleep(_DELAY_S)
        finally:
            self._num_waiting -= 1
        return True

    def succeeded(self) -> None:
        self._num_failed = 0


def _same(found: str, wanted: str) -> bool:
    return hmac.compare_digest(found.encode("utf-8", "replace"), wanted.encode())
