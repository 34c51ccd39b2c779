"""What people see of a map: records, where the farm counts chunks, and what it has cost."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from muster.devices.inventory import Inventory
from muster.devices.placement import Placement
from muster.farm.view import Interval, Rate, RunView
from muster.plan.prices import PriceList
from muster.plan.units import Figure, Seconds


@dataclass
class RecordCount:
    """Turns a view of chunks into a view of records. ``before``: rows done by earlier starts."""

    total: int
    before: int = 0
    rejected_before: int = 0
    last: RunView | None = None
    _rate: Rate = field(default_factory=Rate)
    _tokens: Rate = field(default_factory=Rate)

    def of(self, view: RunView) -> RunView:
        numbers = view.numbers
        now = time.monotonic()
        done = min(self.total, self.before + int(numbers.get("records", 0)))
        rejected = self.rejected_before + int(numbers.get("rejected", 0))
        tokens = int(numbers.get("tokens", 0))
        self._rate.add(now, done)
        self._tokens.add(now, tokens)
        rate = self._rate.per_second()
        left_s = (self.total - done) / rate if rate else None
        self.last = view._replace(
            name=view.name + self._beside(numbers.get("waited_s", 0.0), view, tokens),
            total=self.total,
            num_done=done - rejected,
            num_failed=rejected,
            rate=rate,
            eta=None if left_s is None else Interval(left_s, left_s),
        )
        return self.last

    def _beside(self, waited_s: float, view: RunView, tokens: int) -> str:
        """Tokens per second, and the share of time that workers wait for input."""
        parts = []
        rate = self._tokens.per_second()
        if tokens and rate:
            parts.append(f"{rate:,.0f} tokens/s")
        worked_s = waited_s + view.numbers.get("busy_s", 0.0)
        if worked_s > 1.0:
            parts.append(f"{100 * waited_s / worked_s:.0f} % waiting for input")
        return "".join(f" · {part}" for part in parts)


def cost_line(
    placement: Placement, inventory: Inventory, seconds: float, prices: PriceList
) -> str | None:
    """What ``seconds`` on these devices cost, with the prices and their origin, in a sentence.

    None where no card has a price. Cards of one's own are left out: they cost their electricity,
    and their power over the run is not known here.
    """
    used = {uuid for slot in placement.slots for uuid in slot.device_uuids}
    cards = Counter(device.name for device in inventory.devices if device.uuid in used)
    wall = Figure(value=Seconds(seconds), origin="measured")
    total, said, currency = 0.0, [], ""
    for card, count in cards.items():
        price = prices.price(card, is_owned=False)
        money = None if price is None else price.of(count, wall, None)
        if price is None or money is None:
            continue
        total, currency = total + money.value.value, money.value.currency
        said.append(f"{count} × {card} at {price} ({price.origin}: {price.source})")
    if not said:
        return None
    return f"cost: {total:.2f} {currency} for {'; '.join(said)}"
