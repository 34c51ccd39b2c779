"""Collecting experience: some steps of every environment, kept on the device.

No step waits for the device: what depends on whether an episode has ended is masked, and the
values of final observations are computed once, after the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from muster.gang.precision import Precision
from muster.rl.distributions import distribution, draw
from muster.rl.environment import ACTION_MASK, EnvSpec, Observation, Place, VectorEnv
from muster.rl.phases import PhaseClock
from muster.rl.policy import Policy, State
from muster.rl.streams import ACTION


class Decision(NamedTuple):
    """What was done in a step; rows [num_envs]. ``state``: the memory after the observation."""

    actions: Tensor
    log_probs: Tensor
    value: Tensor
    state: State


class Actor:
    """A policy that acts: parameters to actions, with random numbers that are given."""

    def __init__(
        self, policy: Policy, spec: EnvSpec, precision: Precision, *, compiled: bool = False
    ) -> None:
        self.policy = policy
        self.spec = spec
        self._precision = precision
        decide: Callable[..., Decision] = self._decide
        if compiled:
            # On a GPU as a CUDA graph: the step is many small kernels, and starting them is
            # what takes the time.
            is_cuda = next(policy.parameters()).is_cuda
            decide = torch.compile(decide, mode="reduce-overhead" if is_cuda else "default")
        self._step = decide
        self._is_graph = compiled and next(policy.parameters()).is_cuda

    def __call__(
        self, observation: Observation, state: State, starts: Tensor, random: Tensor
    ) -> Decision:
        if not self._is_graph:
            return self._step(observation, state, starts, random)
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        made = self._step(observation, state, starts, random)
        # A graph writes its results into the same memory every time.
        return Decision(
            made.actions.clone(),
            made.log_probs.clone(),
            made.value.clone(),
            {name: value.clone() for name, value in made.state.items()},
        )

    def _decide(
        self, observation: Observation, state: State, starts: Tensor, random: Tensor
    ) -> Decision:
        with self._precision.autocast():
            output, after = self.policy.act(observation, state, starts)
        chances = distribution(self.spec.actions, output.parameters, observation.get(ACTION_MASK))
        actions = chances.sample(random)
        return Decision(actions, chances.log_prob(actions), output.value, after)

    def value(self, observation: Observation, state: State, starts: Tensor) -> Tensor:
        """V(observation) with the memory as it is before it."""
        with self._precision.autocast():
            output, _ = self.policy.act(observation, state, starts)
        return output.value


@dataclass(kw_only=True)
class Carry:
    """What goes from one rollout to the next; rows [num_envs].

    ``num_steps``: steps that every environment has made so far, the counter of the actions'
    random stream.
    """

    observation: Observation
    state: State
    starts: Tensor
    num_steps: int = 0


@dataclass(kw_only=True)
class Rollout:
    """T steps of N environments: tensors [T, N, ...].

    Attributes
        state: the memory before the first step, [N, ...].
        bootstrap: V(final observation) where truncated, 0 elsewhere.
        last_value: V of the observation after the last step, [N].
    """

    observation: Observation
    starts: Tensor
    actions: Tensor
    log_probs: Tensor
    values: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    extras: dict[str, Tensor]
    state: State
    bootstrap: Tensor
    last_value: Tensor

    @property
    def ended(self) -> Tensor:
        return self.terminated | self.truncated


@torch.no_grad()
def collect(
    env: VectorEnv,
    actor: Actor,
    carry: Carry,
    place: Place,
    num_steps: int,
    clock: PhaseClock,
) -> Rollout:
    """``num_steps`` steps of every environment; ``carry`` is brought forward.

    The random numbers of an action are those of (``place.seed``, number of the environment, steps
    it has made).
    """
    spec, num_envs = env.spec, place.num_envs
    random = _random_numbers(spec, place, carry.num_steps, num_steps)
    kept = _Columns(num_steps)
    finals = Finals(spec, num_steps, carry)
    start = {name: value.clone() for name, value in carry.state.items()}
    for t in range(num_steps):
        with clock.acting():
            made = actor(carry.observation, carry.state, carry.starts, random[t])
        with clock.stepping():
            outcome = env.step(made.actions)
        kept.put(t, "observation", carry.observation)
        kept.put(t, "", {
            "starts": carry.starts, "actions": made.actions, "log_probs": made.log_probs,
            "values": made.value, "rewards": outcome.reward, "terminated": outcome.terminated,
            "truncated": outcome.truncated, "valid": outcome.valid,
        })  # fmt: skip
        kept.put(t, "extras", outcome.extras)
        finals.keep(t, outcome.truncated, outcome.final, made.state)
        carry.observation, carry.state = outcome.observation, made.state
        carry.starts = outcome.starts
    carry.num_steps += num_steps
    with clock.acting():
        last_value = actor.value(carry.observation, carry.state, carry.starts)
        bootstrap = finals.values(actor, (num_steps, num_envs), last_value)
    return Rollout(
        observation=kept.group("observation"),
        extras=kept.group("extras"),
        state=start,
        bootstrap=bootstrap,
        last_value=last_value,
        **kept.group(""),
    )


def _random_numbers(spec: EnvSpec, place: Place, first: int, num_steps: int) -> Tensor:
    """[num_steps, num_envs, numbers per action], all at once: one call instead of one per step."""
    index = place.first_env + torch.arange(place.num_envs, device=place.device)
    counter = first + torch.arange(num_steps, device=place.device)
    rows = index.expand(num_steps, -1)
    return draw(spec.actions, place.seed, ACTION, rows, counter.unsqueeze(1).expand_as(rows))


class _Columns:
    """Named tensors [T, ...] that are filled step by step."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._groups: dict[str, dict[str, Tensor]] = {}

    def put(self, t: int, group: str, values: Mapping[str, Tensor]) -> None:
        columns = self._groups.setdefault(group, {})
        for name, value in values.items():
            if name not in columns:
                columns[name] = value.new_empty((self._num_steps, *value.shape))
            columns[name][t] = value

    def group(self, name: str) -> dict[str, Tensor]:
        return self._groups.get(name, {})


