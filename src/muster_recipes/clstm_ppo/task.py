"""The task ``clstm-ppo``: trade options so that the portfolio grows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch

from muster import plotting
from muster.agents import AgentTask, EnvSpec, Episodes, Place, Policy, Split, VectorEnv, play
from muster_recipes.clstm_ppo import comparison
from muster_recipes.clstm_ppo.actions import action_space
from muster_recipes.clstm_ppo.clusters import clusters_of
from muster_recipes.clstm_ppo.comparison import Rule, baselines, stock_episodes
from muster_recipes.clstm_ppo.config import AGENT, ClstmPpoConfig
from muster_recipes.clstm_ppo.exchange import Exchange
from muster_recipes.clstm_ppo.figure import draw
from muster_recipes.clstm_ppo.load import ESTIMATED, episode_bars_of, fingerprint, load_market
from muster_recipes.clstm_ppo.market import Market
from muster_recipes.clstm_ppo.network import CascadedPolicy
from muster_recipes.clstm_ppo.options_env import OptionsEnv

_FINAL_EPISODES = 128
_CAVEAT = (
    "Episodes of one symbol overlap in time, so all 95 % intervals are over clusters of episodes "
    "({num} here, by {by}), not over episodes; symbols that move together would make them longer."
)
_NOT_QUOTED = "Implied volatility is estimated, not quoted: what is earned from it is not real."
_UNKNOWN = (
    "Episodes of one symbol overlap in time, and all of these are one cluster: how far the means "
    "would vary is unknown, and so are all intervals. Use more symbols or a longer test split."
)


class ClstmPpoTask(AgentTask):
    """Maximise the portfolio's value.

    The best policy has the highest mean Sharpe ratio over the validation episodes. ``market``
    replaces the one that ``config`` names.
    """

    defaults: ClassVar[Mapping[str, Any]] = AGENT.defaults
    monitor: ClassVar[str] = "sharpe"
    judged_on: ClassVar[tuple[Split, ...]] = ("val",)

    def __init__(self, config: ClstmPpoConfig, market: Market | None = None) -> None:
        self.config = config
        self._given = market
        self._remarks: list[str] = []
        self._exchanges: dict[torch.device, Exchange] = {}

    @cached_property
    def market(self) -> Market:
        if self._given is not None:
            return self._given
        return load_market(self.config, self._remarks.append)

    def environments(self, split: Split, place: Place) -> VectorEnv:
        return OptionsEnv(self.market, split, self.config, place, self._exchange(place.device))

    def identity(self) -> dict[str, str]:
        """What a resumed run must find again beyond its settings: the data that were read."""
        found = fingerprint(self.market)
        return {"data": found} if found else {}

    def policy(self, spec: EnvSpec) -> Policy:
        return CascadedPolicy(
            spec, self.market, window=self.config.window, hidden=self.config.hidden
        )

    def remarks(self) -> list[str]:
        market = self.market
        bars = episode_bars_of(self.config, market.bars_per_year)
        starts = ", ".join(f"{split} {len(bars):,}" for split, bars in market.starts.items())
        costs = "on" if self.config.costs else "OFF: these are not trading results"
        return [
            *(f"market     {sentence}" for sentence in self._remarks),
            f"episodes   {bars} bars; possible starts: {starts}",
            f"costs      {costs}",
        ]

    def finish(
        self, policy: Policy, device: torch.device, seed: int, folder: Path
    ) -> Mapping[str, Any]:
        """Play the policy and the baselines on the same 128 episodes of the test split.

        Writes ``comparison.json``, ``comparison.csv`` and ``equity.png``.
        """
        if self.rehearsing:  # 7 players x 128 whole episodes
            return {}
        played = self._play_all(policy, device, seed)
        market = self.market
        bars = episode_bars_of(self.config, market.bars_per_year)
        clusters = clusters_of(market, played["agent"].first["bar"], bars)
        is_simulated = market.source == "simulated"
        caveat = _CAVEAT.format(num=clusters.num, by=clusters.by) if clusters.num > 1 else _UNKNOWN
        caveats = [caveat] if is_simulated else [caveat, f"{ESTIMATED[0].upper()}{ESTIMATED[1:]}."]
        result = {
            "market": market.source,
            "is_simulated": is_simulated,
            "split": "test",
            "episodes": _FINAL_EPISODES,
            "episode_bars": bars,
            "costs": self.config.costs,
            "clusters": clusters.num,
            "clusters_by": clusters.by,
            "caveats": caveats,
            **comparison.compare(played, clusters, seed),
        }
        comparison.write(folder, result)
        costs = "" if self.config.costs else ", NO COSTS"
        kind = "SIMULATED market" if is_simulated else f"market of {market.source}"
        title = f"Test split, {kind}: {_FINAL_EPISODES} episodes of {bars} bars{costs}"
        notes = "\n".join([caveat] if is_simulated else [caveat, _NOT_QUOTED])
        with plotting.or_remark(print):
            draw(played, clusters, title, notes, folder / "equity.png")
        agent = result["players"]["agent"]
        means = {name: each["middle"] for name, each in agent.items() if isinstance(each, dict)}
        return {**result, "metrics": {"test": means}}

    def _exchange(self, device: torch.device) -> Exchange:
        if device not in self._exchanges:
            self._exchanges[device] = Exchange.of(self.market, self.config, device)
        return self._exchanges[device]

    def _play_all(self, policy: Policy, device: torch.device, seed: int) -> dict[str, Episodes]:
        num = _FINAL_EPISODES
        place = Place(num_envs=num, first_env=0, seed=seed, device=device)

        def played(player: Policy | Rule, *, deterministic: bool = True) -> Episodes:
            return play(
                player,
                OptionsEnv(
                    self.market, "test", self.config, place, self._exchange(device), spread=True
                ),
                deterministic=deterministic,
                seed=seed,
                num_episodes=num,
                device=device,
            )

        rules = baselines(action_space(self.config.action_space), num, seed, device)
        found = {name: played(rule) for name, rule in rules.items()}
        hold = found["hold"]
        stock = stock_episodes(self.market, hold.first["bar"], len(hold.rewards))
        return {
            "agent": played(policy),
            "agent_sampled": played(policy, deterministic=False),
            "buy_stock": stock,
            **found,
        }
