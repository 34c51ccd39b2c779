"""The token's file, and who is let in with it."""

from __future__ import annotations

import asyncio
import hmac
import stat
import time
from pathlib import Path

import pytest

from muster.base.errors import SetupError
from muster.web.guard import Credentials, read_token

HOST = "127.0.0.1:8765"


def test_the_token_is_this_users_alone_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "state" / "web-token"
    token = read_token(path)
    assert len(token) >= 43  # 256 bits
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_token(path) == token
    assert read_token(tmp_path / "another") != token


def test_a_token_that_others_may_know_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "web-token"
    read_token(path)
    path.chmod(0o640)
    with pytest.raises(SetupError, match="may be known to others"):
        read_token(path)
    path.chmod(0o600)
    path.write_text("short\n")
    with pytest.raises(SetupError, match="too short"):
        read_token(path)


def test_a_link_in_the_place_of_the_token_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    read_token(elsewhere)
    (tmp_path / "web-token").symlink_to(elsewhere)
    with pytest.raises(SetupError, match="Cannot keep the token"):
        read_token(tmp_path / "web-token")


def test_a_cookie_is_of_one_port_and_holds_no_token() -> None:
    credentials = Credentials("t" * 43)
    name, value = credentials.cookie(HOST)
    assert name == "muster-8765" and "t" * 43 not in value
    assert credentials.has_cookie(HOST, f"a=b; {name}={value}")
    assert credentials.has_cookie(HOST, f'prefs={{"a":1, "b":[2]}}; {name}={value}')
    assert value != credentials.action_key() and not credentials.is_action_key(value)
    other, _ = credentials.cookie("127.0.0.1:8766")
    assert other != name
    assert not credentials.has_cookie("127.0.0.1:8766", f"{other}={value}")
    assert not Credentials("u" * 43).has_cookie(HOST, f"{name}={value}")
    for header in ("", name, f"{name}=", f"{name}={value}x", f"{name}=é", "\x00;;=;"):
        assert not credentials.has_cookie(HOST, header)


def test_a_cookie_and_a_key_are_of_one_start() -> None:
    """Whoever takes the port of a server that has ended may get both from a page that is open."""
    before, now = Credentials("t" * 43), Credentials("t" * 43)
    name, value = before.cookie(HOST)
    assert before.has_cookie(HOST, f"{name}={value}")
    assert not now.has_cookie(HOST, f"{name}={value}")
    assert before.is_action_key(before.action_key())
    assert not now.is_action_key(before.action_key())


def test_a_bearer_is_the_token_itself() -> None:
    credentials = Credentials("t" * 43)
    assert credentials.has_bearer("Bearer " + "t" * 43) and credentials.has_bearer(
        "bearer " + "t" * 43
    )
    for header in ("", "Bearer", "Bearer x", "Basic " + "t" * 43, "t" * 43, "Bearer é"):
        assert not credentials.has_bearer(header)


def test_secrets_are_compared_in_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    real = hmac.compare_digest

    def counting(left: bytes, right: bytes) -> bool:
        compared.append(left)
        return real(left, right)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    credentials = Credentials("t" * 43)
    credentials.is_token("guess")
    credentials.has_cookie(HOST, "muster-8765=guess")
    assert compared == [b"guess", b"guess"]


@pytest.mark.thorough  # it waits
def test_after_five_failures_each_further_one_waits_for_its_turn() -> None:
    async def guess() -> tuple[float, float]:
        credentials = Credentials("t" * 43)
        begin_s = time.monotonic()
        for _ in range(5):
            assert await credentials.failed()
        free_s = time.monotonic()
        await asyncio.gather(credentials.failed(), credentials.failed())
        return free_s - begin_s, time.monotonic() - free_s

    _, waited_s = asyncio.run(guess())
    assert waited_s >= 2.0


def test_too_many_that_wait_are_sent_away_and_a_right_one_ends_the_waiting() -> None:
    async def guess() -> None:
        credentials = Credentials("t" * 43)
        for _ in range(5):
            await credentials.failed()
        waiting = [asyncio.create_task(credentials.failed()) for _ in range(25)]
        await asyncio.sleep(0)
        ended = [task.result() for task in waiting if task.done()]
        assert ended == [False] * 5
        for task in waiting:
            task.cancel()
        credentials.succeeded()
        assert await credentials.failed()

    asyncio.run(guess())
