"""What a policy is: parameters of a distribution over actions, and a value, with a memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from muster.rl.environment import ACTION_MASK, Observation
from muster.rl.sequences import SequencePlan
from muster.rl.statistics import Normaliser

#: A memory: tensors of shape [num_envs, ...]; empty for a policy without one.
State = dict[str, Tensor]


class PolicyOutput(NamedTuple):
    """``parameters``: [..., num_actions] logits (masked actions not yet removed) or [..., 2 x
    dimensions] mean and log of the standard deviation; ``value``: [...]; both float32 at least."""

    parameters: Tensor
    value: Tensor


class Policy(nn.Module, ABC):
    """Actor and critic over environments with a memory that is empty when an episode starts.

    ``normaliser`` holds the running statistics of what is observed; the learner updates it
    between rollouts, and only then: within a rollout and its update it stands still.
    """

    normaliser: Normaliser

    @abstractmethod
    def initial_state(self, num_envs: int, device: torch.device) -> State:
        """An empty memory: zeros."""

    @abstractmethod
    def act(
        self, observation: Observation, state: State, starts: Tensor
    ) -> tuple[PolicyOutput, State]:
        """One step of every environment.

        ``starts`` [num_envs] bool: the observation is the first of an episode, so the row's
        memory is emptied before it is used. Gives the memory after this observation.
        """

    @abstractmethod
    def forward(
        self, observation: Observation, state: State, starts: Tensor, plan: SequencePlan | None
    ) -> PolicyOutput:
        """The same over whole sequences: entries [steps, num_envs, ...], ``starts`` [steps,
        num_envs], ``state`` as it was before the first step. ``plan``: how ``starts`` cuts the
        sequences, where the caller knows it already."""

    def refresh(self, num_envs: int, num_steps: int) -> None:
        """The weights or the normaliser have changed, and about ``num_envs`` x ``num_steps`` calls
        of ``act`` follow: whatever does not depend on the environments' state can be computed
        ahead. Called under no_grad, before the first ``act``."""

    def watched(self, observation: Observation) -> dict[str, Tensor]:
        """The raw values, [rows, ...] by name, of which the normaliser keeps statistics."""
        return {
            name: values
            for name, values in observation.items()
            if name != ACTION_MASK and values.is_floating_point()
        }
