"""Baselines that an agent has to beat: players that learn nothing, on the same episodes.

- hold: no trade at all.
- buy_stock: the underlying itself for the whole capital, straight from the closing prices and
  without costs.
- buy_and_hold: one call at the money, and a new one whenever it has ended: the underlying's
  upside as far as the action space allows, which has no shares. Sized as every position is.
- always_sell: against the underlying as far as the action space allows: one put at the money,
  and a new one whenever it has ended.
- random: every legal action with the same probability.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from muster.agents import ACTION_MASK, Episodes, Observation, streams
from muster_recipes.clstm_ppo.actions import ActionSpace
from muster_recipes.clstm_ppo.market import Market
from muster_recipes.clstm_ppo.portfolio import portfolio_names

#: (observation, number of the step) -> actions.
Rule = Callable[[Observation, int], Tensor]


def baselines(
    space: ActionSpace, num_envs: int, seed: int, device: torch.device
) -> dict[str, Rule]:
    """The baselines that play in the environment, by name; environments are on ``device``."""
    return {
        "hold": lambda observation, _: torch.zeros_like(observation["bar"]),
        "buy_and_hold": _rolling(space, at_the_money(space, "call"), device),
        "always_sell": _rolling(space, at_the_money(space, "put"), device),
        "random": _random(space, num_envs, seed, device),
    }


def at_the_money(space: ActionSpace, option: str) -> int:
    """The action that buys this single option at the strike nearest to the price."""
    distance = {
        action: abs(strategy.legs[0].strike - 1.0)
        for action, strategy in enumerate(space.strategies, start=1)
        if strategy.family == option
    }
    return min(distance, key=lambda action: distance[action])


def _rolling(space: ActionSpace, action: int, device: torch.device) -> Rule:
    """``action`` whenever no position is open and it is legal."""
    is_family = [" is " in name for name in portfolio_names(space)]
    columns = torch.tensor(is_family, device=device).nonzero().squeeze(1)

    def rule(observation: Observation, _: int) -> Tensor:
        holds_nothing = (observation["portfolio"][:, columns] == 0).all(1)
        wanted = holds_nothing & observation[ACTION_MASK][:, action]
        return torch.where(wanted, action, 0)

    return rule


def _random(space: ActionSpace, num_envs: int, seed: int, device: torch.device) -> Rule:
    index = torch.arange(num_envs, device=device)

    def rule(observation: Observation, step: int) -> Tensor:
        # The legal action with the largest of independent uniform numbers.
        drawn = streams.uniform(seed, streams.EVALUATION, index, step, space.num_actions)
        return drawn.masked_fill(~observation[ACTION_MASK], -1.0).argmax(1)

    return rule


def stock_episodes(market: Market, bars: Tensor, num_steps: int) -> Episodes:
    """Buying the underlying at the close of ``bars`` [num_episodes], for ``num_steps`` bars.

    The figures are defined as the environment's are (``options_env.EXTRAS``).
    """
    steps = torch.arange(num_steps + 1).unsqueeze(1)
    close = market.close.cpu()[bars.cpu() + steps]
    value = close / close[0]
    returns = value[-1] - 1
    change = value[1:] / value[:-1] - 1
    deviation = change.std(0, correction=0).clamp(min=1e-12)
    return Episodes(
        index=torch.arange(len(bars)),
        returns=returns,
        lengths=torch.full((len(bars),), num_steps),
        terminated=torch.zeros(len(bars), dtype=torch.bool),
        extras={
            "final_return": returns,
            "max_drawdown": (1 - value / value.cummax(0).values).max(0).values,
            "sharpe": change.mean(0) / deviation * market.bars_per_year**0.5,
            "trades": torch.ones_like(returns),
            "win_rate": (returns > 0).double(),
            "costs": torch.zeros_like(returns),
        },
        rewards=value.diff(dim=0),
        first={"bar": bars},
    )
