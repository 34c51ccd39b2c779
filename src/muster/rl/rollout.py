"""Collecting experience: some steps of every environment, kept on the device.

No step waits for the device: what depends on whether an episode has ended is masked, and the
values of final observations are computed once, after the last step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from muster.base.errors import UsageError
from muster.rank.precision import Precision
from muster.rl.distributions import distribution, draw
from muster.rl.environment import (
    ACTION_MASK,
    EnvSpec,
    Observation,
    Place,
    VectorEnv,
    as_number,
    check_masks,
    check_observation,
    check_outcome,
    check_same_kind,
)
from muster.rl.policy import Policy, State
from muster.rl.streams import ACTION


class PhaseClock:
    """Seconds per phase since ``take``; on a GPU they are measured by events, without a wait."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, Any, Any]] = []

    @contextmanager
    def measure(self, phase: Literal["acting", "stepping", "learning"]) -> Iterator[None]:
        """Add the time that is spent inside to ``phase``."""
        if self._is_cuda:
            make: Any = torch.cuda.Event
            first, last = make(enable_timing=True), make(enable_timing=True)
            first.record()
            yield
            last.record()
            self._events.append((phase, first, last))
            return
        began = time.perf_counter()
        yield
        spent = time.perf_counter() - began
        self._seconds[phase] = self._seconds.get(phase, 0.0) + spent

    def take(self) -> dict[str, float]:
        """Return the seconds by phase and start anew; on a GPU the host waits here."""
        for phase, first, last in self._events:
            last.synchronize()
            spent = first.elapsed_time(last) / 1e3
            self._seconds[phase] = self._seconds.get(phase, 0.0) + spent
        self._events.clear()
        seconds, self._seconds = self._seconds, {}
        return seconds


class Decision(NamedTuple):
    """What was done in a step; rows [num_envs]. ``state``: the memory after the observation."""

    actions: Tensor
    log_probs: Tensor
    value: Tensor
    state: State


class Actor:
    """A policy that acts: it turns parameters into actions, with random numbers it is given."""

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
    """Take ``num_steps`` steps of every environment; ``carry`` is updated for the next rollout.

    The random numbers of an action are those of (``place.seed``, number of the environment, steps
    it has made).
    """
    spec = env.spec
    random = _random_numbers(spec, place, carry.num_steps, num_steps)
    who = f"The environments {spec.name!r}"
    observation: dict[str, Tensor] = {}
    acted: dict[str, Tensor] = {}
    outcomes: dict[str, Tensor] = {}
    extras: dict[str, Tensor] = {}
    keep = partial(_keep, who, num_steps)
    waits = place.device.type == "cpu"
    finals = Finals(spec, num_steps, carry.starts, waits=waits)
    start = {name: value.clone() for name, value in carry.state.items()}
    for t in range(num_steps):
        # Before the step, which may write into all that it has returned so far.
        keep(t, observation, carry.observation)
        with clock.measure("acting"):
            made = actor(carry.observation, carry.state, carry.starts, random[t])
        keep(t, acted, {
            "starts": carry.starts, "actions": made.actions, "log_probs": made.log_probs,
            "values": made.value,
        })  # fmt: skip
        with clock.measure("stepping"):
            outcome = env.step(made.actions)
        if t == 0:
            check_outcome(who, spec, outcome)
        keep(t, outcomes, {
            "rewards": as_number(outcome.reward), "terminated": outcome.terminated,
            "truncated": outcome.truncated, "valid": outcome.valid,
        })  # fmt: skip
        keep(t, extras, {name: outcome.extras[name] for name in spec.extras})
        finals.keep(t, outcome.truncated, outcome.final, made.state)
        carry.observation, carry.state = outcome.observation, made.state
        carry.starts = outcome.starts
    check_masks(who, observation, outcomes["valid"])
    carry.num_steps += num_steps
    with clock.measure("acting"):
        last_value = actor.value(carry.observation, carry.state, carry.starts)
        bootstrap = finals.values(actor, last_value)
    return Rollout(
        observation=observation,
        extras=extras,
        state=start,
        bootstrap=bootstrap,
        last_value=last_value,
        **acted,
        **outcomes,
    )


def _random_numbers(spec: EnvSpec, place: Place, first: int, num_steps: int) -> Tensor:
    """[num_steps, num_envs, numbers per action], all at once: one call instead of one per step."""
    index = place.first_env + torch.arange(place.num_envs, device=place.device)
    counter = first + torch.arange(num_steps, device=place.device)
    rows = index.expand(num_steps, -1)
    return draw(spec.actions, place.seed, ACTION, rows, counter.unsqueeze(1).expand_as(rows))


