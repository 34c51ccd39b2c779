from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from tests.unit.rl.batched_cartpole import BatchedCartPole
from torch import Tensor

from muster.base.errors import UsageError
from muster.rl.environment import (
    ACTION_MASK,
    BatchedEnv,
    Change,
    Continuous,
    Discrete,
    Entry,
    EnvSpec,
    Observation,
    Place,
)
from muster.rl.gymnasium_envs import EnvFace, GymnasiumEnvs, Maker, VectorEnvFace

CPU = torch.device("cpu")


def place_of(num_envs: int, seed: int) -> Place:
    return Place(num_envs=num_envs, first_env=0, seed=seed, device=CPU)


def cartpole(place: Place) -> BatchedCartPole:
    return BatchedCartPole(place, max_steps=15)


class Corridor(BatchedEnv):
    """Walk from 0 to ``goal``: left (0) is impossible at 0. An observation of several entries."""

    goal = 3

    def __init__(self, place: Place) -> None:
        spec = EnvSpec(
            name="corridor",
            num_envs=place.num_envs,
            observation={
                "grid": Entry((2, 2)),
                ACTION_MASK: Entry((2,), torch.bool),
                "position": Entry((), torch.int64),
            },
            actions=Discrete(2),
            extras=("visits",),
        )
        super().__init__(spec, place)

    def fresh(self) -> dict[str, Tensor]:
        return {"at": torch.zeros_like(self.index), "visits": torch.zeros_like(self.index)}

    def advance(self, actions: Tensor) -> Change:
        at = (self.rows["at"] + 2 * actions - 1).clamp(min=0)
        visits = self.rows["visits"] + 1
        self.rows = {"at": at, "visits": visits}
        done = at == self.goal
        return Change(done.float(), done, torch.zeros_like(done), {"visits": visits.float()})

    def observe(self) -> Observation:
        at = self.rows["at"]
        grid = torch.stack([at, 10 + at, 20 + at, 30 + at], dim=1).float().view(-1, 2, 2)
        mask = torch.stack([at > 0, torch.ones_like(at > 0)], dim=1)
        return {ACTION_MASK: mask, "position": at, "grid": grid}


