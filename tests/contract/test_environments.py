"""One suite for every implementation of ``rl.environment.VectorEnv``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from tests.unit.rl.batched_cartpole import MASKED, BatchedCartPole
from torch import Tensor

from muster.rl.environment import ACTION_MASK, Discrete, Observation, Outcome, Place, VectorEnv
from muster.rl.gymnasium_envs import GymnasiumEnvs, VectorEnvFace, make_gymnasium

Maker = Callable[[Place], VectorEnv]
Make = Callable[..., VectorEnv]

TIME_LIMIT = 12


def batched(place: Place) -> VectorEnv:
    return BatchedCartPole(place, max_steps=TIME_LIMIT)


def batched_masked(place: Place) -> VectorEnv:
    return BatchedCartPole(place, observe=MASKED, max_steps=TIME_LIMIT)


def sync(place: Place) -> VectorEnv:
    return make_gymnasium("CartPole-v1", place, env_kwargs={"max_episode_steps": TIME_LIMIT})


def sync_masked_actions(place: Place) -> VectorEnv:
    return make_gymnasium("Taxi-v4", place, env_kwargs={"max_episode_steps": TIME_LIMIT})


def sync_continuous(place: Place) -> VectorEnv:
    return make_gymnasium(
        "Pendulum-v1", place, observe=(1, 0), env_kwargs={"max_episode_steps": TIME_LIMIT}
    )


def asynchronous(place: Place) -> VectorEnv:
    return make_gymnasium(
        "CartPole-v1",
        place,
        vectorization="async",
        env_kwargs={"max_episode_steps": TIME_LIMIT},
    )


def native_next_step(place: Place) -> VectorEnv:
    return make_gymnasium(
        "CartPole-v1",
        place,
        vectorization="native",
        env_kwargs={"max_episode_steps": TIME_LIMIT},
    )


def same_step(place: Place) -> VectorEnv:
    def maker(inner: Place) -> BatchedCartPole:
        return BatchedCartPole(inner, max_steps=TIME_LIMIT)

    return GymnasiumEnvs.of(VectorEnvFace(maker, place.num_envs), place)


#: Their episodes are functions of (seed, number of the environment, number of the episode).
COUNTED: tuple[Maker, ...] = (
    batched, batched_masked, sync, sync_masked_actions, sync_continuous, asynchronous,
)  # fmt: skip
ALL: tuple[Maker, ...] = (*COUNTED, native_next_step, same_step)


def place_of(num_envs: int = 4, first_env: int = 0, seed: int = 7) -> Place:
    return Place(num_envs=num_envs, first_env=first_env, seed=seed, device=torch.device("cpu"))


@pytest.fixture
def opened() -> Iterator[Make]:
    """Makes environments that are closed when the test ends."""
    with ExitStack() as stack:

        def make(maker: Maker, place: Place) -> VectorEnv:
            env = maker(place)
            stack.callback(env.close)
            return env

        yield make


every = pytest.mark.parametrize("maker", ALL, ids=lambda maker: maker.__name__)
every_counted = pytest.mark.parametrize("maker", COUNTED, ids=lambda maker: maker.__name__)


def policy(env: VectorEnv, observation: Observation, step: int) -> Tensor:
    """Deterministic actions that depend on the step and on the row's own observation only."""
    seen = observation["observation"]
    bit = ((seen.double().sum(1) * 1e6).long() + step) % 7
    if not isinstance(env.spec.actions, Discrete):
        return (bit / 2 - 1.5).to(torch.float32)[:, None].expand(-1, len(env.spec.actions.low))
    if ACTION_MASK not in observation:
        return (bit > 0).long()  # the pole falls now and then before the time is over
    allowed = observation[ACTION_MASK]
    wanted = (bit[:, None] - torch.arange(allowed.shape[1])) % allowed.shape[1]
    return torch.where(allowed, wanted, 99).argmin(1)


