"""Playing episodes to the end without learning from them, and a short rehearsal of that."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from muster.base.codec import check_storable
from muster.base.errors import MusterError, NotTried, TargetError, UnknownNameError, UsageError
from muster.rank.process_group import Gang
from muster.rank.task import name_of, raise_together, rehearsing, tried
from muster.rl import streams
from muster.rl.distributions import distribution, draw
from muster.rl.environment import (
    ACTION_MASK,
    EnvSpec,
    Observation,
    Outcome,
    Place,
    Split,
    VectorEnv,
    check_observation,
    check_outcome,
)
from muster.rl.policy import Policy
from muster.rl.statistics import interval
from muster.rl.task import AgentTask, make_environments

#: A player that needs no network: (observation, number of the step) -> actions.
Rule = Callable[[Observation, int], Tensor]
#: Steps on an accelerator between two checks whether all have ended: a check makes the host wait.
_STEPS_BETWEEN_LOOKS = 32


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """One whole episode each of the environments ``index`` (global numbers), on the CPU.

    Attributes
        index: int64 [num_episodes], ascending.
        returns: float64 [num_episodes], the sum of rewards.
        lengths: int64 [num_episodes], steps.
        terminated: bool [num_episodes]; the others were truncated.
        extras: float64 [num_episodes] by name.
        rewards: float64 [steps, num_episodes]; 0 after the end of an episode.
        first: the first observation of each episode.
    """

    index: Tensor
    returns: Tensor
    lengths: Tensor
    terminated: Tensor
    extras: dict[str, Tensor]
    rewards: Tensor
    first: Observation


def play(
    player: Policy | Rule,
    env: VectorEnv,
    *,
    deterministic: bool,
    seed: int,
    num_episodes: int,
    device: torch.device,
    first_env: int = 0,
    max_steps: int = 1_000_000,
) -> Episodes:
    """Play the first episode of each of the first ``num_episodes`` environments.

    Exactly one episode per environment: to take whichever end first would favour the short ones.
    Environments whose episode has ended go on, uncounted, until all have. The memory is carried
    through an episode and empty at its start; the normaliser does not change. ``env`` is reset and
    has at least ``num_episodes`` environments, the first of which has the global number
    ``first_env``; sampled actions depend on (``seed``, global number, step) only. The policy is
    on ``device``; a rule gets observations where the environments are. Raises UsageError where
    an episode has not ended after ``max_steps``.
    """
    spec = env.spec
    if not 0 < num_episodes <= spec.num_envs:
        raise UsageError(
            f"Cannot play {num_episodes} episodes at once on {spec.num_envs} environments of "
            f"{spec.name}: each plays one."
        )
    observation = env.reset()
    home = next(iter(observation.values())).device
    choose: Rule = player
    tally = _Tally(spec, num_episodes, observation)
    with torch.no_grad(), _evaluating(player):
        if isinstance(player, Policy):
            choose = _PolicyPlayer(player, spec, deterministic, seed, first_env, device)
        for step in range(max_steps):
            outcome = env.step(choose(observation, step).to(home))
            tally.add(outcome)
            observation = outcome.observation
            if isinstance(choose, _PolicyPlayer):
                choose.starts = outcome.starts
            is_look_due = home.type == "cpu" or step % _STEPS_BETWEEN_LOOKS == 0
            if is_look_due and not bool(tally.running.any()):
                return tally.episodes(first_env)
    raise UsageError(
        f"An episode of {spec.name} has not ended after {max_steps:,} steps.",
        hint="give the environment a time limit (max_episode_steps where it is registered).",
    )


def try_steps(policy: Policy, env: VectorEnv, *, device: torch.device, num_steps: int = 3) -> None:
    """Take a few steps of ``policy`` in ``env``, to see that they work."""
    who = f"The environments {env.spec.name!r}"
    observation = env.reset()
    check_observation(who, env.spec, observation)
    home = next(iter(observation.values())).device
    with torch.no_grad(), _evaluating(policy):
        player = _PolicyPlayer(policy, env.spec, True, 0, 0, device)
        for step in range(num_steps):
            outcome = env.step(player(observation, step).to(home))
            check_outcome(who, env.spec, outcome)
            if bool(outcome.truncated.any()):
                check_observation(who, env.spec, outcome.final, "step, final")
            observation, player.starts = outcome.observation, outcome.starts


def summary(episodes: Episodes, confidence: float = 0.95) -> dict[str, Any]:
    """Mean and t-interval of returns, lengths and extras, as JSON values by name."""
    values = {"return": episodes.returns, "length": episodes.lengths, **episodes.extras}
    return {
        "episodes": len(episodes.index),
        "terminated": int(episodes.terminated.sum()),
        **{
            name: interval(found, confidence, low=1.0 if name == "length" else -math.inf).record()
            for name, found in values.items()
        },
    }


class _PolicyPlayer:
    """A policy and its memory, made a `Rule`."""

    def __init__(
        self,
        policy: Policy,
        spec: EnvSpec,
        deterministic: bool,
        seed: int,
        first_env: int,
        device: torch.device,
    ) -> None:
        self._policy, self._actions, self._device = policy, spec.actions, device
        self._deterministic, self._seed = deterministic, seed
        self._index = first_env + torch.arange(spec.num_envs, device=device)
        self._state = policy.initial_state(spec.num_envs, device)
        self.starts = torch.ones(spec.num_envs, dtype=torch.bool, device=device)
        policy.refresh(spec.num_envs, spec.min_truncation_steps)

    def __call__(self, observation: Observation, step: int) -> Tensor:
        here = {name: values.to(self._device) for name, values in observation.items()}
        starts = self.starts.to(self._device)
        output, self._state = self._policy.act(here, self._state, starts)
        choice = distribution(self._actions, output.parameters, here.get(ACTION_MASK))
        if self._deterministic:
            return choice.mode()
        return choice.sample(draw(self._actions, self._seed, streams.EVALUATION, self._index, step))


class _Tally:
    """The sums of each episode so far; rows beyond ``num`` are not counted."""

    def __init__(self, spec: EnvSpec, num: int, first: Observation) -> None:
        self._num = num
        device = next(iter(first.values())).device
        self._first = {name: values[:num].cpu() for name, values in first.items()}
        self.running = torch.ones(num, dtype=torch.bool, device=device)
        self._terminated = torch.zeros_like(self.running)
        self._lengths = torch.zeros(num, dtype=torch.int64, device=device)
        self._extras = {
            name: torch.zeros(num, dtype=torch.float64, device=device) for name in spec.extras
        }
        self._rewards: list[Tensor] = []

    def add(self, outcome: Outcome) -> None:
        num, terminated = self._num, outcome.terminated[: self._num]
        counted = self.running & outcome.valid[:num]
        ended = counted & (terminated | outcome.truncated[:num])
        self._rewards.append(torch.where(counted, outcome.reward[:num].double(), 0.0))
        self._lengths = self._lengths + counted
        self._terminated = self._terminated | (ended & terminated)
        self._extras = {
            name: torch.where(ended, outcome.extras[name][:num].double(), kept)
            for name, kept in self._extras.items()
        }
        self.running = self.running & ~ended

    def episodes(self, first_env: int) -> Episodes:
        lengths = self._lengths.cpu()
        rewards = torch.stack(self._rewards)[: int(lengths.max())].cpu()
        return Episodes(
            index=first_env + torch.arange(self._num),
            returns=rewards.sum(0),
            lengths=lengths,
            terminated=self._terminated.cpu(),
            extras={name: values.cpu() for name, values in self._extras.items()},
            rewards=rewards,
            first=self._first,
        )


@contextmanager
def _evaluating(player: Policy | Rule) -> Iterator[None]:
    """Put a policy in evaluation mode, and back afterwards."""
    if not isinstance(player, Policy):
        yield
        return
    was_training = player.training
    player.eval()
    try:
        yield
    finally:
        player.train(was_training)


_SPLITS: tuple[Split, ...] = ("val", "test")


def rehearse(
    task: AgentTask,
    policy: Policy,
    spec: EnvSpec,
    gang: Gang,
    seed: int,
    place_of: Callable[[Split], Place],
    say: Callable[[str], None],
) -> None:
    """Try what is called later: a few steps of each split that is evaluated, and ``finish``.

    The monitored number is looked up in the result, and ``finish`` gets a copy of the policy.
    Leaves no trace in the run.

    Raises TargetError, on every rank, where one of them fails.
    """
    note = ""
    error: MusterError | None = None
    has_finish = type(task).finish is not AgentTask.finish
    try:
        if task.monitor not in (known := ["return", "length", *spec.extras]):
            raise UnknownNameError("number to monitor", task.monitor, known)
        with rehearsing(task):
            acting = copy.deepcopy(policy)
            for split in _SPLITS:
                with tried(task.environments, is_sure=True):
                    env = make_environments(task, split, place_of(split))
                try:
                    with tried(env.step, is_sure=True):
                        try_steps(acting, env, device=gang.device)
                finally:
                    env.close()
            if gang.is_first and has_finish:
                with TemporaryDirectory(prefix="muster-rehearsal-") as folder:
                    acting.eval()
                    with tried(task.finish):
                        found = task.finish(acting, gang.device, seed, Path(folder))
                    if not isinstance(found or {}, Mapping):
                        raise TargetError(
                            f"{name_of(task.finish)} returns a {type(found).__name__}.",
                            hint="return a mapping of names to numbers and texts, or nothing.",
                        )
                    check_storable(name_of(task.finish), found)
    except NotTried as reason:
        note = str(reason)
    except MusterError as mistake:
        error = mistake
    raise_together(gang.council, error)
    if note:
        say(f"note       {note}; it is called again at the end")
    else:
        last = " and finish" if has_finish else ""
        say(f"rehearsal  environments of val and test{last} called once, for a few steps")
