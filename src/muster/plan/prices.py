"""What time and electricity cost, from a file that the user edits: prices.toml.

Prices change monthly and differ by a factor of three between providers, so those that come with
muster are a starting point and are shown as assumed, also in a file of the user's until their
source no longer says "edit me"; the others in such a file are given.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.base.atomic_files import explain_os_error
from muster.base.errors import SetupError, UsageError
from muster.plan.units import Figure, Joules, Money, Origin, Seconds, derived

FILE_NAME = "prices.toml"
#: How the source of a price ends that the user has not edited.
_UNTOUCHED = "edit me"
#: Written by ``muster plan --write-prices`` as it stands here.
DEFAULT_PRICES = """\
# Prices for `muster plan`. Edit me: these are examples with their sources, not quotes.
# Every price needs a date and a source. A card without a price gets no cost in a plan.

currency = "USD"

[electricity]           # for cards that you own: owned = true below, or --owned
per_kwh = 0.17
date = "2025-12-01"
source = "assumed: about what US households paid in 2025 (EIA Electric Power Monthly); edit me"

[[card]]
name = "A100 80GB SXM"  # as in the table of cards; part of the name is enough
per_hour = 1.30
date = "2026-05-01"
source = "middle of 1.10-1.50, on demand, https://www.mercatus-ai.com/blog/cloud-gpu-pricing; edit me"

[[card]]
name = "H100 SXM"
per_hour = 3.00
date = "2026-05-01"
source = "middle of 2.50-3.50, on demand, https://www.mercatus-ai.com/blog/cloud-gpu-pricing; edit me"

[[card]]
name = "H200 SXM"
per_hour = 4.00
date = "2026-05-01"
source = "middle of 3.50-4.50, on demand, https://www.mercatus-ai.com/blog/cloud-gpu-pricing; edit me"

