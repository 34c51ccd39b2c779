"""The process behind the dashboard: where it listens, and how it ends."""

from __future__ import annotations

import contextlib
import html
import ipaddress
import os
import socket
import stat
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from muster.base.errors import SetupError, UsageError
from muster.base.settings import read_settings
from muster.base.signals import ENDING, handled
from muster.web.app import Dashboard, make_app
from muster.web.folder import Folders
from muster.web.guard import Credentials, Place, read_token

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

_LOOPBACK = "127.0.0.1"
#: What is being answered has this long to end when the server does.
_GRACE_S = 1


@dataclass(frozen=True, kw_only=True)
class WebOptions:
    """What is shown, and where. ``public_host``: an address that others can reach."""

    roots: Sequence[Path] = (Path("runs"),)
    port: int = 0
    socket: Path | None = None
    public_host: str | None = None
    allows_actions: bool = False


@dataclass(frozen=True, kw_only=True)
class Listening:
    """A dashboard that listens. ``address``: how a browser gets in; None for a socket."""

    address: str | None
    port: int | None
    token_file: Path
    token: str


def token_file() -> Path:
    return read_settings().state_folder / "muster" / "web-token"


def open_browser(found: Listening) -> None:
    """Open it by way of a file that only this user can read: everybody can see the arguments of a
    process, so the address with its token must not be among them.
    """
    page = found.token_file.with_name("web-open.html")
    address = html.escape(found.address or "")
    with contextlib.suppress(OSError):
        page.unlink(missing_ok=True)
        made = os.open(page, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(made, "w") as file:
            file.write(f'<meta http-equiv="refresh" content="0;url={address}">')
        webbrowser.open(page.as_uri())


def serve(
    options: WebOptions,
    *,
    listening: Callable[[Listening], None],
    tell: Callable[[str], None],
) -> None:
    """Show runs until somebody ends this process. Call it in the main thread.

    ``listening`` is called when the first request can be sent; ``tell`` with lines for who started
    it. Raises SetupError where it cannot listen there, UsageError for an address such as 0.0.0.0.
    """
    token = read_token(token_file())
    with _listen(options) as (door, port):
        host = _in_address(options.public_host or _LOOPBACK)
        place = Place(port=port, host=host, allows_actions=options.allows_actions)
        board = Dashboard(
            folders=Folders(options.roots), place=place, credentials=Credentials(token), tell=tell
        )
        address = None if port is None else f"http://{host}:{port}/#{token}"
        server = _make_server(make_app(board))

        def end(number: int, frame: object) -> None:
            server.should_exit = True
            board.ending.set()

        with handled(ENDING, end):
            door.listen()  # who connects from now on waits until the server takes him in
            listening(Listening(address=address, port=port, token_file=token_file(), token=token))
            server.run(sockets=[door])


def _in_address(host: str) -> str:
    """As browsers write it.

    >>> _in_address("node7"), _in_address("2001:DB8:0::7")
    ('node7', '[2001:db8::7]')
    """
    return f"[{ipaddress.IPv6Address(host).compressed}]" if ":" in host else host


def _make_server(app: ASGIApp) -> uvicorn.Server:
    import uvicorn  # here: it can be imported only where it can run

    class Server(uvicorn.Server):
        """Leaves the signals to us: uvicorn would raise them once more when it has ended."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    config = uvicorn.Config(
        app, http="h11", ws="none", loop="asyncio", lifespan="off",
        log_config=None, access_log=False, server_header=False, proxy_headers=False,
        timeout_graceful_shutdown=_GRACE_S,
    )  # fmt: skip
    return Server(config)


@contextlib.contextmanager
def _listen(options: WebOptions) -> Iterator[tuple[socket.socket, int | None]]:
    """The socket on which we listen, and its port."""
    if options.socket is not None:
        with _listen_at(options.socket) as door:
            yield door, None
        return
    host = options.public_host or _LOOPBACK
    door = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    with contextlib.closing(door):
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind((host, options.port))
        except OSError as error:
            raise SetupError(
                f"Cannot listen at {host}, port {options.port}: {error.strerror or error}.",
                hint="choose another --port, or leave it out: then a free one is found.",
            ) from None
        address, port = door.getsockname()[:2]
        # Asked of the bound socket, not of the text: "0", "0x0" and "::0" mean all addresses too.
        if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
            raise UsageError(
                f"--i-know-this-is-public {host} stands for every address of this machine.",
                hint="name the one at which the dashboard will be opened.",
            )
        yield door, port


@contextlib.contextmanager
def _listen_at(path: Path) -> Iterator[socket.socket]:
    """A socket in the file system that only its owner may use, from its first moment on."""
    door = socket.socket(socket.AF_UNIX)
    with contextlib.closing(door):
        try:
            _remove_dead(path)
            before = os.umask(0o177)
            try:
                door.bind(str(path))
            finally:
                os.umask(before)
        except OSError as error:
            raise SetupError(
                f"Cannot listen at {path}: {error.strerror or error}.",
                hint="its folder must exist, and its path must be short (100 characters).",
            ) from None
        try:
            yield door
        finally:
            with contextlib.suppress(OSError):
                path.unlink()


def _remove_dead(path: Path) -> None:
    """Remove a socket that a killed process has left; raises SetupError for anything else."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise SetupError(f"{path} already exists and is not a socket: it is left alone.")
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as other:
        try:
            other.connect(str(path))
        except OSError:
            path.unlink()
            return
    raise SetupError(f"Another process listens at {path}.", hint="choose another --socket.")
