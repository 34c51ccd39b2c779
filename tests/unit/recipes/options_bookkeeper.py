"""A slow book-keeper of one account: plain Python, written from the recipe's text alone.

It shares no code with the environment: strategies, prices, costs and sizes are written again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from muster_recipes.clstm_ppo.market import Market

Leg = tuple[str, int, float]  # "call" or "put", signed ratio, strike / price at opening


def strategy(space: str, action: int) -> tuple[list[Leg], float | None, int, float]:
    """Legs, days (None: configured), shares per contract, share of the value at risk."""
    if space == "31":
        if action <= 10:
            return [("call", 1, 1 + (action - 1) / 100)], None, 0, 0.03
        return [("put", 1, 1 - (action - 11) / 100)], None, 0, 0.03
    days = [7.0, 14.0, 21.0, 28.0, 35.0]
    if action <= 60:
        group, place = divmod(action - 1, 15)
        strike = 1 + (place - 7) / 100
        legs: list[Leg] = [("put" if group in (1, 3) else "call", 1 if group < 2 else -1, strike)]
        return legs, None, 100 if group == 2 else 0, 0.03 if group < 2 else 0.10
    group, place = divmod(action - 61, 5)
    w = (place + 3) / 100
    both: dict[int, list[Leg]] = {
        0: [("call", 1, 1), ("call", -1, 1 + w)],
        1: [("put", 1, 1), ("put", -1, 1 - w)],
        2: [("call", 1, 1), ("put", 1, 1)],
        3: [("call", 1, 1.03), ("put", 1, 0.97)],
        4: [("put", 1, 1 - 2 * w), ("put", -1, 1 - w), ("call", -1, 1 + w), ("call", 1, 1 + 2 * w)],
        5: [("call", 1, 1 - w), ("call", -2, 1), ("call", 1, 1 + w)],
    }
    return both[group], days[place] if group in (2, 3) else None, 0, 0.03


def option_price(
    kind: str, spot: float, strike: float, years: float, level: float, skew: float
) -> float:
    """Black and Scholes at 5 %."""
    if years <= 0:
        return max(spot - strike, 0.0) if kind == "call" else max(strike - spot, 0.0)
    volatility = level + skew * math.log(strike / spot) ** 2
    d1 = (math.log(spot / strike) + (0.05 + volatility**2 / 2) * years) / (
        volatility * math.sqrt(years)
    )
    d2 = d1 - volatility * math.sqrt(years)

    def cdf(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    discounted = strike * math.exp(-0.05 * years)
    if kind == "call":
        return spot * cdf(d1) - discounted * cdf(d2)
    return discounted * cdf(-d2) - spot * cdf(-d1)


def slip(order: float, volume: float) -> float | None:
    share = order / volume
    for below, rate in ((0.01, 0.001), (0.05, 0.005), (0.10, 0.01), (0.20, 0.02)):
        if share < below:
            return rate
    return None


@dataclass
class Position:
    legs: list[Leg]
    shares: int
    contracts: float
    spot: float
    expiry_s: float
    owed: float


@dataclass
class Bookkeeper:
    market: Market
    space: str
    bar: int
    cash: float
    skew: float = 1.0
    expiry_days: float = 30.0
    with_costs: bool = True
    slots: list[Position | None] = field(default_factory=lambda: [None] * 10)
    costs_paid: float = 0.0

    def now(self) -> tuple[float, float, float, float]:
        m, t = self.market, self.bar
        return float(m.close[t]), float(m.volatility[t]), float(m.volume[t]), float(m.time[t])

    def mid(self, leg: Leg, opened: float, expiry_s: float) -> float:
        spot, level, _, time_s = self.now()
        years = (expiry_s - time_s) / (365 * 86_400)
        return option_price(leg[0], spot, opened * leg[2], years, level, self.skew)

    def marked(self, p: Position) -> float:
        legs = sum(leg[1] * 100 * self.mid(leg, p.spot, p.expiry_s) for leg in p.legs)
        return p.contracts * (legs + p.shares * self.now()[0])

    def value(self) -> float:
        return self.cash + sum(self.marked(p) for p in self.slots if p is not None)

    def trade_cost(self, p: Position, side: int) -> float | None:
        """Of trading all legs; side 1 opens, -1 closes. None: too large for the volume."""
        spot, _, volume, _ = self.now()
        series = volume * 0.05 / 100
        rate = slip(p.contracts * max(abs(leg[1]) for leg in p.legs), series)
        if rate is None:
            return None
        total = 0.0
        for leg in p.legs:
            mid = self.mid(leg, p.spot, p.expiry_s)
            half = (0.02 + 0.03 * abs(1 - p.spot * leg[2] / spot)) / 2
            contracts = p.contracts * abs(leg[1])
            total += contracts * (100 * mid * (half + rate) + 0.65 + 0.04)
            if leg[1] * side < 0:
                received = contracts * 100 * mid * (1 - half - rate)
                total += received * 0.00278 / 1000 + contracts * 100 * 0.000166
        if p.shares and side > 0:
            shares = p.contracts * p.shares
            total += shares * spot * (slip(shares, volume) or 0.02)
        return total if self.with_costs else 0.0

    def open(self, action: int) -> bool:
        spot, _, volume, time_s = self.now()
        legs, days, shares, at_risk = strategy(self.space, action)
        expiry_s = time_s + (self.expiry_days if days is None else days) * 86_400

        def least(at: float) -> float:
            paid = sum(
                ratio * max(at - k if kind == "call" else k - at, 0.0) for kind, ratio, k in legs
            )
            return paid + shares / 100 * at

        # No formula: the payoff is tried at every whole percent, where all strikes are.
        owed = max(0.0, *(-least(i / 100) for i in range(301)))
        unit = Position(legs, shares, 1.0, spot, expiry_s, 0.0)
        price = self.marked(unit)
        largest = max(abs(ratio) for _, ratio, _ in legs)
        wanted = min(
            at_risk * self.value() / max(price + 100 * spot * owed, 1.0),
            0.04 * (volume * 0.05 / 100) / largest,
        )
        free_cash = self.cash - sum(q.owed for q in self.slots if q is not None)
        free_slots = [i for i, q in enumerate(self.slots) if q is None]
        p = Position(legs, shares, max(1.0, math.floor(wanted)), spot, expiry_s, 0.0)
        # What one contract of this size costs bounds how many can be paid for.
        cost = self.trade_cost(p, 1)
        if cost is None or not free_slots:
            return False
        each = price + 100 * spot * owed + cost / p.contracts
        p.contracts = max(1.0, min(p.contracts, math.floor(free_cash / max(each, 1e-9))))
        p.owed = p.contracts * 100 * spot * owed
        cost = self.trade_cost(p, 1)
        if cost is None or p.contracts * price + cost + p.owed > free_cash:
            return False
        self.cash -= p.contracts * price + cost
        self.costs_paid += cost
        self.slots[free_slots[0]] = p
        return True

    def close(self, slot: int) -> bool:
        p = self.slots[slot]
        cost = None if p is None else self.trade_cost(p, -1)
        if p is None or cost is None or self.cash + self.marked(p) - cost < 0:
            return False
        self.cash += self.marked(p) - cost
        self.costs_paid += cost
        self.slots[slot] = None
        return True

    def act(self, action: int) -> bool:
        """False: not possible, nothing is done."""
        if action == 0:
            return True
        if self.space == "31" and action > 20:
            return self.close(action - 21)
        return self.open(action)

    def next_bar(self) -> None:
        self.bar += 1
        spot, _, volume, time_s = self.now()
        for i, p in enumerate(self.slots):
            if p is None or time_s < p.expiry_s:
                continue
            self.cash += self.marked(p)
            if p.shares and self.with_costs:
                shares = p.contracts * p.shares
                slipped = shares * spot * (slip(shares, volume) or 0.02)
                fees = (shares * spot - slipped) * 0.00278 / 1000 + shares * 0.000166
                self.cash -= slipped + fees
                self.costs_paid += slipped + fees
            self.slots[i] = None
