"""Who may ask for what: decided before anything is looked up.

Browsers reach this machine's own addresses, from any page that somebody has open; so a request is
judged by its Host, its method, its Origin and Sec-Fetch-Site before it is told apart from others.
Other users of this machine reach the port as well; so everything but the door needs the token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

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
