"""What the devices of a run have cost, where their price is known."""

from __future__ import annotations

from collections import Counter

from muster.devices.model import Inventory
from muster.devices.placement import Placement
from muster.plan.origin import Figure
from muster.plan.prices import PriceList
from muster.plan.units import Seconds


def cost_line(
    placement: Placement, inventory: Inventory, seconds: float, prices: PriceList
) -> str | None:
    """One sentence with the sum, the prices and their origin; None without a priced card.

    Owned cards cost their electricity, which needs their power over the run: they are left out.
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