class Steered(BatchedCartPole):
    """Actions are numbers: the sign of the sum of two says where to push."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._spec = EnvSpec(
            name="steered",
            num_envs=place.num_envs,
            observation=self._spec.observation,
            actions=Continuous((-1.0, -2.0), (1.0, 2.0)),
        )

    def advance(self, actions: Tensor) -> Change:
        assert actions.shape == (self.place.num_envs, 2)
        assert actions.dtype == torch.float32
        return super().advance((actions.sum(1) > 0).long())._replace(extras={})


@pytest.fixture
def registered() -> Iterator[dict[str, str]]:
    """Ids of the faces, known to Gymnasium for one test."""
    names: dict[str, Maker] = {"CartPole": cartpole, "Corridor": Corridor}
    ids = {name: f"muster-test/{name}-v0" for name in names}
    for name, maker in names.items():
        single, vector = _makers(maker)
        gymnasium.register(ids[name], entry_point=single, vector_entry_point=vector)
    yield ids
    for env_id in ids.values():
        del gymnasium.registry[env_id]


def _makers(maker: Maker) -> tuple[Any, Any]:
    return lambda: EnvFace(maker), lambda num_envs: VectorEnvFace(maker, num_envs)


@pytest.mark.parametrize("name", ["CartPole", "Corridor"])
def test_gymnasiums_checker_has_nothing_to_say(registered: dict[str, str], name: str) -> None:
    """Its warnings are errors here."""
    check_env(gymnasium.make(registered[name]).unwrapped)


def test_one_environment_is_row_0_of_the_batch() -> None:
    face, batch = EnvFace(cartpole), BatchedCartPole(place_of(1, seed=5), max_steps=15)
    seen, info = face.reset(seed=5)
    expected = batch.reset()
    assert info == {}
    assert seen.tolist() == expected["observation"][0].tolist()
    ends = 0
    for step in range(60):
        action = int(step % 5 > 1)
        seen, reward, terminated, truncated, info = face.step(action)
        outcome = batch.step(torch.tensor([action]))
        assert face.observation_space.contains(seen)
        assert seen.tolist() == outcome.final["observation"][0].tolist()
        assert (reward, terminated, truncated) == (
            1.0,
            bool(outcome.terminated),
            bool(outcome.truncated),
        )
        if terminated or truncated:
            ends += 1
            assert info == {"steps": float(outcome.extras["steps"])}
            seen, _ = face.reset()  # the next episode of the stream, none is skipped
            assert seen.tolist() == outcome.observation["observation"][0].tolist()
        else:
            assert info == {}
    assert ends > 2


def test_a_seed_decides_everything_that_follows() -> None:
    def stream(face: EnvFace, seed: int) -> list[float]:
        told: list[float] = face.reset(seed=seed)[0].tolist()
        for step in range(40):
            seen, _, terminated, truncated, _ = face.step(step % 2)
            told += seen.tolist()
            if terminated or truncated:
                told += face.reset()[0].tolist()
        return told

    face = EnvFace(cartpole)
    first = stream(face, 3)
    assert stream(face, 4) != first
    assert stream(face, 3) == first
    assert stream(EnvFace(cartpole), 3) == first


def test_a_reset_in_mid_episode_begins_the_next_one() -> None:
    face, batch = EnvFace(cartpole), cartpole(place_of(1, seed=1))
    face.reset(seed=1)
    face.step(0)
    batch.reset()
    assert face.reset()[0].tolist() == batch.reset()["observation"][0].tolist()


def test_without_a_seed_every_face_is_different() -> None:
    assert EnvFace(cartpole).reset()[0].tolist() != EnvFace(cartpole).reset()[0].tolist()


def test_steps_without_a_running_episode_are_refused() -> None:
    face = EnvFace(Corridor)
    with pytest.raises(gymnasium.error.ResetNeeded, match=r"reset\(\)"):
        face.step(1)
    face.reset()
    for _ in range(Corridor.goal):
        face.step(1)
    with pytest.raises(gymnasium.error.ResetNeeded, match=r"reset\(\)"):
        face.step(1)
    with pytest.raises(gymnasium.error.ResetNeeded, match=r"reset\(\)"):
        VectorEnvFace(Corridor, 2).step(np.array([1, 1]))


def test_entries_are_flat_in_the_order_of_the_spec_and_the_mask_is_in_the_info() -> None:
    face = EnvFace(Corridor)
    assert face.observation_space.shape == (5,)
    seen, info = face.reset(seed=0)
    assert seen.dtype == np.float32
    assert seen.tolist() == [0, 10, 20, 30, 0]
    assert info[ACTION_MASK].dtype == np.int8
    assert info[ACTION_MASK].tolist() == [0, 1]
    assert face.action_space.sample(mask=info[ACTION_MASK]) == 1
    seen, reward, terminated, _, info = face.step(1)
    assert (seen.tolist(), reward, terminated) == ([1, 11, 21, 31, 1], 0.0, False)
    assert info.keys() == {ACTION_MASK}
    face.step(1)
    seen, reward, terminated, _, info = face.step(1)
    assert (seen.tolist(), reward, terminated) == ([3, 13, 23, 33, 3], 1.0, True)
    assert info["visits"] == 3.0


def test_the_vector_tells_ends_as_gymnasium_does_in_mode_same_step() -> None:
    """Against ``SyncVectorEnv`` of the single faces, which is told what to do by Gymnasium."""
    ours = VectorEnvFace(Corridor, 3)
    theirs = gymnasium.vector.SyncVectorEnv(
        [lambda: EnvFace(Corridor)] * 3, autoreset_mode=ours.metadata["autoreset_mode"]
    )
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    for mine, their in zip(ours.reset(seed=0), theirs.reset(seed=0), strict=True):
        _assert_equal(mine, their)
    generator = np.random.default_rng(0)
    ends = 0
    for _ in range(40):
        actions = generator.integers(0, 2, 3)
        mine, their = ours.step(actions), theirs.step(actions)
        ends += int(mine[2].sum())
        for one, other in zip(mine[:4], their[:4], strict=True):
            assert one.dtype == other.dtype
            _assert_equal(one, other)
        ended = mine[2] | mine[3]
        _assert_equal(mine[4][ACTION_MASK], their[4][ACTION_MASK])
        assert mine[4].keys() == their[4].keys()
        if ended.any():
            _assert_equal(mine[4]["_final_obs"], their[4]["_final_obs"])
            for one, other in zip(mine[4]["final_obs"], their[4]["final_obs"], strict=True):
                _assert_equal(one, other)
            assert mine[4]["final_info"].keys() == their[4]["final_info"].keys()
            for name in ("visits", ACTION_MASK):
                told, expected = mine[4]["final_info"], their[4]["final_info"]
                _assert_equal(told[name][ended], expected[name][ended])
                assert told[f"_{name}"][ended].all()
    assert ends > 3
    theirs.close()


def _assert_equal(mine: Any, their: Any) -> None:
    if isinstance(mine, dict):
        assert mine.keys() == their.keys()
        for name in mine:
            _assert_equal(mine[name], their[name])
    else:
        assert np.array_equal(mine, their)


@pytest.mark.parametrize("maker", [cartpole, Corridor])
def test_there_and_back_is_the_batched_environment(maker: Any) -> None:
    """Its vector face behind the seam again: the same numbers, in one flat entry."""
    made: list[Place] = []

    def recorded(place: Place) -> BatchedEnv:
        made.append(place)
        env: BatchedEnv = maker(place)
        return env

    back = GymnasiumEnvs.of(VectorEnvFace(recorded, 4), place_of(4, seed=2))
    seen = back.reset()
    straight = maker(made[-1])
    expected = straight.reset()
    assert torch.equal(_flat(seen), _flat(expected))
    for step in range(40):
        action = (torch.arange(4) + step) % 3 % 2 | (step % 4 > 0)
        outcome, told = back.step(action.long()), straight.step(action.long())
        for name in ("reward", "terminated", "truncated", "starts", "valid"):
            assert torch.equal(getattr(outcome, name), getattr(told, name)), name
        ended = told.terminated | told.truncated
        assert torch.equal(_flat(outcome.final)[ended], _flat(told.final)[ended])
        seen, expected = outcome.observation, told.observation
        assert torch.equal(_flat(seen), _flat(expected))
        if ACTION_MASK in expected:
            assert torch.equal(seen[ACTION_MASK], expected[ACTION_MASK])


def _flat(observation: Observation) -> Tensor:
    names = [name for name in ("observation", "grid", "position") if name in observation]
    return torch.cat([observation[n].flatten(1) if observation[n].dim() > 1
                      else observation[n][:, None] for n in names], dim=1)  # fmt: skip


def test_actions_that_are_numbers_have_a_box() -> None:
    face = EnvFace(Steered)
    assert face.action_space == gymnasium.spaces.Box(
        np.array([-1, -2], np.float32), np.array([1, 2], np.float32)
    )
    face.reset(seed=0)
    right = face.step(np.array([-1.0, 1.5]))[0]
    face.reset(seed=0)
    left = face.step(np.array([-1.0, 0.5]))[0]
    assert right[1] > left[1]


def test_gymnasium_makes_the_vector_by_its_id(registered: dict[str, str]) -> None:
    envs = gymnasium.make_vec(registered["CartPole"], num_envs=3)
    assert isinstance(envs, VectorEnvFace)
    seen, _ = envs.reset(seed=1)
    assert envs.observation_space.contains(seen)
    envs.close()


def test_what_a_vector_cannot_do_is_refused() -> None:
    envs = VectorEnvFace(cartpole, 2)
    with pytest.raises(UsageError, match="takes one seed for all environments, not \\[1, 2\\]"):
        envs.reset(seed=[1, 2])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="reset_mask has no use here"):
        envs.reset(options={"reset_mask": np.array([True, False])})


def test_what_is_given_away_may_be_written_to() -> None:
    envs = VectorEnvFace(cartpole, 2)
    envs.reset(seed=1)
    outcome = envs.step(np.array([0, 0]))
    expected = [np.array(values) for values in outcome[:4]]
    again = VectorEnvFace(cartpole, 2)
    for values in again.reset(seed=1)[:1]:
        values[:] = 7
    second = again.step(np.array([0, 0]))
    for values, wanted in zip(second[:4], expected, strict=True):
        assert np.array_equal(values, wanted)
        values[:] = 0
