"""A Gymnasium environment whose episodes can be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from muster.rl.environment import Place
from muster.rl.gymnasium_envs import GymnasiumEnvs

CPU = torch.device("cpu")


def place_of(num_envs: int, first_env: int = 0, seed: int = 3) -> Place:
    return Place(num_envs=num_envs, first_env=first_env, seed=seed, device=CPU)


class Ladder(gymnasium.Env[Any, Any]):
    """Its own number of the episode decides how long one lasts; action 1 climbs, 0 stays.

    An observation is (episode, height, steps). It is terminated at height 2 + episode % 2 and
    truncated after 4 steps; when both happen, it says both.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Discrete(2)
    #: What step ``trouble_at`` of an episode does, if anything.
    trouble: Callable[[Ladder], Any] = staticmethod(lambda env: None)

    def __init__(self, trouble_at: int = -1) -> None:
        self.episode = -1
        self.trouble_at = trouble_at

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode += 1
        self.height = self.steps = 0
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.height += int(action)
        reward = float(action) + 0.5
        if self.steps == self.trouble_at:
            reward = self.trouble(self) or reward
        is_top = self.height >= 2 + self.episode % 2
        return self.seen(), reward, is_top, self.steps >= 4, {}

    def seen(self) -> Any:
        return np.array([self.episode, self.height, self.steps], np.float64)


def kind_of(name: str, **attributes: Any) -> type[Ladder]:
    return type(name, (Ladder,), attributes)


def of(kind: Callable[[], Any], num_envs: int = 2, mode: str = "Disabled") -> GymnasiumEnvs:
    envs = SyncVectorEnv([kind] * num_envs, autoreset_mode=AutoresetMode(mode))
    return GymnasiumEnvs.of(envs, place_of(num_envs))


def registered(monkeypatch: pytest.MonkeyPatch, kind: Any) -> str:
    """The id under which Gymnasium knows ``kind`` for one test."""
    env_id = f"muster-test/{kind.__name__}-v0"
    spec = gymnasium.envs.registration.EnvSpec(env_id, entry_point=kind)
    monkeypatch.setitem(gymnasium.registry, env_id, spec)
    return env_id