def run(env: VectorEnv, observation: Observation, steps: int, since: int = 0) -> list[Outcome]:
    outcomes = []
    for step in range(since, since + steps):
        outcome = env.step(policy(env, observation, step))
        observation = outcome.observation
        outcomes.append(outcome)
    return outcomes


def tensors_of(outcome: Outcome) -> dict[str, Tensor]:
    ended = outcome.terminated | outcome.truncated
    flags = {name: getattr(outcome, name) for name in ("terminated", "truncated", "starts")}
    return {
        "reward": outcome.reward,
        "valid": outcome.valid,
        **flags,
        **{f"observation.{name}": values for name, values in outcome.observation.items()},
        **{f"final.{name}": values[ended] for name, values in outcome.final.items()},
        **{f"extras.{name}": values[ended] for name, values in outcome.extras.items()},
    }


def assert_same(one: list[Outcome], other: list[Outcome]) -> None:
    assert len(one) == len(other)
    for first, second in zip(one, other, strict=True):
        mine, theirs = tensors_of(first), tensors_of(second)
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert torch.equal(mine[name], theirs[name]), name


@every
def test_shapes_and_types_are_the_announced_ones(opened: Make, maker: Maker) -> None:
    env = opened(maker, place_of())
    spec = env.spec
    observation = env.reset()
    outcomes = run(env, observation, 2 * TIME_LIMIT)
    for seen in (observation, *(o.observation for o in outcomes), *(o.final for o in outcomes)):
        assert list(seen) == list(spec.observation)
        for name, entry in spec.observation.items():
            assert seen[name].shape == (spec.num_envs, *entry.shape)
            assert seen[name].dtype == entry.dtype
            assert seen[name].device == torch.device("cpu")
        if ACTION_MASK in seen:
            assert seen[ACTION_MASK].any(dim=1).all()
    for outcome in outcomes:
        assert outcome.reward.dtype == torch.float32
        for name in ("terminated", "truncated", "starts", "valid"):
            assert getattr(outcome, name).dtype == torch.bool, name
        for values in (outcome.reward, outcome.terminated, outcome.truncated, outcome.starts,
                       outcome.valid, *outcome.extras.values()):  # fmt: skip
            assert values.shape == (spec.num_envs,)
        assert tuple(outcome.extras) == spec.extras


@every
def test_episodes_start_exactly_where_one_has_ended(opened: Make, maker: Maker) -> None:
    env = opened(maker, place_of())
    takes_a_step = torch.tensor(maker is native_next_step)
    must_start = torch.zeros(4, dtype=torch.bool)
    num_ends = 0
    for outcome in run(env, env.reset(), 4 * TIME_LIMIT):
        ended = outcome.terminated | outcome.truncated
        assert not (outcome.terminated & outcome.truncated).any()
        assert torch.equal(outcome.valid, ~must_start)
        assert not (ended & ~outcome.valid).any()
        assert torch.equal(outcome.starts, must_start if takes_a_step else ended)
        must_start = ended & takes_a_step
        num_ends += int(ended.sum())
    assert num_ends > 8


@every
def test_final_is_what_was_seen_before_the_reset(opened: Make, maker: Maker) -> None:
    """Where nothing ends, it is the observation; where an episode ends, it goes on smoothly from
    the one before, whereas a first observation does not."""
    env = opened(maker, place_of())
    before = env.reset()
    for outcome in run(env, before, 4 * TIME_LIMIT):
        ended = outcome.terminated | outcome.truncated
        for name, values in outcome.final.items():
            assert torch.equal(values[~ended], outcome.observation[name][~ended])
        fresh = outcome.starts & ended
        assert not _equal_rows(outcome.final, outcome.observation)[fresh].any()
        if env.spec.name != "Taxi-v4":  # its observations are one-hot
            moved = (outcome.final["observation"] - before["observation"]).abs().amax(1)
            assert (moved[outcome.valid] < 0.8).all()
        before = outcome.observation


def _equal_rows(one: Observation, other: Observation) -> Tensor:
    return (one["observation"] == other["observation"]).all(dim=1)


