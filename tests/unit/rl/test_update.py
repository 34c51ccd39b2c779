"""One update of an agent, in this process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.unit.rl.toy_agents import CartPoleAgent

from muster.rank.process_group import joined
from muster.rank.state import Start
from muster.rl.config import PpoConfig
from muster.rl.losses import gae, squared_deviations
from muster.rl.rollout import Rollout, collect
from muster.rl.setup import AgentRun, prepare
from muster.rl.update import Experience, agree, update
from muster.run.folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> Iterator[AgentRun]:
    folder = RunFolder(tmp_path)
    folder.create()
    with joined(None, slot="cpu") as gang:
        start = Start(
            gang=gang, folder=folder, say=lambda line: None, code={}, allow_changed_code=False
        )
        config = PpoConfig.of(CartPoleAgent.defaults)
        run = prepare(CartPoleAgent(wide=False), config, start)
        yield run
        run.env.close()


def collected(run: AgentRun) -> Rollout:
    return collect(run.env, run.actor, run.carry, run.place, run.config.rollout_steps, run.clock)


def test_the_spread_of_the_advantages_keeps_its_digits(run: AgentRun) -> None:
    rollout = collected(run)
    returns = gae(
        rollout.rewards, rollout.values, rollout.bootstrap, rollout.last_value,
        rollout.terminated, rollout.truncated, rollout.valid, gamma=0.99, gae_lambda=0.95,
    )  # fmt: skip
    agreed = agree(run, rollout, returns, stop=False, save=False)
    exact = squared_deviations(returns.advantages, rollout.valid, agreed.advantage_sums)
    assert agreed.advantage_squares.dtype == torch.float64
    assert float(agreed.advantage_squares) == float(exact)


def test_a_step_that_overflows_in_fp16_is_left_out_of_the_norm(run: AgentRun) -> None:
    """Its norm is no number, and neither was the mean with it."""
    run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-120)
    rollout = collected(run)
    targets = rollout.values + 1e6  # times the scale more than float32 holds
    before = [each.clone() for each in run.replica.parameters]
    learned = update(run, Experience(rollout, rollout.values, targets), 0.0)
    assert learned.minibatches == 4
    assert math.isfinite(learned.grad_norm) and learned.grad_norm > 0
    changed = zip(before, run.replica.parameters, strict=True)
    assert any(not torch.equal(old, new) for old, new in changed)