# [[card]]
# name = "RTX 4090"
# owned = true          # costs its electricity only
# date = "2026-01-31"
# source = "under my desk"
"""  # noqa: E501


@dataclass(frozen=True, kw_only=True)
class Price:
    """The price of one device: rent per hour, or electricity per kWh for one that is owned."""

    currency: str
    per_hour: float | None
    per_kwh: float | None
    origin: Origin
    source: str

    def of(
        self, num_devices: int, wall: Figure[Seconds], energy: Figure[Joules] | None
    ) -> Figure[Money] | None:
        """What ``num_devices`` cost for ``wall``; None for an owned device of unknown power."""
        mine = Figure(value=0.0, origin=self.origin)
        if self.per_hour is not None:
            amount = self.per_hour * wall.value.hours * num_devices
            return derived(Money(amount, self.currency), mine, wall)
        if self.per_kwh is None or energy is None:
            return None
        amount = self.per_kwh * energy.value.kilowatt_hours
        return derived(Money(amount, self.currency), mine, energy)

    def __str__(self) -> str:
        if self.per_hour is not None:
            return f"{self.per_hour:g} {self.currency}/h"
        return f"{self.per_kwh:g} {self.currency}/kWh"


@dataclass(frozen=True, kw_only=True)
class PriceList:
    """``cards``: name → (per hour, None for an owned one; source). Names are parts of names."""

    currency: str
    per_kwh: float | None
    per_kwh_source: str
    cards: Mapping[str, tuple[float | None, str]]
    origin: Origin

    def price(self, card: str, *, is_owned: bool) -> Price | None:
        """The price of a card by its name, None where the list has none."""
        named = self.cards.get(card)
        if named is None:
            parts = [v for name, v in self.cards.items() if _is_in(name, card)]
            named = parts[0] if parts else None
        if is_owned or (named is not None and named[0] is None):
            if self.per_kwh is None:
                return None
            return self._priced(None, self.per_kwh, self.per_kwh_source)
        if named is None:
            return None
        return self._priced(named[0], None, named[1])

    def _priced(self, per_hour: float | None, per_kwh: float | None, source: str) -> Price:
        return Price(
            currency=self.currency,
            per_hour=per_hour,
            per_kwh=per_kwh,
            origin="assumed" if source.endswith(_UNTOUCHED) else self.origin,
            source=source,
        )


def read_prices(path: Path | None) -> PriceList:
    """The prices in ``path``; without one, prices.toml here, or else those that muster has.

    Raises SetupError for a file that is missing and UsageError for one that makes no sense.
    """
    if path is None and not Path(FILE_NAME).is_file():
        return parse_prices(DEFAULT_PRICES, "muster's own list", "assumed")
    place = path or Path(FILE_NAME)
    try:
        text = place.read_text(encoding="utf-8")
    except OSError as error:
        raise SetupError(
            f"Cannot read the prices in {place}: {error.strerror or error}.",
            hint="`muster plan --write-prices` writes a file to start from.",
        ) from None
    return parse_prices(text, str(place), "given")


def parse_prices(text: str, where: str, origin: Origin) -> PriceList:
    """The prices in ``text``; ``where`` names it in the UsageError."""
    try:
        record = tomllib.loads(text)
        return _price_list(record, where, origin)
    except (tomllib.TOMLDecodeError, _WrongPriceError) as error:
        raise UsageError(
            f"The prices in {where} cannot be used: {error}.",
            hint="`muster plan --write-prices` writes a file that shows how they are written.",
        ) from None


def write_prices(path: Path) -> None:
    """Write the list to start from; UsageError where there is a file already."""
    if path.exists():
        raise UsageError(
            f"{path} exists already and may hold your prices; nothing was written.",
            hint="move it away first, or write to another file: --prices FILE --write-prices.",
        )
    try:
        path.write_text(DEFAULT_PRICES, encoding="utf-8")
    except OSError as error:
        other = "name another file with --prices"
        raise explain_os_error(error, "write", path, other=other) from None


class _WrongPriceError(ValueError):
    """Where in the file something is wrong, and what."""


def _is_in(name: str, card: str) -> bool:
    """Whether the words of ``name`` are whole words of ``card``: L4 is not in L40S."""
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", card, re.I) is not None


def _price_list(record: Mapping[str, Any], where: str, origin: Origin) -> PriceList:
    _refuse_unknown(record, {"currency", "electricity", "card"}, "the file")
    electricity = record.get("electricity", {})
    _refuse_unknown(electricity, {"per_kwh", "date", "source"}, "[electricity]")
    cards: dict[str, tuple[float | None, str]] = {}
    for number, card in enumerate(record.get("card", []), start=1):
        place = f"[[card]] {number}"
        _refuse_unknown(card, {"name", "per_hour", "owned", "date", "source"}, place)
        if not isinstance(card.get("name"), str) or not card["name"]:
            raise _WrongPriceError(f"{place} has no name")
        place = f"{place} ({card['name']})"
        is_owned = card.get("owned") is True
        if is_owned == ("per_hour" in card):
            raise _WrongPriceError(f"{place} needs either per_hour or owned = true")
        per_hour = None if is_owned else _amount(card, "per_hour", place)
        cards[card["name"]] = (per_hour, _source(card, place, where))
    has_power = "per_kwh" in electricity
    return PriceList(
        currency=str(record.get("currency", "USD")),
        per_kwh=_amount(electricity, "per_kwh", "[electricity]") if has_power else None,
        per_kwh_source=_source(electricity, "[electricity]", where) if has_power else "",
        cards=cards,
        origin=origin,
    )


def _amount(record: Mapping[str, Any], key: str, place: str) -> float:
    value = record[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise _WrongPriceError(f"{key} of {place} is {value!r}, which is not an amount of money")
    return float(value)


def _source(record: Mapping[str, Any], place: str, where: str) -> str:
    for key in ("date", "source"):
        if not record.get(key):
            raise _WrongPriceError(f"{place} has no {key}; without it a price soon means nothing")
    return f"{where}, {record['date']}: {record['source']}"


def _refuse_unknown(record: Any, known: set[str], place: str) -> None:
    if not isinstance(record, dict):
        raise _WrongPriceError(f"{place} is not a table")
    for key in record:
        if key not in known:
            raise _WrongPriceError(f"{place} has the unknown key {key!r}")