@every
def test_truncation_keeps_its_promise(opened: Make, maker: Maker) -> None:
    env = opened(maker, place_of())
    steps = torch.zeros(4, dtype=torch.int64)
    seen = 0
    for outcome in run(env, env.reset(), 6 * TIME_LIMIT):
        steps += outcome.valid
        assert (steps[outcome.truncated] >= env.spec.min_truncation_steps).all()
        assert (steps <= TIME_LIMIT).all()
        seen += int(outcome.truncated.sum())
        steps[outcome.terminated | outcome.truncated] = 0
    assert seen > 0


@every
def test_the_same_place_is_the_same_stream(opened: Make, maker: Maker) -> None:
    one, other = (opened(maker, place_of()) for _ in range(2))
    first, second = one.reset(), other.reset()
    assert _equal_rows(first, second).all()
    assert_same(run(one, first, 3 * TIME_LIMIT), run(other, second, 3 * TIME_LIMIT))


@every
def test_streams_of_rows_seeds_and_episodes_differ(opened: Make, maker: Maker) -> None:
    env, seeded = opened(maker, place_of()), opened(maker, place_of(seed=8))
    first, second = env.reset(), env.reset()
    for other in (second, seeded.reset(), {"observation": first["observation"].roll(1, 0)}):
        assert not _equal_rows(first, other).all()
    if maker is not sync_masked_actions:  # 300 starts: two may be the same
        assert not _equal_rows(first, second).any()
        assert not _equal_rows(first, {"observation": first["observation"].roll(1, 0)}).any()


@every
def test_no_episode_is_played_again(opened: Make, maker: Maker) -> None:
    """Each row's episodes begin differently, those that followed by themselves too."""
    env = opened(maker, place_of())
    begun = [[row.tolist()] for row in env.reset()["observation"]]
    for outcome in run(env, env.reset(), 6 * TIME_LIMIT):
        for row in outcome.starts.nonzero().flatten().tolist():
            begun[row].append(outcome.observation["observation"][row].tolist())
    for starts in begun:
        different = len(set(map(tuple, starts)))
        assert len(starts) > 5
        assert different > 2 if maker is sync_masked_actions else different == len(starts)


@every_counted
def test_rows_do_not_depend_on_the_split(opened: Make, maker: Maker) -> None:
    """One object of 4 rows is two objects of rows 0-1 and 2-3."""
    whole = opened(maker, place_of())
    halves = [opened(maker, place_of(2, first_env)) for first_env in (0, 2)]
    observation, parts = whole.reset(), [half.reset() for half in halves]
    for name, values in observation.items():
        assert torch.equal(values, torch.cat([part[name] for part in parts]))
    together = run(whole, observation, 3 * TIME_LIMIT)
    apart = [run(*pair, 3 * TIME_LIMIT) for pair in zip(halves, parts, strict=True)]
    for outcome, *halved in zip(together, *apart, strict=True):
        for name in ("reward", "terminated", "truncated", "starts", "valid"):
            assert torch.equal(
                getattr(outcome, name), torch.cat([getattr(h, name) for h in halved])
            )
        for name, values in outcome.observation.items():
            assert torch.equal(values, torch.cat([h.observation[name] for h in halved]))
        for name, values in outcome.final.items():
            assert torch.equal(values, torch.cat([h.final[name] for h in halved]))


@every_counted
@pytest.mark.parametrize("steps", [0, 1, TIME_LIMIT - 1, 2 * TIME_LIMIT + 5])
def test_a_state_goes_on_bit_for_bit(opened: Make, maker: Maker, steps: int) -> None:
    env = opened(maker, place_of())
    observation = env.reset()
    for outcome in run(env, observation, steps):
        observation = outcome.observation
    state = {name: values.clone() for name, values in env.state().items()}
    assert all(len(values) == 4 for values in state.values())
    expected = run(env, observation, 2 * TIME_LIMIT, since=steps)

    again = opened(maker, place_of())
    restored = again.restore(state)
    assert restored is not None
    assert list(restored) == list(observation)
    for name, values in observation.items():
        assert torch.equal(values, restored[name])
    assert_same(run(again, restored, 2 * TIME_LIMIT, since=steps), expected)


