"""What an agent can do in the options market: the two action spaces, as one table.

How the specification is read where it leaves a choice:

- A strategy is opened as a whole into one slot and ends as a whole. All its legs share one expiry.
- The 91 actions of the specification have no "close" among them, so in that space a position ends
  at its expiry and not before. The 31 actions close slots at will.
- A covered call buys its shares when it is opened and sells them when the call expires. Shares
  are held by positions only, so they are never held already.
- A cash-secured put, a condor's wings and every other short leg lock up cash: the most that the
  options could owe at expiry (``most_owed``). No short leg is ever uncovered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NUM_SLOTS = 10
SHARES_PER_CONTRACT = 100
#: Share of the portfolio's value that one position may lose at most, if all goes wrong.
AT_RISK = 0.03
#: The same for positions that are secured by whole shares or their price.
AT_RISK_SECURED = 0.10


@dataclass(frozen=True, kw_only=True)
class Leg:
    """``ratio`` options per contract of the strategy: bought where positive, sold where negative.

    ``strike``: a multiple of the underlying's price at the opening.
    """

    option: Literal["call", "put"]
    ratio: int
    strike: float


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """The position that one action opens.

    ``days``: calendar days to expiry; None: as configured (``--expiry-days``). ``shares``: of the
    underlying, bought per contract. ``at_risk``: share of the portfolio's value that sizes it.
    """

    family: str
    legs: tuple[Leg, ...]
    days: float | None = None
    shares: int = 0
    at_risk: float = AT_RISK


@dataclass(frozen=True, kw_only=True)
class ActionSpace:
    """The actions an agent has. Action 0 holds; actions 1 to ``len(strategies)`` open a strategy;
    then ``num_closing`` actions close slot 0, 1, …

    ``families``: the kinds of strategies, in the order of the observation's one-hot.
    """

    strategies: tuple[Strategy, ...]
    num_closing: int

    @property
    def num_actions(self) -> int:
        return 1 + len(self.strategies) + self.num_closing

    @property
    def families(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(strategy.family for strategy in self.strategies))

    @property
    def max_legs(self) -> int:
        return max(len(strategy.legs) for strategy in self.strategies)


# The table. Percentages of the underlying's price at the opening.

_UP = range(10)
_AROUND = range(-7, 8)
_WIDTHS = (3, 4, 5, 6, 7)
_DAYS = (7, 14, 21, 28, 35)
_STRANGLE = 3


def _at(percent: int) -> float:
    return (100 + percent) / 100


def _call(percent: int, ratio: int = 1) -> Leg:
    return Leg(option="call", ratio=ratio, strike=_at(percent))


def _put(percent: int, ratio: int = 1) -> Leg:
    return Leg(option="put", ratio=ratio, strike=_at(percent))


def _of(family: str, *legs: Leg, days: float | None = None) -> Strategy:
    return Strategy(family=family, legs=legs, days=days)


def _covered_call(percent: int) -> Strategy:
    legs = (_call(percent, -1),)
    return Strategy(
        family="covered call", legs=legs, shares=SHARES_PER_CONTRACT, at_risk=AT_RISK_SECURED
    )


def _secured_put(percent: int) -> Strategy:
    legs = (_put(percent, -1),)
    return Strategy(family="cash-secured put", legs=legs, at_risk=AT_RISK_SECURED)


def _condor(width: int) -> Strategy:
    """Sold ``width`` percent away on both sides, bought twice as far away."""
    legs = (_put(-2 * width), _put(-width, -1), _call(width, -1), _call(2 * width))
    return _of("iron condor", *legs)


def _butterfly(width: int) -> Strategy:
    return _of("butterfly", _call(-width), _call(0, -2), _call(width))


_SMALL = (
    *(_of("call", _call(m)) for m in _UP),
    *(_of("put", _put(-m)) for m in _UP),
)
_LARGE = (
    *(_of("call", _call(m)) for m in _AROUND),
    *(_of("put", _put(m)) for m in _AROUND),
    *(_covered_call(m) for m in _AROUND),
    *(_secured_put(m) for m in _AROUND),
    *(_of("bull call spread", _call(0), _call(w, -1)) for w in _WIDTHS),
    *(_of("bear put spread", _put(0), _put(-w, -1)) for w in _WIDTHS),
    *(_of("straddle", _call(0), _put(0), days=days) for days in _DAYS),
    *(_of("strangle", _call(_STRANGLE), _put(-_STRANGLE), days=days) for days in _DAYS),
    *(_condor(w) for w in _WIDTHS),
    *(_butterfly(w) for w in _WIDTHS),
)
_SPACES = {
    "31": ActionSpace(strategies=_SMALL, num_closing=NUM_SLOTS),
    "91": ActionSpace(strategies=_LARGE, num_closing=0),
}


def action_space(name: Literal["31", "91"]) -> ActionSpace:
    return _SPACES[name]


def payoff(strategy: Strategy, spot: float) -> float:
    """What one contract's options pay at expiry: per share, in units of the opening price."""
    return sum(
        leg.ratio * max(0.0, spot - leg.strike if leg.option == "call" else leg.strike - spot)
        for leg in strategy.legs
    )


def most_owed(strategy: Strategy) -> float:
    """The most that one contract can owe at expiry, net of its own shares and bought legs: per
    share, in units of the opening price; 0 where it can only pay out.

    A payoff is piecewise linear in the price, so that its least value lies at 0, at a strike, or
    is not bounded: then the strategy is not allowed (ValueError).
    """
    held = strategy.shares / SHARES_PER_CONTRACT
    calls = sum(leg.ratio for leg in strategy.legs if leg.option == "call")
    if calls + held < 0:
        raise ValueError(f"{strategy.family}: a short call without cover can lose without bound.")
    corners = [0.0, *(leg.strike for leg in strategy.legs)]
    return max(0.0, *(-payoff(strategy, spot) - held * spot for spot in corners))


def described(name: Literal["31", "91"]) -> list[str]:
    """One line per action, for the documentation: ``76  strangle  +1 call 103 %, +1 put 97 %``."""
    space = action_space(name)
    lines = ["0  hold"]
    for number, strategy in enumerate(space.strategies, start=1):
        legs = [f"{leg.ratio:+d} {leg.option} {leg.strike:.0%}" for leg in strategy.legs]
        if strategy.shares:
            legs.insert(0, f"+{strategy.shares} shares")
        days = "" if strategy.days is None else f", {strategy.days:g} days"
        lines.append(f"{number}  {strategy.family}  {', '.join(legs)}{days}")
    first = len(space.strategies) + 1
    lines += [f"{first + slot}  close slot {slot}" for slot in range(space.num_closing)]
    return lines
