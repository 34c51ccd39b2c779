from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.rl.ladder import Ladder, kind_of, of, place_of, registered

from muster.base.errors import UsageError
from muster.rl.environment import ACTION_MASK, Continuous, Discrete
from muster.rl.gymnasium_envs import GymnasiumEnvs, make_gymnasium
from muster.rl.gymnasium_spaces import History

# Autoreset modes.


class Told(NamedTuple):
    observation: list[float]
    reward: float
    ends: tuple[bool, bool]
    final: list[float] | None


def episodes(env: GymnasiumEnvs, steps: int) -> list[list[Told]]:
    """Per row what its valid steps told; actions are a function of what the row sees."""
    observation = env.reset()["observation"]
    rows: list[list[Told]] = [[] for _ in range(env.spec.num_envs)]
    for row, seen in enumerate(observation.tolist()):
        rows[row].append(Told(seen, 0.0, (False, False), None))
    for _ in range(steps):
        outcome = env.step(((observation.sum(1).long() + torch.arange(len(rows))) % 3 > 0).long())
        observation = outcome.observation["observation"]
        for row, told in enumerate(rows):
            if not outcome.valid[row]:
                assert outcome.starts[row]
                assert not outcome.terminated[row] | outcome.truncated[row]
                assert outcome.reward[row] == 0
                told[-1] = told[-1]._replace(observation=observation[row].tolist())
                continue
            ends = bool(outcome.terminated[row]), bool(outcome.truncated[row])
            final = outcome.final["observation"][row].tolist() if any(ends) else None
            told.append(Told(observation[row].tolist(), float(outcome.reward[row]), ends, final))
    env.close()
    return rows


def test_all_autoreset_modes_tell_the_same_episodes() -> None:
    """Ladder's episodes do not depend on seeds, so the modes can be compared."""
    streams = {mode.value: episodes(of(Ladder, 3, mode.value), 40) for mode in AutoresetMode}
    shortest = min(len(row) for rows in streams.values() for row in rows) - 1
    assert shortest > 25
    for row in range(3):
        expected = streams["Disabled"][row][:shortest]
        assert streams["SameStep"][row][:shortest] == expected
        assert streams["NextStep"][row][:shortest] == expected
    told = [step for row in streams["Disabled"] for step in row]
    assert {step.ends for step in told} == {(False, False), (True, False), (False, True)}


@pytest.mark.parametrize("mode", [mode.value for mode in AutoresetMode])
def test_finals_and_ends_are_the_ladders(mode: str) -> None:
    """Worked out by hand: always climbing, episode 1 (of the second row's ladder) needs 3 steps.

    The constructor has reset every ladder once to look at it, so the first episode is number 1.
    """
    env = of(Ladder, 1, mode)
    assert env.reset()["observation"].tolist() == [[1, 0, 0]]
    outcomes = [env.step(torch.tensor([1])) for _ in range(3)]
    assert [bool(o.terminated) for o in outcomes] == [False, False, True]
    assert outcomes[-1].final["observation"].tolist() == [[1, 3, 3]]
    assert outcomes[-1].reward.tolist() == [1.5]
    if mode == "NextStep":
        assert outcomes[-1].observation["observation"].tolist() == [[1, 3, 3]]
        assert not outcomes[-1].starts
        outcomes.append(env.step(torch.tensor([1])))
        assert not outcomes[-1].valid
    assert outcomes[-1].starts
    assert outcomes[-1].observation["observation"].tolist() == [[2, 0, 0]]


@pytest.mark.parametrize("mode", [mode.value for mode in AutoresetMode])
def test_terminated_wins_over_truncated(mode: str) -> None:
    env = of(Ladder, 1, mode)
    env.reset()
    for action in (1, 0, 1, 1):  # the top of episode 1 in its last step
        outcome = env.step(torch.tensor([action]))
    assert outcome.terminated
    assert not outcome.truncated


def test_an_unknown_mode_is_refused() -> None:
    for metadata in ({}, {"autoreset_mode": "sometimes"}):
        envs = SyncVectorEnv([Ladder])
        envs.metadata = metadata
        with pytest.raises(UsageError, match=r"its autoreset mode is (None|'sometimes')") as caught:
            GymnasiumEnvs.of(envs, place_of(1))
        assert "'NextStep', 'SameStep', 'Disabled'" in str(caught.value)
        assert envs.closed


def test_same_step_without_the_final_observation_is_refused() -> None:
    class Forgets(SyncVectorEnv):
        def step(self, actions: Any) -> Any:
            return (*super().step(actions)[:4], {})

    envs = Forgets([Ladder], autoreset_mode=AutoresetMode.SAME_STEP)
    env = GymnasiumEnvs.of(envs, place_of(1))
    env.reset()
    with pytest.raises(UsageError, match="infos have no 'final_obs'"):
        for _ in range(4):
            env.step(torch.tensor([1]))
    assert envs.closed


def test_a_wrong_number_of_environments_is_refused() -> None:
    with pytest.raises(UsageError, match="SyncVectorEnv has 2 environments, not 3"):
        GymnasiumEnvs.of(SyncVectorEnv([Ladder] * 2), place_of(3))


