"""Agents on a CUDA device: no wait per step, the same learning as on the CPU, graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.rl.batched_cartpole import BatchedCartPole
from tests.unit.rl.toy_agents import CartPoleAgent

from muster.rank.precision import Precision
from muster.rl.config import PpoConfig
from muster.rl.environment import Place
from muster.rl.loop import train_agent
from muster.rl.policy import RecurrentPolicy
from muster.rl.rollout import Actor
from muster.run.folder import RunFolder

FP32 = Precision(name="fp32", why="as given", device_type="cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def trained(folder: Path, **settings: Any) -> dict[str, Any]:
    place = RunFolder(folder)
    place.create()
    config = PpoConfig.of(CartPoleAgent.defaults, tensorboard=False, **settings)
    found = train_agent(CartPoleAgent(wide=False), config, place, None, lambda line: None)
    assert found is not None
    return found


@pytest.mark.parametrize("compiled", [False, True])
def test_an_agent_trains_on_the_device(tmp_path: Path, compiled: bool) -> None:
    found = trained(tmp_path, compile=compiled)
    assert found["device"] == "cuda" and found["updates"] == 6
    assert found["measured"]["steps_per_s"] > 0


def test_a_step_makes_the_host_wait_for_nothing() -> None:
    """torch itself complains about anything that would synchronise."""
    device = torch.device("cuda", 0)
    place = Place(num_envs=64, first_env=0, seed=1, device=device)
    env = BatchedCartPole(place)
    policy = RecurrentPolicy(env.spec, hidden=32).to(device).eval()
    actor = Actor(policy, env.spec, FP32)
    observation, state = env.reset(), policy.initial_state(64, device)
    starts = torch.ones(64, dtype=torch.bool, device=device)
    random = torch.rand(8, 64, 1, dtype=torch.float64, device=device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            for t in range(8):
                made = actor(observation, state, starts, random[t])
                outcome = env.step(made.actions)
                observation, state, starts = outcome.observation, made.state, outcome.starts
    finally:
        torch.cuda.set_sync_debug_mode("default")
