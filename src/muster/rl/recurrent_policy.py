"""The policy for environments that are seen as one vector of numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from muster.base.errors import UsageError
from muster.rl.actor_critic import ActorCritic, Memory, mlp
from muster.rl.environment import ACTION_MASK, EnvSpec, Observation
from muster.rl.policy import Policy, PolicyOutput, State
from muster.rl.sequences import SequencePlan
from muster.rl.statistics import Normaliser


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
        """Raises UsageError where the environments are seen as anything else."""
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