@every_counted
def test_states_of_rows_can_be_put_together(opened: Make, maker: Maker) -> None:
    """Rows saved by two objects, padded with zeros, are restored into one: and it goes on."""
    halves = [opened(maker, place_of(2, first_env)) for first_env in (0, 2)]
    observations = [half.reset() for half in halves]
    ends = [run(half, seen, 5)[-1] for half, seen in zip(halves, observations, strict=True)]
    ends[1] = run(halves[1], ends[1].observation, 3, since=5)[-1]  # further than the first
    states = [half.state() for half in halves]
    whole = opened(maker, place_of())
    observation = whole.restore({name: _stacked([s[name] for s in states]) for name in states[0]})
    assert observation is not None
    for name, values in observation.items():
        assert torch.equal(values, torch.cat([end.observation[name] for end in ends]))


def _stacked(parts: list[Tensor]) -> Tensor:
    if parts[0].dim() == 1:
        return torch.cat(parts)
    longest = max(part.shape[1] for part in parts)
    padded = [part.new_zeros(len(part), longest, *part.shape[2:]) for part in parts]
    for into, part in zip(padded, parts, strict=True):
        into[:, : part.shape[1]] = part
    return torch.cat(padded)


@pytest.mark.parametrize("maker", [native_next_step, same_step], ids=["next-step", "same-step"])
def test_what_cannot_be_repeated_says_so(opened: Make, maker: Maker) -> None:
    env = opened(maker, place_of())
    for outcome in run(env, env.reset(), 5):
        last = outcome.observation
    again = opened(maker, place_of())
    assert again.restore(env.state()) is None
    with pytest.raises(RuntimeError, match="reset"):
        again.step(policy(again, last, 0))
    assert not _equal_rows(again.reset(), opened(maker, place_of()).reset()).any()


@every
def test_what_is_returned_is_never_written_again(opened: Make, maker: Maker) -> None:
    env = opened(maker, place_of())
    first = env.reset()
    kept = [first, {name: values.clone() for name, values in first.items()}]
    state = env.state()
    kept_state = {name: values.clone() for name, values in state.items()}
    outcomes, copies = [], []
    observation = first
    for step in range(2 * TIME_LIMIT):
        outcomes.append(env.step(policy(env, observation, step)))
        observation = outcomes[-1].observation
        copies.append({k: v.clone() for k, v in tensors_of(outcomes[-1]).items()})
    env.reset()
    for outcome, copied in zip(outcomes, copies, strict=True):
        for name, values in tensors_of(outcome).items():
            assert torch.equal(values, copied[name]), name
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in first)
    assert all(torch.equal(values, kept_state[name]) for name, values in state.items())


@every
def test_calls_in_the_wrong_order_name_the_remedy(opened: Make, maker: Maker) -> None:
    env = opened(maker, place_of())
    actions = torch.zeros(4, dtype=torch.int64)
    for call in (lambda: env.step(actions), env.state):
        with pytest.raises(RuntimeError, match=r"before reset: call reset\(\) or restore\(\)"):
            call()
    env.close()
    env.close()


@every
def test_a_state_of_another_number_of_environments_is_refused(opened: Make, maker: Maker) -> None:
    env, larger = opened(maker, place_of(2)), opened(maker, place_of(3))
    larger.reset()
    with pytest.raises(Exception, match="the state is of 3 environments, and there are 2"):
        env.restore(larger.state())


@every_counted
def test_a_state_of_another_seed_is_not_taken_for_this_one(opened: Make, maker: Maker) -> None:
    """Batched environments hold their state itself; the others notice that they cannot repeat."""
    env = opened(maker, place_of())
    observation = env.reset()
    again = opened(maker, dataclasses.replace(place_of(), seed=99))
    restored = again.restore(env.state())
    assert restored is None or _equal_rows(restored, observation).all()