# Seeds and repeating.


class Seeded(Ladder):
    """Shows the seed it was started with."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seed = seed
        return super().reset(seed=seed, options=options)

    def seen(self) -> Any:
        return np.array([self.seed, self.height, self.steps], np.float64)


def test_every_episode_has_a_seed_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    env_id = registered(monkeypatch, Seeded)
    seeds = []
    for first_env in (0, 2):
        env = make_gymnasium(env_id, place_of(2, first_env))
        seeds += env.reset()["observation"][:, 0].tolist()
        for _ in range(20):
            outcome = env.step(torch.tensor([1, 0]))
            seeds += outcome.observation["observation"][outcome.starts, 0].tolist()
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert len(set(seeds)) == len(seeds) > 24


def test_an_environment_that_does_not_repeat_itself_is_not_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ladder counts episodes itself, whatever its seed is."""
    env_id = registered(monkeypatch, Ladder)
    env = make_gymnasium(env_id, place_of(2))
    env.reset()
    for _ in range(9):
        env.step(torch.tensor([1, 0]))
    again = make_gymnasium(env_id, place_of(2))
    assert again.restore(env.state()) is None
    with pytest.raises(RuntimeError, match=r"reset\(\)"):
        again.step(torch.tensor([1, 0]))
    again.reset()
    again.step(torch.tensor([1, 0]))


def test_an_episode_that_ends_while_it_is_repeated_is_not_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ladder's odd episodes end at height 3; it is repeated as an even one, which ends at 2."""
    env_id = registered(monkeypatch, Ladder)
    env, again = make_gymnasium(env_id, place_of(1)), make_gymnasium(env_id, place_of(1))
    assert env.reset()["observation"].tolist() == [[1, 0, 0]]
    for action in (1, 1, 0):
        outcome = env.step(torch.tensor([action]))
    assert not outcome.starts
    again.reset()
    assert again.restore(env.state()) is None


@examples(60)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    actions=st.sampled_from([Discrete(1000), Continuous((0.0, 0.0), (1.0, 1.0))]),
    padding=st.integers(0, 4),
)
def test_rounds_bring_every_row_to_its_point(
    lengths: list[int], actions: Any, padding: int
) -> None:
    """Played on rows that remember what they were given since their last restart."""
    num_envs = len(lengths)
    history = History(num_envs, actions)
    taken: list[list[Any]] = [[] for _ in lengths]
    for step in range(80):  # longer than the first capacity, then a new episode of each length
        wide = () if isinstance(actions, Discrete) else (2,)
        drawn = np.random.default_rng(step).integers(1, 99, (num_envs, *wide))
        starts = np.array([80 - step == length for length in lengths])
        history.clear(starts)
        history.append(drawn)
        for row, action in enumerate(drawn.tolist()):
            taken[row] = [action] if starts[row] else [*taken[row], action]
    history.clear(np.array([length == 0 for length in lengths]))
    taken = [told if length else [] for told, length in zip(taken, lengths, strict=True)]
    assert history.length.tolist() == lengths

    state = history.state()
    empty = state["actions"].new_zeros(num_envs, padding, *state["actions"].shape[2:])
    state["actions"] = torch.cat([state["actions"], empty], dim=1)
    done: list[list[Any]] = [[] for _ in lengths]
    again = History.of(state, actions)
    for restart, now in again.rounds():
        for row in range(num_envs):
            done[row] = [now[row].tolist()] if restart[row] else [*done[row], now[row].tolist()]
            if lengths[row]:  # only what it is known to survive
                assert done[row] == taken[row][: len(done[row])]
    for row, length in enumerate(lengths):
        assert done[row] == taken[row] if length else len(done[row]) <= 1
    assert again.state()["actions"].tolist() == history.state()["actions"].tolist()


def test_cartpole_with_and_without_velocities_is_the_same_game() -> None:
    whole = make_gymnasium("CartPole-v1", place_of(3))
    masked = make_gymnasium("CartPole-v1", place_of(3), observe=(2, 0))
    seen, part = whole.reset()["observation"], masked.reset()["observation"]
    for _ in range(30):
        assert torch.equal(seen[:, [2, 0]], part)
        seen = whole.step(torch.ones(3, dtype=torch.int64)).observation["observation"]
        part = masked.step(torch.ones(3, dtype=torch.int64)).observation["observation"]


def test_time_limits_are_known_where_they_can_be() -> None:
    def least(env_id: str, **keywords: Any) -> int:
        env = make_gymnasium(env_id, place_of(1), **keywords)
        env.close()
        return env.spec.min_truncation_steps

    assert least("CartPole-v1") == 500
    assert least("CartPole-v1", env_kwargs={"max_episode_steps": 20}) == 20
    assert least("Pendulum-v1") == 200
    assert least("CartPole-v1", vectorization="native") == 500


def test_a_truncation_before_the_known_time_limit_is_an_error() -> None:
    env = GymnasiumEnvs(
        SyncVectorEnv([Ladder], autoreset_mode=AutoresetMode.DISABLED),
        place_of(1),
        name="Ladder",
        min_truncation_steps=9,
    )
    env.reset()
    with pytest.raises(UsageError, match=r"at step 4 of episode 0 it is cut off, .* 9 steps"):
        for _ in range(4):
            env.step(torch.tensor([0]))


