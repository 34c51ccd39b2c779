"""The secret that lets in: 256 bits in a file of this user's, and cookies made from it."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from starlette.requests import cookie_parser

from muster.base.errors import SetupError

_BYTES = 32
_FREE_TRIES = 5
_DELAY_S = 1.0
_MOST_WAITING = 20


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
        self._num_failed = 0
        self._num_waiting = 0
        self._turn = asyncio.Lock()

    def cookie(self, host: str) -> tuple[str, str]:
        """Name and value. Cookies know no ports, so the name has it: two dashboards, two names."""
        port = host.rpartition(":")[2]
        return f"muster-{port if port.isdigit() else 80}", self._value(host)

    def _value(self, host: str) -> str:
        return hmac.new(self._token, f"cookie {host}".encode(), hashlib.sha256).hexdigest()

    def has_cookie(self, host: str, header: str) -> bool:
        name, value = self.cookie(host)
        return _same(cookie_parser(header).get(name, ""), value)

    def action_key(self) -> str:
        """What a page sends along with an action, beside its cookie. Browsers send the cookie to
        every port of this machine; this the page keeps where only pages of this port can read it.
        """
        return hmac.new(self._token, b"act", hashlib.sha256).hexdigest()

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
