"""The task ``ppo``: any Gymnasium environment with a vector of numbers to observe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from muster.agents import (
    AgentTask,
    EnvSpec,
    Place,
    Policy,
    RecurrentPolicy,
    Split,
    VectorEnv,
    make_gymnasium,
    play,
    summary,
)
from muster_recipes.ppo.config import AGENT, PpoRecipeConfig, parse_env_kwargs

#: Episodes over which a claim such as "solves CartPole-v1" is usually made.
_FINAL_EPISODES = 100


class PpoTask(AgentTask):
    """Maximise the return of ``config.env``. The splits differ in their seeds only."""

    defaults: ClassVar[Mapping[str, Any]] = AGENT.defaults

    def __init__(self, config: PpoRecipeConfig) -> None:
        self.config = config

    def environments(self, split: Split, place: Place) -> VectorEnv:
        return self._make(place, self.config.vectorization)

    def policy(self, spec: EnvSpec) -> Policy:
        return RecurrentPolicy(spec, memory=self.config.memory, hidden=self.config.hidden)

    def remarks(self) -> list[str]:
        if self.config.vectorization != "native":
            return []
        return [
            "note       native vector environments cannot be put back where they were: after a "
            "resume every environment begins a new episode"
        ]

    def finish(
        self, policy: Policy, device: torch.device, seed: int, folder: Path
    ) -> Mapping[str, Any]:
        """Play 100 episodes with the likeliest actions and 100 with sampled ones.

        Both begin in the same initial states.
        """
        if self.rehearsing:  # the environments have been tried; an episode may take long
            return {"env": self.config.env}
        return {
            "env": self.config.env,
            "deterministic": self._evaluate(policy, device, seed, deterministic=True),
            "stochastic": self._evaluate(policy, device, seed, deterministic=False),
        }

    def _evaluate(
        self, policy: Policy, device: torch.device, seed: int, *, deterministic: bool
    ) -> dict[str, Any]:
        place = Place(num_envs=_FINAL_EPISODES, first_env=0, seed=seed, device=device)
        # One after another: a process for each of so many would only slow the others.
        native = self.config.vectorization == "native"
        env = self._make(place, "native" if native else "sync")
        try:
            return summary(
                play(
                    policy,
                    env,
                    deterministic=deterministic,
                    seed=seed,
                    num_episodes=_FINAL_EPISODES,
                    device=device,
                )
            )
        finally:
            env.close()

    def _make(self, place: Place, how: Literal["sync", "async", "native"]) -> VectorEnv:
        return make_gymnasium(
            self.config.env,
            place,
            vectorization=how,
            observe=self.config.observe,
            env_kwargs=parse_env_kwargs(self.config.env_kwargs),
        )
