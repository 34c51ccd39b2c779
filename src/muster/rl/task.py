"""What is to be learnt by acting: the only thing a recipe has to write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from muster.rank.task import find_class, make
from muster.rl.environment import EnvSpec, Place, Split, VectorEnv
from muster.rl.policy import Policy


class AgentTask(ABC):
    """Environments and a policy. Made from its settings on every rank."""

    #: Settings of ``PpoConfig`` that suit this task; flags of the command line win.
    defaults: ClassVar[Mapping[str, Any]] = {}
    #: The number of an evaluation that decides about the best policy: ``return`` (mean return of
    #: an episode), ``length``, or the mean of an extra of the environment.
    monitor: ClassVar[str] = "return"
    better: ClassVar[Literal["lower", "higher"]] = "higher"
    #: The splits whose ``eval_episodes`` the best policy plays once more at the end. One that
    #: ``finish`` plays itself, on other episodes, is left out here: a result is there once.
    judged_on: ClassVar[tuple[Split, ...]] = ("val", "test")
    #: True while environments of "val" and "test" and ``finish`` are called once before the first
    #: step, to find their mistakes: whoever takes long does less, or nothing, then.
    rehearsing: bool = False

    @abstractmethod
    def environments(self, split: Split, place: Place) -> VectorEnv:
        """Environments of a split. Seeds of different splits are apart (the caller sees to it)."""

    @abstractmethod
    def policy(self, spec: EnvSpec) -> Policy:
        """A fresh policy, on the CPU. Called with the model seed set, the same on all ranks."""

    def identity(self) -> dict[str, str]:
        """What decides about the task beside its settings, such as a digest of its data. A training
        does not go on where this has become something else."""
        return {}

    def remarks(self) -> list[str]:
        """Sentences to show before the start."""
        return []

    def finish(
        self, policy: Policy, device: torch.device, seed: int, folder: Path
    ) -> Mapping[str, Any] | None:
        """Called on rank 0 at the end with the best policy on ``device``, in evaluation mode.

        ``folder`` takes figures and tables; what is returned goes to the results as it is, with
        ``metrics`` (split → numbers by name) beside those of the splits in ``judged_on``. It is
        called once before the first step as well, with a copy of the policy and a folder that is
        thrown away; ``self.rehearsing`` is True then.
        """
        return {}


def find_agent_class(target: str) -> type[AgentTask]:
    """The class that ``target`` names; TargetError when it is no whole AgentTask."""
    hint = "write class MyAgent(muster.agents.AgentTask) with environments and policy."
    return find_class(target, AgentTask, hint)  # type: ignore[type-abstract]


def make_agent_task(target: str, config: str | None, values: Mapping[str, Any]) -> AgentTask:
    """A task with its own settings; see ``rank.task.make``."""
    return make(find_agent_class(target), target, config, values)
