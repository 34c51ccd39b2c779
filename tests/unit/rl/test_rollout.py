"""Collecting: what is kept of a truncated episode, and which seeds the splits have."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from tests.unit.rl.batched_cartpole import BatchedCartPole
from torch import Tensor

from muster.base.errors import UsageError
from muster.rank.precision import Precision
from muster.rank.process_group import joined
from muster.rl.config import PpoConfig
from muster.rl.environment import Change, EnvSpec, Outcome, Place
from muster.rl.policy import Policy, RecurrentPolicy
from muster.rl.rollout import Actor, Carry, Finals, PhaseClock, Rollout, collect
from muster.rl.setup import place_of

NUM_ENVS, STEPS, LIMIT = 6, 23, 7
CPU = torch.device("cpu")
FP32 = Precision(name="fp32", why="as given", device_type="cpu")


def place(seed: int = 3, first_env: int = 0, num_envs: int = NUM_ENVS) -> Place:
    return Place(num_envs=num_envs, first_env=first_env, seed=seed, device=CPU)


def policy_for(spec: EnvSpec) -> RecurrentPolicy:
    torch.manual_seed(0)
    made = RecurrentPolicy(spec, hidden=8, layers=(8,))
    for parameter in made.parameters():  # far from the first values, so that memories differ
        torch.nn.init.normal_(parameter, std=0.5)
    return made.eval()


def collected(
    policy: Policy, at: Place, num_steps: int = STEPS, kind: type[BatchedCartPole] = BatchedCartPole
) -> Rollout:
    env = kind(at, max_steps=LIMIT)
    actor = Actor(policy, env.spec, FP32)
    carry = Carry(
        observation=env.reset(),
        state=policy.initial_state(at.num_envs, CPU),
        starts=torch.ones(at.num_envs, dtype=torch.bool),
    )
    return collect(env, actor, carry, at, num_steps, PhaseClock(CPU))


def test_a_truncated_episode_is_valued_with_its_own_memory() -> None:
    """6: V(final observation) with the memory after the last step and before the reset, found by
    playing every environment alone, step by step."""
    policy = policy_for(BatchedCartPole(place()).spec)
    rollout = collected(policy, place())
    assert int(rollout.truncated.sum()) >= NUM_ENVS, "the test needs truncated episodes"
    expected = torch.zeros(STEPS, NUM_ENVS)
    for n in range(NUM_ENVS):
        env = BatchedCartPole(place(first_env=n, num_envs=1), max_steps=LIMIT)
        observation, starts = env.reset(), torch.ones(1, dtype=torch.bool)
        state = policy.initial_state(1, CPU)
        for t in range(STEPS):
            with torch.no_grad():
                output, state = policy.act(observation, state, starts)
                assert float(output.value) == pytest.approx(float(rollout.values[t, n]), abs=1e-5)
                outcome = env.step(rollout.actions[t, n : n + 1])
                if bool(outcome.truncated):
                    last, _ = policy.act(outcome.final, state, torch.zeros(1, dtype=torch.bool))
                    expected[t, n] = last.value
            observation, starts = outcome.observation, outcome.starts
    torch.testing.assert_close(rollout.bootstrap, expected, rtol=1e-5, atol=1e-5)
    assert rollout.bootstrap[rollout.truncated].abs().min() > 1e-3


class Rewarded(BatchedCartPole):
    """Other rewards in every step."""

    def advance(self, actions: Tensor) -> Change:
        change = super().advance(actions)
        return change._replace(reward=self.rows["state"].sum(1).to(torch.float32))


class Reusing(Rewarded):
    """Writes all that a step returns into the same tensors, and into the actions it was given."""

    kept: Outcome | None = None

    def step(self, actions: Tensor) -> Outcome:
        made = super().step(actions)
        actions.zero_()
        if self.kept is None:
            self.kept = made
            return made
        for buffer, new in zip(_tensors(self.kept), _tensors(made), strict=True):
            buffer.copy_(new)
        return self.kept


def _tensors(outcome: Outcome) -> list[Tensor]:
    parts = [part.values() if isinstance(part, dict) else [part] for part in outcome]
    return [value for part in parts for value in part]


def test_an_environment_may_use_its_buffers_again() -> None:
    policy = policy_for(Rewarded(place()).spec)
    expected, found = (collected(policy, place(), kind=kind) for kind in (Rewarded, Reusing))
    assert len(set(expected.rewards.flatten().tolist())) > STEPS
    torch.testing.assert_close(asdict(found), asdict(expected), rtol=0, atol=0)


def test_slots_keep_what_lists_keep() -> None:
    """A GPU's way, without a look at what has ended, and a CPU's."""
    spec = BatchedCartPole(place(), max_steps=LIMIT).spec
    policy = policy_for(spec)
    actor = Actor(policy, spec, FP32)
    starts = torch.zeros(NUM_ENVS, dtype=torch.bool)
    both = [Finals(spec, STEPS, starts, waits=waits) for waits in (True, False)]
    stream = torch.Generator().manual_seed(1)
    since = torch.randint(0, LIMIT, (NUM_ENVS,), generator=stream)
    for t in range(STEPS):
        truncated, since = since >= LIMIT - 1, (since + 1) % LIMIT
        final = {"observation": torch.randn(NUM_ENVS, 4, generator=stream)}
        state = {k: torch.randn_like(v) for k, v in policy.initial_state(NUM_ENVS, CPU).items()}
        for finals in both:
            finals.keep(t, truncated, final, state)
    with torch.no_grad():
        lists, slots = (finals.values(actor, torch.zeros(1)) for finals in both)
    assert int((lists != 0).sum()) >= 3 * NUM_ENVS - NUM_ENVS
    torch.testing.assert_close(slots, lists, rtol=0, atol=1e-6)


def test_more_truncations_than_announced_are_an_error() -> None:
    spec = BatchedCartPole(place(), max_steps=LIMIT).spec
    policy = policy_for(spec)
    actor = Actor(policy, spec, FP32)
    finals = Finals(spec, STEPS, torch.zeros(NUM_ENVS, dtype=torch.bool), waits=False)
    for t in range(STEPS):
        seen = {"observation": torch.zeros(NUM_ENVS, 4)}
        every_second = torch.full((NUM_ENVS,), t % 2 == 0)
        finals.keep(t, every_second, seen, policy.initial_state(NUM_ENVS, CPU))
    with pytest.raises(UsageError, match="min_truncation_steps=7"):
        finals.values(actor, torch.zeros(1))


def test_a_rollout_does_not_depend_on_who_else_is_in_it() -> None:
    """12: actions and episodes are functions of the environment's number."""
    policy = policy_for(BatchedCartPole(place()).spec)
    whole = collected(policy, place())
    for first in (0, 3):
        part = collected(policy, place(first_env=first, num_envs=3))
        assert torch.equal(part.actions, whole.actions[:, first : first + 3])
        assert torch.equal(part.starts, whole.starts[:, first : first + 3])


def test_splits_and_ranks_have_seeds_of_their_own() -> None:
    """12: evaluation seeds are disjoint from those of the training."""
    config = PpoConfig(seed=5)
    with joined(None) as gang:
        places = [place_of(config, gang, split, 4) for split in ("train", "val", "test")]
        other = place_of(PpoConfig(seed=6), gang, "train", 4)
    assert len({p.seed for p in places} | {other.seed}) == 4
    first = [BatchedCartPole(p).reset()["observation"] for p in places]
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[1], first[2])
