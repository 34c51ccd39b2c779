"""Policies: parameters of a distribution over actions, and a value, with a memory.

``Policy`` is the interface; ``ActorCritic`` and ``RecurrentPolicy`` are networks for it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from muster.base.errors import UsageError
from muster.rl.environment import ACTION_MASK, Actions, Discrete, EnvSpec, Observation
from muster.rl.sequences import SequencePlan, lstm_outputs, plan_sequences, step_lstm
from muster.rl.statistics import Normaliser

#: A memory: tensors of shape [num_envs, ...]; empty for a policy without one.
State = dict[str, Tensor]


class PolicyOutput(NamedTuple):
    """What a policy puts out for each step, in float32 at least.

    ``parameters``: [..., num_actions] logits (masked actions not yet removed) or [..., 2 x
    dimensions] mean and log of the standard deviation; ``value``: [...].
    """

    parameters: Tensor
    value: Tensor


class Policy(nn.Module, ABC):
    """Actor and critic over environments with a memory that is empty when an episode starts.

    ``normaliser`` holds the running statistics of what is observed; the learner updates it between
    rollouts, and only then: within a rollout and its update it does not change.
    """

    normaliser: Normaliser

    @abstractmethod
    def initial_state(self, num_envs: int, device: torch.device) -> State:
        """An empty memory: zeros."""

    @abstractmethod
    def act(
        self, observation: Observation, state: State, starts: Tensor
    ) -> tuple[PolicyOutput, State]:
        """Decide one step of every environment; returns the output and the memory after it.

        ``starts`` [num_envs] bool: the observation is the first of an episode, so the row's memory
        is emptied before it is used.
        """

    @abstractmethod
    def forward(
        self, observation: Observation, state: State, starts: Tensor, plan: SequencePlan | None
    ) -> PolicyOutput:
        """Compute what ``act`` does over whole sequences, with gradients.

        Entries are [steps, num_envs, ...], ``starts`` [steps, num_envs], and ``state`` is the
        memory before the first step. ``plan``: how ``starts`` cuts the sequences, where the caller
        knows it already.
        """

    def refresh(self, num_envs: int, num_steps: int) -> None:
        """Compute ahead what does not depend on the environments' state.

        It is called under no_grad when the weights or the normaliser have changed, before the first
        ``act``; about ``num_envs`` x ``num_steps`` decisions follow.
        """

    def watched(self, observation: Observation) -> dict[str, Tensor]:
        """The raw values of which the normaliser keeps statistics: [rows, ...] by name."""
        return {
            name: values
            for name, values in observation.items()
            if name != ACTION_MASK and values.is_floating_point()
        }


Memory = Literal["lstm", "none"]
_HIDDEN_GAIN = math.sqrt(2)


class ActorCritic(nn.Module):
    """Features [..., num_inputs] -> LSTM (unless memory is ``none``) -> tanh layers -> output.

    Actor and critic share nothing; with ``shared_core`` they share the LSTM. Weights start
    orthogonal with gain sqrt 2 (1 in the LSTMs, 0.01 before the distribution, 1 before the
    value) and biases at 0, as in Huang et al. 2022, "The 37 implementation details of PPO".
    The memory is {"actor_h", "actor_c", "critic_h", "critic_c"}, or {"shared_h", "shared_c"}.
    """

    def __init__(
        self,
        num_inputs: int,
        actions: Actions,
        *,
        memory: Memory = "lstm",
        hidden: int = 256,
        layers: tuple[int, ...] = (64, 64),
        shared_core: bool = False,
    ) -> None:
        super().__init__()
        names = ("shared", "shared") if shared_core else ("actor", "critic")
        self._actor_core, self._critic_core = names
        self.hidden = hidden
        self.cores = nn.ModuleDict()
        if memory == "lstm":
            self.cores.update(
                {name: orthogonal_lstm(num_inputs, hidden) for name in dict.fromkeys(names)}
            )
        width = hidden if self.cores else num_inputs
        is_discrete = isinstance(actions, Discrete)
        num_outputs = actions.num_actions if isinstance(actions, Discrete) else len(actions.low)
        self.actor = mlp((width, *layers, num_outputs), last_gain=0.01)
        self.critic = mlp((width, *layers, 1), last_gain=1.0)
        self.log_std = None if is_discrete else nn.Parameter(torch.zeros(num_outputs))

    def initial_state(self, num_envs: int, device: torch.device) -> State:
        dtype = next(self.parameters()).dtype
        return {
            f"{name}_{part}": torch.zeros(num_envs, self.hidden, device=device, dtype=dtype)
            for name in self.cores
            for part in "hc"
        }

    def act(self, features: Tensor, state: State, starts: Tensor) -> tuple[PolicyOutput, State]:
        """``features`` [num_envs, num_inputs]; see ``Policy.act``."""
        outputs, after = {}, dict(state)
        for name, core in self.cores.items():
            assert isinstance(core, nn.LSTM)
            held = state[f"{name}_h"], state[f"{name}_c"]
            h, c = step_lstm(core, features, held, starts)
            outputs[name] = h
            after[f"{name}_h"], after[f"{name}_c"] = at_least_float32(h), at_least_float32(c)
        return self._heads(features, outputs), after

    def forward(
        self, features: Tensor, state: State, starts: Tensor, plan: SequencePlan | None
    ) -> PolicyOutput:
        """``features`` [steps, num_envs, num_inputs]; see ``Policy.forward``."""
        outputs = {}
        if self.cores and plan is None:
            plan = plan_sequences(starts)
        for name, core in self.cores.items():
            assert isinstance(core, nn.LSTM)
            held = state[f"{name}_h"], state[f"{name}_c"]
            outputs[name] = lstm_outputs(core, features, held, starts, plan)
        return self._heads(features, outputs)

    def _heads(self, features: Tensor, outputs: dict[str, Tensor]) -> PolicyOutput:
        parameters = self.actor(outputs.get(self._actor_core, features))
        if self.log_std is not None:
            log_std = self.log_std.expand_as(parameters).to(parameters.dtype)
            parameters = torch.cat([parameters, log_std], dim=-1)
        value = self.critic(outputs.get(self._critic_core, features)).squeeze(-1)
        return PolicyOutput(at_least_float32(parameters), at_least_float32(value))


def orthogonal_lstm(num_inputs: int, hidden: int) -> nn.LSTM:
    """One layer with orthogonal weights and biases of 0."""
    core = nn.LSTM(num_inputs, hidden)
    for name, parameter in core.named_parameters():
        if name.startswith("weight"):
            nn.init.orthogonal_(parameter)
        else:
            nn.init.zeros_(parameter)
    return core


def mlp(widths: tuple[int, ...], *, last_gain: float | None) -> nn.Sequential:
    """Linear layers with tanh between them, and after the last one where ``last_gain`` is None."""
    parts: list[nn.Module] = []
    for place, (inputs, outputs) in enumerate(pairwise(widths)):
        is_last = place == len(widths) - 2
        linear = nn.Linear(inputs, outputs)
        gain = last_gain if is_last and last_gain is not None else _HIDDEN_GAIN
        nn.init.orthogonal_(linear.weight, gain)
        nn.init.zeros_(linear.bias)
        parts.append(linear)
        if not is_last or last_gain is None:
            parts.append(nn.Tanh())
    return nn.Sequential(*parts)


def at_least_float32(values: Tensor) -> Tensor:
    """Widen half precision to float32; leave float64 as it is."""
    return values if values.dtype == torch.float64 else values.float()


class RecurrentPolicy(Policy):
    """The entry "observation" (normalised) -> tanh layers, if any -> ``ActorCritic``.

    Without a memory, and with ``layers`` (64, 64), it is the default network of
    Stable-Baselines3's PPO. The encoder, where there is one, is shared by actor and critic.
    """

    def __init__(
        self,
        spec: EnvSpec,
        *,
        memory: Memory = "lstm",
        hidden: int = 256,
        encoder: tuple[int, ...] = (),
        layers: tuple[int, ...] = (64, 64),
        shared_core: bool = False,
    ) -> None:
        """Make the networks. Raises UsageError where environments are observed in another form."""
        super().__init__()
        width = _observed_width(spec)
        self.normaliser = Normaliser({"observation": (width,)})
        self.encoder = mlp((width, *encoder), last_gain=None)
        self.net = ActorCritic(
            encoder[-1] if encoder else width,
            spec.actions,
            memory=memory,
            hidden=hidden,
            layers=layers,
            shared_core=shared_core,
        )

    def initial_state(self, num_envs: int, device: torch.device) -> State:
        return self.net.initial_state(num_envs, device)

    def act(
        self, observation: Observation, state: State, starts: Tensor
    ) -> tuple[PolicyOutput, State]:
        return self.net.act(self._features(observation), state, starts)

    def forward(
        self, observation: Observation, state: State, starts: Tensor, plan: SequencePlan | None
    ) -> PolicyOutput:
        output: PolicyOutput = self.net(self._features(observation), state, starts, plan)
        return output

    def _features(self, observation: Observation) -> Tensor:
        normalised = self.normaliser("observation", observation["observation"])
        features: Tensor = self.encoder(normalised)
        return features


def _observed_width(spec: EnvSpec) -> int:
    seen = {name: entry for name, entry in spec.observation.items() if name != ACTION_MASK}
    entry = seen.get("observation")
    if (
        len(seen) != 1
        or entry is None
        or len(entry.shape) != 1
        or not entry.dtype.is_floating_point
    ):
        shown = ", ".join(f"{name} {tuple(e.shape)} {e.dtype}" for name, e in seen.items())
        raise UsageError(
            f"{spec.name} is observed as {shown or 'nothing'}; this policy takes one vector of "
            "floats named 'observation'.",
            hint="return a policy of your own from AgentTask.policy.",
        )
    return entry.shape[0]