# Action masks.


def masked_kind(mask: Callable[[Ladder], Any], in_dict: bool = False) -> type[Ladder]:
    """A ladder with masks in its infos, or in a Dict observation."""

    def reset(self: Any, *, seed: int | None = None, options: Any = None) -> Any:
        seen, _ = Ladder.reset(self, seed=seed)
        return (wrapped(self, seen), {} if in_dict else {ACTION_MASK: mask(self)})

    def step(self: Any, action: Any) -> Any:
        seen, *rest, info = Ladder.step(self, action)
        return (wrapped(self, seen), *rest, info if in_dict else {ACTION_MASK: mask(self)})

    def wrapped(self: Any, seen: Any) -> Any:
        return {"seen": seen, ACTION_MASK: mask(self)} if in_dict else seen

    space = spaces.Dict({"seen": Ladder.observation_space, ACTION_MASK: spaces.MultiBinary(2)})
    extra = {"observation_space": space} if in_dict else {}
    return kind_of("Masked", reset=reset, step=step, **extra)


def by_height(env: Ladder) -> Any:
    """At odd heights one can only climb; at the top nothing is possible."""
    is_top = env.height >= 2 + env.episode % 2
    return np.array([env.height % 2 == 0 and not is_top, not is_top], np.int8)


@pytest.mark.parametrize("in_dict", [False, True])
@pytest.mark.parametrize("mode", [mode.value for mode in AutoresetMode])
def test_masks_belong_to_the_observation_beside_them(mode: str, in_dict: bool) -> None:
    """Where nothing is decided (an episode has ended) everything is allowed."""
    env = of(masked_kind(by_height, in_dict), 3, mode)
    assert env.spec.observation[ACTION_MASK].shape == (2,)
    assert env.spec.observation["observation"].shape == (3,)
    observation = env.reset()
    for step in range(30):
        height, mask = observation["observation"][:, 1], observation[ACTION_MASK]
        outcome = env.step(((torch.arange(3) + step) % 3 > 0).long() | (height % 2 == 1).long())
        ended = outcome.terminated | outcome.truncated
        decides = ~ended if mode == "NextStep" else torch.ones_like(ended)
        observation = outcome.observation
        height, mask = observation["observation"][:, 1], observation[ACTION_MASK]
        assert mask.dtype == torch.bool
        assert torch.equal(mask[decides, 0], height[decides] % 2 == 0)
        assert mask[:, 1].all()
        assert mask[~decides].all()
        assert outcome.final[ACTION_MASK][ended].all()


@pytest.mark.parametrize("mode", [mode.value for mode in AutoresetMode])
def test_a_final_observation_forbids_nothing(mode: str) -> None:
    """Nothing is decided there, whatever the mask of the next episode's start is."""
    env = of(masked_kind(lambda env: np.array([0, 1], np.int8)), 1, mode)
    env.reset()
    for _ in range(3):
        outcome = env.step(torch.tensor([1]))
    assert outcome.terminated
    assert outcome.final[ACTION_MASK].tolist() == [[True, True]]
    nothing_decided = mode == "NextStep"
    assert outcome.observation[ACTION_MASK].tolist() == [[nothing_decided, True]]


def test_a_mask_of_the_observation_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where Gymnasium keeps it as it is returned here: as bools."""
    kind = masked_kind(lambda env: by_height(env).astype(np.bool_), in_dict=True)
    space = dict(kind.observation_space.spaces)  # type: ignore[attr-defined]
    space[ACTION_MASK] = spaces.Box(0, 1, (2,), np.bool_)
    monkeypatch.setattr(kind, "observation_space", spaces.Dict(space))
    env = make_gymnasium(registered(monkeypatch, kind), place_of(2))
    first = env.reset()[ACTION_MASK]
    assert first.tolist() == [[True, True]] * 2
    second = env.step(torch.tensor([1, 1])).observation[ACTION_MASK]
    assert second.tolist() == [[False, True]] * 2
    assert first.tolist() == [[True, True]] * 2


def test_taxis_mask_is_gymnasiums() -> None:
    env = make_gymnasium("Taxi-v4", place_of(3))
    taxi = gymnasium.make("Taxi-v4").unwrapped
    seen = env.reset()
    for step in range(10):
        mask = seen[ACTION_MASK].long()
        states = seen["observation"].argmax(1).tolist()
        assert mask.tolist() == [taxi.action_mask(state).tolist() for state in states]  # type: ignore[attr-defined]
        last = (mask * torch.arange(1, 7)).argmax(1)
        seen = env.step(mask.argmax(1) if step % 2 else last).observation


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (lambda env: np.ones(3, np.int8), "its action_mask has 3 entries, and there are 2"),
        (lambda env: np.zeros(2, np.int8), "in environment 0 at step 0 .* allows nothing"),
    ],
)
def test_masks_that_cannot_be_meant_are_refused(mask: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        of(masked_kind(mask)).reset()
