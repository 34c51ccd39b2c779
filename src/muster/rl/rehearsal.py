"""Before the first step of an agent: what is called at an evaluation and at the end, on little."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from muster.base.errors import MusterError, TargetError, UnknownNameError
from muster.base.trying import NotTried, check_storable
from muster.rank.process_group import Gang
from muster.rank.task import name_of, raise_together, rehearsing, tried
from muster.rl.environment import EnvSpec, Place, Split
from muster.rl.evaluation import try_steps
from muster.rl.policy import Policy
from muster.rl.task import AgentTask

_SPLITS: tuple[Split, ...] = ("val", "test")


def rehearse(
    task: AgentTask,
    policy: Policy,
    spec: EnvSpec,
    gang: Gang,
    seed: int,
    place_of: Callable[[Split], Place],
    say: Callable[[str], None],
) -> None:
    """A few steps in one environment of each split that is evaluated, the monitored number, and
    ``finish`` with a copy of the policy. Leaves no trace in the run.

    Raises TargetError, on every rank, where one of them fails.
    """
    note = ""
    error: MusterError | None = None
    has_finish = type(task).finish is not AgentTask.finish
    try:
        if task.monitor not in (known := ["return", "length", *spec.extras]):
            raise UnknownNameError("number to monitor", task.monitor, known)
        with rehearsing(task):
            acting = copy.deepcopy(policy)
            for split in _SPLITS:
                with tried(task.environments, is_sure=True):
                    env = task.environments(split, place_of(split))
                try:
                    with tried(env.step, is_sure=True):
                        try_steps(acting, env, device=gang.device)
                finally:
                    env.close()
            if gang.is_first and has_finish:
                with TemporaryDirectory(prefix="muster-rehearsal-") as folder:
                    acting.eval()
                    with tried(task.finish):
                        told = task.finish(acting, gang.device, seed, Path(folder))
                    if not isinstance(told or {}, Mapping):
                        raise TargetError(
                            f"{name_of(task.finish)} returns a {type(told).__name__}.",
                            hint="return a mapping of names to numbers and texts, or nothing.",
                        )
                    check_storable(name_of(task.finish), told)
    except NotTried as reason:
        note = str(reason)
    except MusterError as found:
        error = found
    raise_together(gang.council, error)
    if note:
        say(f"note       {note}; it is called again at the end")
    else:
        last = " and finish" if has_finish else ""
        say(f"rehearsal  environments of val and test{last} called once, for a few steps")
