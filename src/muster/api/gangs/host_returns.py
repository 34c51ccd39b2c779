"""Hosts that a gang has lost, which are tried again until they can be used."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from muster.base.clock import human_duration
from muster.base.shown_text import clean_text
from muster.hosts.check import connected
from muster.hosts.connection import BACK_OFF_S, Connection, Way
from muster.hosts.names import Host

_LOOK_S = 0.2
#: After so many starts that failed with a host it is not tried any more.
_MOST_STARTS = 3


class Tries:
    """Over all starts of a run: how often each lost host was tried in vain, when it is tried again,
    and how many starts have failed with it after it had answered."""

    def __init__(self) -> None:
        self._vain: dict[str, int] = {}
        self._due_s: dict[str, float] = {}
        self._failed: dict[str, int] = {}

    def lost(self, name: str) -> None:
        """It is tried from now on. One with which starts have failed waits for longer."""
        self._vain[name] = self._failed.get(name, 0)
        self._wait(name)

    def is_due(self, name: str) -> bool:
        return not self.is_given_up(name) and time.monotonic() >= self._due_s[name]

    def is_given_up(self, name: str) -> bool:
        return self._failed.get(name, 0) >= _MOST_STARTS

    def in_vain(self, name: str) -> tuple[int, float]:
        """It cannot be used yet. Returns how often that was so, and for how long it is left."""
        self._vain[name] += 1
        return self._vain[name], self._wait(name)

    def failed(self, name: str) -> str:
        """A start has failed with it. Returns what becomes of it, as a sentence has it."""
        self._failed[name] = self._failed.get(name, 0) + 1
        self.lost(name)
        if self.is_given_up(name):
            return f"it is not tried again, as {_MOST_STARTS} starts have failed with it"
        return f"it is tried again in {human_duration(self._due_s[name] - time.monotonic())}"

    def begun(self, name: str) -> None:
        """Its ranks have worked in a start, so that what was wrong with it is over."""
        self._failed.pop(name, None)

    def _wait(self, name: str) -> float:
        pause_s = BACK_OFF_S[min(self._vain[name], len(BACK_OFF_S) - 1)]
        self._due_s[name] = time.monotonic() + pause_s
        return pause_s


class Returns:
    """Tries the lost hosts in a thread. ``check`` raises SetupError for a host that answers and
    still cannot be used."""

    def __init__(
        self, lost: Sequence[Host], way: Way, check: Callable[[Sequence[Connection]], object],
        say: Callable[[str], None], tries: Tries,
    ) -> None:  # fmt: skip
        self._lost, self._way, self._check, self._say = lost, way, check, say
        self._tries = tries
        self._is_over = threading.Event()
        self._back: tuple[str, ...] = ()
        self._thread = threading.Thread(target=self._try, name="muster-returns", daemon=True)
        self._thread.start()

    def names(self) -> tuple[str, ...]:
        """Those that can be used again."""
        return self._back

    def close(self) -> None:
        self._is_over.set()
        self._way.circle.end()
        self._thread.join()

    def _try(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            for host in self._lost:
                name = host.name
                if name in self._back or not self._tries.is_due(name):
                    continue
                why = self._why_not(host)
                if self._is_over.is_set():
                    return
                if why is None:
                    self._back += (name,)
                    continue
                count, pause_s = self._tries.in_vain(name)
                if count == 1:
                    self._say(
                        f"{name} is still lost ({why}); it is tried again in "
                        f"{human_duration(pause_s)}, and then less and less often"
                    )

    def _why_not(self, host: Host) -> str | None:
        """Why the host cannot be used; None where it can."""
        try:
            with connected([host], self._way) as connections:
                self._check(connections)
        except Exception as error:  # also of an answer that makes no sense: it is tried again
            return clean_text(str(error) or type(error).__name__).partition("\n")[0]
        return None


@contextmanager
def tried_again(
    lost: Sequence[Host], way: Way, check: Callable[[Sequence[Connection]], object],
    say: Callable[[str], None], tries: Tries,
) -> Iterator[Returns]:  # fmt: skip
    """Lost hosts are tried again within this."""
    returns = Returns(lost, way, check, say, tries)
    try:
        yield returns
    finally:
        returns.close()
