"""The task of an agent, the only thing that a recipe has to write: what is learnt by acting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from muster.base.errors import TargetError
from muster.rank.task import find_class, make, name_of
from muster.rl.environment import EnvSpec, Place, Split, VectorEnv, check_spec
from muster.rl.policy import Policy


class AgentTask(ABC):
    """Environments and a policy; every rank makes one from its settings."""

    #: Settings of ``PpoConfig`` that suit this task; flags of the command line win.
    defaults: ClassVar[Mapping[str, Any]] = {}
    #: The number of an evaluation that decides about the best policy: ``return`` (mean return of
    #: an episode), ``length``, or the mean of an extra of the environment.
    monitor: ClassVar[str] = "return"
    better: ClassVar[Literal["lower", "higher"]] = "higher"
    #: The splits whose ``eval_episodes`` the best policy plays once more at the end. One that
    #: ``finish`` plays itself, on other episodes, is left out, so that no result is there twice.
    judged_on: ClassVar[tuple[Split, ...]] = ("val", "test")
    #: True while environments of "val" and "test" and ``finish`` are called once before the first
    #: step, to find their mistakes: a method that takes long should do less then.
    rehearsing: bool = False

    @abstractmethod
    def environments(self, split: Split, place: Place) -> VectorEnv:
        """Make the environments of a split; ``place.seed`` differs between splits."""

    @abstractmethod
    def policy(self, spec: EnvSpec) -> Policy:
        """Make a new policy, on the CPU. It is called with the same seed set on all ranks."""

    def identity(self) -> dict[str, str]:
        """What decides about the task beside its settings, such as a digest of its data, by name.

        A training is refused where this has changed since it began.
        """
        return {}

    def remarks(self) -> list[str]:
        """Sentences to show before the first step."""
        return []

    def finish(
        self, policy: Policy, device: torch.device, seed: int, folder: Path
    ) -> Mapping[str, Any] | None:
        """Do what is left at the end: called on rank 0 with the best policy, in evaluation mode.

        The policy is on ``device``. ``folder`` is for figures and tables; what is returned goes to
        the results as it is, with ``metrics`` (split → numbers by name) beside those of the splits
        in ``judged_on``. It is called once before the first step as well, with a copy of the policy
        and a folder that is removed; ``self.rehearsing`` is True then.
        """
        return {}


def make_environments(task: AgentTask, split: Split, place: Place) -> VectorEnv:
    """What the task makes for a split; TargetError where it is no environments."""
    env = task.environments(split, place)
    if not isinstance(getattr(env, "spec", None), EnvSpec):
        raise TargetError(
            f"{name_of(task.environments)} gave {type(env).__name__} for {split!r}, which has no "
            "spec of muster.agents.EnvSpec.",
            hint="return muster.agents.make_gymnasium(…), or a VectorEnv of your own.",
        )
    check_spec(f"The environments of {type(task).__name__}", env.spec, place.num_envs)
    return env


def find_agent_class(target: str) -> type[AgentTask]:
    """The class that ``target`` names. Raises TargetError where it is not a complete AgentTask."""
    hint = "write class MyAgent(muster.agents.AgentTask) with environments and policy."
    return find_class(target, AgentTask, hint)  # type: ignore[type-abstract]


def make_agent_task(target: str, config: str | None, values: Mapping[str, Any]) -> AgentTask:
    """Make a task from its own settings; see ``rank.task.make``."""
    return make(find_agent_class(target), target, config, values)
