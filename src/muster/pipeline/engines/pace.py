"""How fast requests may go out, and when a failed one goes again. The clock is the caller's."""

from __future__ import annotations

import email.utils
from dataclasses import dataclass

_FIRST_S = 0.5
_LONGEST_S = 30.0
#: A burst may be so many seconds' worth, on top of the rate.
_BURST_S = 1.0


@dataclass
class Bucket:
    """At most ``per_minute`` units in any minute, and a burst of one second's worth (or of one
    unit) more. 0 is no limit.

    Units that are more than a burst are waited for as a whole before they go.
    """

    per_minute: float
    _ready_s: float = 0.0

    def take(self, units: float, now_s: float) -> float:
        """Book ``units``; returns the seconds to wait before they may be used."""
        if not self.per_minute:
            return 0.0
        unit_s = 60.0 / self.per_minute
        self._ready_s = max(self._ready_s, now_s - max(_BURST_S, unit_s))
        wait_s = max(0.0, self._ready_s + units * unit_s - now_s)
        self._ready_s += units * unit_s
        return wait_s

    def correct(self, units: float) -> None:
        """So many units more (or, negative, fewer) were used than booked."""
        if self.per_minute:
            self._ready_s += units * 60.0 / self.per_minute


def back_off_s(failures: int, chance: float, asked_s: float | None) -> float:
    """The wait after so many failures in a row, 1 or more. ``chance``: from 0 to 1, at random.

    Doubles from half a second up to 30 s, of which a random half to all is taken, so that those
    who failed together do not come back together. Never shorter than the server has asked for.
    """
    longest_s = min(_LONGEST_S, _FIRST_S * 2.0 ** min(failures - 1, 10))
    own_s = longest_s * (0.5 + 0.5 * chance)
    if asked_s is None:
        return own_s
    return asked_s + min(1.0, 0.1 * asked_s) * chance


def retry_after_s(header: str | None, now_s: float) -> float | None:
    """Seconds of a Retry-After header, which holds seconds or a date (RFC 9110, 10.2.3).

    ``now_s``: seconds since 1970. None where there is none, or nothing that can be read.
    """
    if header is None:
        return None
    text = header.strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - now_s
        except (ValueError, TypeError):
            return None
    return max(0.0, seconds) if seconds == seconds else None
