"""The one thing that a command may do before it has imported what it needs: start the agent."""

from __future__ import annotations

from muster.gang.launch import AgentHandle, start_agent
from muster.gang.topology import Meeting, read_meeting, read_topology

__all__ = ["AgentHandle", "Meeting", "read_meeting", "read_topology", "start_agent"]
