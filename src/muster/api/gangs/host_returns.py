"""Hosts that a gang has lost, which are tried again until they can be used."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from muster.base.clock import human_duration
from muster.base.errors import SetupError
from muster.hosts.check import connected
from muster.hosts.connection import BACK_OFF_S, Connection, Way
from muster.hosts.names import Host

#: How long ranks must have worked before they are interrupted for a host that is back: what begins
#: has nothing to save yet.
SETTLED_S = 10.0
_LOOK_S = 0.2


class Returns:
    """Tries the lost hosts in a thread. ``check`` raises SetupError for a host that answers and
    still cannot be used."""

    def __init__(
        self, lost: Sequence[Host], way: Way, check: Callable[[Sequence[Connection]], object],
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._lost, self._way, self._check, self._say = lost, way, check, say
        self._is_over = threading.Event()
        self._back: tuple[str, ...] = ()
        self._settled_s = time.monotonic() + SETTLED_S
        self._thread = threading.Thread(target=self._try, name="muster-returns", daemon=True)
        self._thread.start()

    def names(self) -> tuple[str, ...]:
        """Those that can be used again; none before the others have had time to begin."""
        return self._back if time.monotonic() > self._settled_s else ()

    def close(self) -> None:
        self._is_over.set()
        self._way.circle.end()
        self._thread.join()

    def _try(self) -> None:
        count = {host.name: 0 for host in self._lost}
        due_s = dict.fromkeys(count, time.monotonic() + BACK_OFF_S[0])
        while not self._is_over.wait(_LOOK_S):
            for host in self._lost:
                name = host.name
                if name in self._back or time.monotonic() < due_s[name]:
                    continue
                why = self._why_not(host)
                if self._is_over.is_set():
                    return
                if why is None:
                    self._back += (name,)
                    continue
                count[name] += 1
                pause_s = BACK_OFF_S[min(count[name], len(BACK_OFF_S) - 1)]
                due_s[name] = time.monotonic() + pause_s
                if count[name] == 1:
                    self._say(
                        f"{name} is still lost ({why}); it is tried again in "
                        f"{human_duration(pause_s)}, and then less and less often"
                    )

    def _why_not(self, host: Host) -> str | None:
        """Why the host cannot be used; None where it can."""
        try:
            with connected([host], self._way) as connections:
                self._check(connections)
        except SetupError as error:
            return str(error).partition("\n")[0]
        return None


@contextmanager
def tried_again(
    lost: Sequence[Host], way: Way, check: Callable[[Sequence[Connection]], object],
    say: Callable[[str], None],
) -> Iterator[Returns]:  # fmt: skip
    """Lost hosts are tried again within this."""
    returns = Returns(lost, way, check, say)
    try:
        yield returns
    finally:
        returns.close()
