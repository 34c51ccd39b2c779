"""From the name of an agent's task to the task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.rank.named_task import find_class, make
from muster.rl.task import AgentTask


def find_agent_class(target: str) -> type[AgentTask]:
    """The class that ``target`` names; TargetError when it is no whole AgentTask."""
    hint = "write class MyAgent(muster.agents.AgentTask) with environments and policy."
    return find_class(target, AgentTask, hint)  # type: ignore[type-abstract]


def make_agent_task(target: str, config: str | None, values: Mapping[str, Any]) -> AgentTask:
    """A task with its own settings; see ``gang.named_task.make``."""
    return make(find_agent_class(target), target, config, values)
