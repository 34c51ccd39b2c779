"""Actor and critic above a vector of features, each with an LSTM of its own or none."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from muster.rl.environment import Actions, Discrete
from muster.rl.policy import PolicyOutput, State
from muster.rl.sequences import SequencePlan, lstm_outputs, plan_sequences, step_lstm

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
    """Linear layers with tanh between them; after the last one too where ``last_gain`` is None."""
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
    """Half precision is widened; float64 stays."""
    return values if values.dtype == torch.float64 else values.float()
