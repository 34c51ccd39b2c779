"""The one thing a command may do before it has imported what it needs: start the supervisor."""

from __future__ import annotations

from muster.gang.launch import SupervisorHandle, start_supervisor
from muster.gang.topology import Meeting, read_meeting, read_topology

__all__ = ["SupervisorHandle", "Meeting", "read_meeting", "read_topology", "start_supervisor"]