def _keep(
    who: str, num_steps: int, t: int, columns: dict[str, Tensor], values: Mapping[str, Tensor]
) -> None:
    """Copy the ``values`` of step ``t`` into their ``columns`` [num_steps, ...], for an environment
    or a policy may use its buffers again. TargetError where they are not as the first ones were.
    """
    if t == 0:
        first = values.items()
        columns.update((name, value.new_empty((num_steps, *value.shape))) for name, value in first)
    for name, column in columns.items():
        check_same_kind(who, name, column[t], values.get(name))
        column[t].copy_(values[name])


class Finals:
    """Final observations of truncated episodes, with the memory they are judged with.

    On a CPU the host knows which episodes have ended, and the observations are kept as they come.
    On a GPU it would have to wait for that: there an environment has as many slots as it can be
    truncated in a rollout, and they are filled by masked writes.
    """

    def __init__(self, spec: EnvSpec, num_steps: int, starts: Tensor, *, waits: bool) -> None:
        """``starts`` [num_envs]: for its length and device. ``waits``: the host may wait."""
        self._spec, self._num_steps, self._waits = spec, num_steps, waits
        self._who = f"The environments {spec.name!r}"
        self.num_slots = 1 + (num_steps - 1) // max(1, spec.min_truncation_steps)
        self._rows = torch.arange(len(starts), device=starts.device)
        self._count = torch.zeros_like(self._rows)
        self._time = torch.full((self.num_slots, len(starts)), -1, device=starts.device)
        #: Whether an episode was truncated in a step without any final observation.
        self._is_lacking = torch.zeros((), dtype=torch.bool, device=starts.device)
        self._columns: dict[str, Tensor] = {}
        self._kept: list[tuple[int, Tensor, dict[str, Tensor]]] = []

    def keep(self, t: int, truncated: Tensor, final: Observation, state: State) -> None:
        """Keep ``final`` and ``state`` of step ``t`` where an episode was ``truncated``.

        ``final`` may be empty where none was. Raises TargetError where it is not as the spec says.
        """
        rows = truncated.nonzero().squeeze(1) if self._waits else self._rows
        if self._waits and len(rows) == 0:
            return
        if not self._waits and not final:
            self._is_lacking = self._is_lacking | truncated.any()
            return
        check_observation(self._who, self._spec, final, "step, final")
        named = {f"o/{name}": value for name, value in final.items()}
        named |= {f"s/{name}": value for name, value in state.items()}
        if self._waits:
            self._kept.append((t, rows, {name: value[rows] for name, value in named.items()}))
            return
        slot = self._count.clamp(max=self.num_slots - 1)
        where = (slot, self._rows)
        for name, value in named.items():
            if name not in self._columns:
                self._columns[name] = value.new_zeros((self.num_slots, *value.shape))
            column = self._columns[name]
            mask = truncated.view(-1, *[1] * (value.dim() - 1))
            column[where] = torch.where(mask, value, column[where])
        self._time[where] = torch.where(truncated, t, self._time[where])
        self._count = self._count + truncated

    def values(self, actor: Actor, like: Tensor) -> Tensor:
        """V of the kept observations, [num_steps, num_envs], 0 elsewhere; the host waits once."""
        result = like.new_zeros((self._num_steps, len(self._rows)))
        times, rows, chosen = self._gathered()
        if len(rows) == 0:
            return result
        final = {name[2:]: value for name, value in chosen.items() if name.startswith("o/")}
        state = {name[2:]: value for name, value in chosen.items() if name.startswith("s/")}
        starts = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        result[times, rows] = actor.value(final, state, starts).to(result.dtype)
        return result

    def _gathered(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Steps, environments, and what was kept of them."""
        if self._waits:
            if not self._kept:
                return self._rows[:0], self._rows[:0], {}
            times = torch.cat([torch.full_like(rows, t) for t, rows, _ in self._kept])
            names = self._kept[0][2]
            columns = {name: torch.cat([part[name] for *_, part in self._kept]) for name in names}
            return times, torch.cat([rows for _, rows, _ in self._kept]), columns
        if bool(self._is_lacking):
            check_observation(self._who, self._spec, {}, "step, final")
        if int(self._count.max()) > self.num_slots:
            raise UsageError(
                f"{self._spec.name} was truncated {int(self._count.max())} times in "
                f"{self._num_steps} steps; its spec says min_truncation_steps="
                f"{self._spec.min_truncation_steps}.",
                hint="give EnvSpec the length of the shortest episode that is truncated.",
            )
        slots, rows = (self._time >= 0).nonzero(as_tuple=True)
        found = {name: column[slots, rows] for name, column in self._columns.items()}
        return self._time[slots, rows], rows, found