@dataclass
class Finals:
    """Final observations of truncated episodes, with the memory they are judged with.

    An environment can be truncated only so often in a rollout: there is room for that, filled by
    masked writes, so that the host never has to ask whether an episode has ended.
    """

    spec: EnvSpec
    num_steps: int
    carry: Carry
    _columns: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_slots = 1 + (self.num_steps - 1) // max(1, self.spec.min_truncation_steps)
        like = self.carry.starts
        self._rows = torch.arange(len(like), device=like.device)
        self._count = torch.zeros_like(self._rows)
        self._time = torch.full((self.num_slots, len(like)), -1, device=like.device)
        self._host_knows = like.device.type == "cpu"

    def keep(self, t: int, truncated: Tensor, final: Observation, state: State) -> None:
        """Where ``truncated``, keep ``final`` and ``state`` of step ``t``."""
        if self._host_knows and not bool(truncated.any()):
            return  # asking costs nothing on a CPU
        slot = self._count.clamp(max=self.num_slots - 1)
        where = (slot, self._rows)
        named = {f"o/{name}": value for name, value in final.items()}
        named |= {f"s/{name}": value for name, value in state.items()}
        for name, value in named.items():
            if name not in self._columns:
                self._columns[name] = value.new_zeros((self.num_slots, *value.shape))
            column = self._columns[name]
            mask = truncated.view(-1, *[1] * (value.dim() - 1))
            column[where] = torch.where(mask, value, column[where])
        self._time[where] = torch.where(truncated, t, self._time[where])
        self._count = self._count + truncated

    def values(self, actor: Actor, shape: tuple[int, int], like: Tensor) -> Tensor:
        """V of what was kept, [T, N], 0 elsewhere; the host waits here, once."""
        result = like.new_zeros(shape)
        slots, rows = (self._time >= 0).nonzero(as_tuple=True)
        if len(slots) == 0:
            return result
        chosen = {name: column[slots, rows] for name, column in self._columns.items()}
        final = {name[2:]: value for name, value in chosen.items() if name.startswith("o/")}
        state = {name[2:]: value for name, value in chosen.items() if name.startswith("s/")}
        starts = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        result[self._time[slots, rows], rows] = actor.value(final, state, starts)
        return result
