"""Exactly the first episode of every environment, whatever the others do."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from muster.base.errors import UsageError
from muster.rl.environment import (
    ACTION_MASK,
    Actions,
    BatchedEnv,
    Change,
    Continuous,
    Discrete,
    Entry,
    EnvSpec,
    Observation,
    Outcome,
    Place,
)
from muster.rl.evaluation import Episodes, play, summary
from muster.rl.policy import Policy, PolicyOutput, RecurrentPolicy, State, at_least_float32
from muster.rl.sequences import SequencePlan
from muster.rl.statistics import Normaliser

CPU = torch.device("cpu")
FOUR = Discrete(4)


class Corridor(BatchedEnv):
    """Environment i is 2 + (5 i mod 7) steps long, later episodes shorter; the reward is the
    action + i / 10. Even ones terminate, odd ones are truncated. Action 3 is impossible in odd
    steps."""

    def __init__(self, num_envs: int, first_env: int = 0, actions: Actions = FOUR) -> None:
        has_mask = isinstance(actions, Discrete)
        mask = {ACTION_MASK: Entry((4,), torch.bool)} if has_mask else {}
        spec = EnvSpec(
            name="Corridor",
            num_envs=num_envs,
            observation={"observation": Entry((2,)), **mask},
            actions=actions,
            extras=("score",),
        )
        super().__init__(spec, Place(num_envs=num_envs, first_env=first_env, seed=0, device=CPU))

    def fresh(self) -> dict[str, Tensor]:
        return {"step": torch.zeros_like(self.index)}

    def advance(self, actions: Tensor) -> Change:
        if actions.dim() == 2:
            actions = actions.sum(1)
        self.rows = {"step": self.rows["step"] + 1}
        is_over = self.rows["step"] >= length_of(self.index) - self.episode
        is_even = self.index % 2 == 0
        return Change(
            reward=actions.float() + self.index / 10,
            terminated=is_over & is_even,
            truncated=is_over & ~is_even,
            extras={"score": self.index + 100 * self.episode},
        )

    def observe(self) -> Observation:
        step = self.rows["step"]
        seen = {"observation": torch.stack([step, self.index], 1).float()}
        if isinstance(self.spec.actions, Discrete):
            mask = torch.ones(len(step), 4, dtype=torch.bool)
            mask[:, 3] = step % 2 == 0
            seen[ACTION_MASK] = mask
        return seen


def length_of(index: Tensor) -> Tensor:
    return 2 + (5 * index) % 7


class Counting(Policy):
    """Its likeliest action is 0, 1, 2, 0, 1, 2, ... counted from the start of the episode in
    its memory alone."""

    def __init__(self) -> None:
        super().__init__()
        self.normaliser = Normaliser({"observation": (2,)})
        self.calls: list[tuple[bool, bool]] = []
        self.refreshed: list[tuple[int, int]] = []

    def initial_state(self, num_envs: int, device: torch.device) -> State:
        return {"count": torch.zeros(num_envs, dtype=torch.int64)}

    def act(
        self, observation: Observation, state: State, starts: Tensor
    ) -> tuple[PolicyOutput, State]:
        self.calls.append((self.training, torch.is_grad_enabled()))
        count = torch.where(starts, 0, state["count"])
        logits = torch.nn.functional.one_hot(count % 3, 4) * 5.0
        return PolicyOutput(logits, torch.zeros(len(count))), {"count": count + 1}

    def forward(
        self, observation: Observation, state: State, starts: Tensor, plan: SequencePlan | None
    ) -> PolicyOutput:
        raise AssertionError("an evaluation acts")

    def refresh(self, num_envs: int, num_steps: int) -> None:
        self.refreshed.append((num_envs, num_steps))


def played(
    env: Corridor,
    player: object,
    *,
    num: int | None = None,
    deterministic: bool = True,
    seed: int = 0,
) -> Episodes:
    return play(
        player,  # type: ignore[arg-type]
        env,
        deterministic=deterministic,
        seed=seed,
        num_episodes=env.spec.num_envs if num is None else num,
        device=CPU,
        first_env=env.place.first_env,
    )


def test_one_whole_first_episode_of_each_environment() -> None:
    episodes = played(Corridor(8, first_env=3), lambda seen, step: torch.full((8,), 2))
    index = torch.arange(3, 11)
    assert torch.equal(episodes.index, index)
    assert torch.equal(episodes.lengths, length_of(index))
    expected = length_of(index) * (2 + index / 10).double()
    assert torch.allclose(episodes.returns, expected, atol=1e-5)
    assert torch.equal(episodes.terminated, index % 2 == 0)
    # The score of a later episode would be above 100.
    assert torch.equal(episodes.extras["score"], index.double())
    assert torch.equal(episodes.first["observation"][:, 1], index.float())


def test_rewards_step_by_step_add_up_and_stop_at_the_end() -> None:
    episodes = played(Corridor(5), lambda seen, step: torch.full((5,), step % 3))
    assert episodes.rewards.shape == (int(length_of(torch.arange(5)).max()), 5)
    for env in range(5):
        length = int(episodes.lengths[env])
        expected = [step % 3 + env / 10 for step in range(length)]
        assert episodes.rewards[:length, env].tolist() == pytest.approx(expected)
        assert not episodes.rewards[length:, env].any()
        assert float(episodes.returns[env]) == pytest.approx(sum(expected))


def test_more_environments_than_episodes() -> None:
    few = played(Corridor(8), lambda seen, step: torch.ones(8), num=3)
    all_of_them = played(Corridor(8), lambda seen, step: torch.ones(8))
    assert torch.equal(few.returns, all_of_them.returns[:3])
    assert len(few.rewards) == int(few.lengths.max())


@pytest.mark.parametrize("num", [0, 9])
def test_more_episodes_than_environments_are_refused(num: int) -> None:
    with pytest.raises(UsageError, match=f"Cannot play {num} episodes at once on 8"):
        played(Corridor(8), Counting(), num=num)


def test_the_memory_is_carried_through_an_episode_and_empty_at_its_start() -> None:
    episodes = played(Corridor(6), Counting())
    for env in range(6):
        length = int(length_of(torch.tensor(env)))
        expected = sum(step % 3 + env / 10 for step in range(length))
        assert float(episodes.returns[env]) == pytest.approx(expected, abs=1e-5)


def test_a_policy_is_put_back_as_it_was() -> None:
    policy = Counting()
    policy.normaliser.absorb(
        policy.normaliser.deltas(
            {"observation": torch.randn(9, 2)}, torch.ones(9, dtype=torch.bool)
        )
    )
    before = {name: values.clone() for name, values in policy.state_dict().items()}
    for is_training in (True, False):
        policy.train(is_training)
        played(Corridor(4), policy)
        assert policy.training is is_training
    assert set(policy.calls) == {(False, False)}  # evaluation mode, no gradients
    assert all(torch.equal(before[name], values) for name, values in policy.state_dict().items())
    assert policy.refreshed == [(4, 1), (4, 1)]


def test_an_error_puts_a_policy_back_too() -> None:
    policy = Counting()
    env = Corridor(4)
    env.advance = lambda actions: 1 / 0  # type: ignore[assignment,method-assign,return-value]
    with pytest.raises(ZeroDivisionError):
        played(env, policy)
    assert policy.training


@pytest.mark.parametrize("actions", [FOUR, Continuous((-1.0, -1.0), (1.0, 1.0))])
def test_samples_depend_on_the_seed_and_the_global_number_only(actions: Actions) -> None:
    torch.manual_seed(0)
    policy = RecurrentPolicy(Corridor(1, actions=actions).spec, hidden=4)

    def returns(num_envs: int, first_env: int, seed: int) -> Tensor:
        torch.rand(3)  # torch's own generator plays no part
        env = Corridor(num_envs, first_env, actions)
        return played(env, policy, deterministic=False, seed=seed).returns

    whole = returns(6, 0, 1)
    assert torch.equal(whole, returns(6, 0, 1))
    assert torch.allclose(whole, torch.cat([returns(2, 0, 1), returns(4, 2, 1)]), atol=1e-5)
    assert not torch.allclose(whole, returns(6, 0, 2), atol=1e-3)


def test_samples_follow_the_distribution_and_the_mask() -> None:
    class Flat(Counting):
        def act(
            self, observation: Observation, state: State, starts: Tensor
        ) -> tuple[PolicyOutput, State]:
            self.masks = [*getattr(self, "masks", []), observation[ACTION_MASK]]
            zeros = torch.zeros(len(starts), 4)
            return PolicyOutput(zeros, zeros[:, 0]), state

    env = Corridor(4000)
    chosen: list[Tensor] = []
    step = env.step

    def noted(actions: Tensor) -> Outcome:
        chosen.append(actions)
        return step(actions)

    env.step = noted  # type: ignore[method-assign]
    played(env, Flat(), deterministic=False)
    for number, actions in enumerate(chosen[:2]):
        counts = torch.bincount(actions, minlength=4)
        possible = 4 if number == 0 else 3
        expected = torch.zeros(4)
        expected[:possible] = 4000 / possible
        # Five standard deviations of a binomial.
        assert ((counts - expected).abs() <= 5 * (expected * (1 - 1 / possible)).sqrt()).all()
    # Every step draws anew: two steps agree as often as chance has it.
    same = int((chosen[0] == chosen[2]).sum())
    assert abs(same - 1000) < 5 * 28


def test_an_endless_episode_is_told() -> None:
    with pytest.raises(UsageError, match=r"(?s)Corridor has not ended after 5 steps.*time limit"):
        play(
            lambda seen, step: torch.zeros(4),
            Corridor(4),
            deterministic=True,
            seed=0,
            num_episodes=4,
            device=CPU,
            max_steps=5,
        )


def test_a_summary_is_json_with_intervals() -> None:
    told = summary(played(Corridor(4), lambda seen, step: torch.ones(4)))
    assert told == json.loads(json.dumps(told, allow_nan=False))
    assert (told["episodes"], told["terminated"]) == (4, 2)
    lengths = length_of(torch.arange(4)).double()
    assert told["length"]["middle"] == float(lengths.mean())
    half = 3.1824463 * float(lengths.std()) / 2
    assert told["length"]["high"] - told["length"]["middle"] == pytest.approx(half)
    assert told["score"]["middle"] == 1.5
    assert told["return"]["num"] == 4


def test_widening() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert at_least_float32(torch.zeros(1, dtype=dtype)).dtype == torch.float32
    assert at_least_float32(torch.zeros(1, dtype=torch.float64)).dtype == torch.float64
