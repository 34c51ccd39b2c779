"""What the devices of a map cost, by the hours that they were used."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from muster.base.settings import Settings
from muster.devices.discovery import discover
from muster.devices.inventory import Inventory
from muster.devices.placement import Placement

if TYPE_CHECKING:
    from muster.plan.prices import PriceList


def cost_of(placement: Placement, settings: Settings, seconds: float) -> str | None:
    """What ``seconds`` on this machine's devices cost, in words; None where no card has a price."""
    if not any(slot.device_uuids for slot in placement.slots):
        return None
    from muster.plan.prices import read_prices

    return cost_line(placement, discover(settings), seconds, read_prices(None))


def cost_line(
    placement: Placement, inventory: Inventory, seconds: float, prices: PriceList
) -> str | None:
    """What ``seconds`` on these devices cost, with the prices and their origin, in a sentence.

    None where no card has a price. Cards of one's own are left out: they cost their electricity,
    and their power over the run is not known here.
    """
    from muster.plan.units import Figure, Seconds  # here: few maps have cards with a price

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
