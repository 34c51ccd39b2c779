"""What a rank of ``muster train`` does for an agent, from its parameters to its ending."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from muster.base.code import Code
from muster.base.codec import decode
from muster.gang.beacon import BEACON
from muster.gang.topology import Topology, read_topology
from muster.rank.life import (
    Interval,
    StopFlag,
    forget_word,
    leave_word,
    refusals_told,
    tell_finished,
)
from muster.rank.meter import is_out_of_memory
from muster.rank.process_group import joined
from muster.rank.record import open_record
from muster.rank.task import code_of_task
from muster.rl.config import PpoConfig
from muster.rl.loop import learn
from muster.rl.reporting import AgentReporter
from muster.rl.results import sum_up
from muster.rl.setup import prepare
from muster.rl.task import AgentTask, make_agent_task
from muster.rl.trouble import no_room_error
from muster.run.folder import RunFolder


def run_rank(
    *,
    task: str,
    task_config: str | None,
    task_values: Mapping[str, Any],
    config: Mapping[str, Any],
    folder: str,
    checkpoint_s: float | None,
    checkpoint_steps: int | None,
    num_devices: int,
    allow_changed_code: bool = False,
) -> None:
    """One rank, as the launcher starts it: everything it needs is JSON.

    A user's mistake ends the rank with exit code 2 or 3 and is written where the launcher finds
    it, without a traceback. ``num_devices`` is 1: a rank has one device.
    """
    place = RunFolder(Path(folder))
    with refusals_told(place):
        code = code_of_task(task)  # before it is imported
        train_agent(
            make_agent_task(task, task_config, task_values),
            decode(PpoConfig, config, ignore_unknown=True),
            place,
            read_topology(),
            print,
            checkpoint_s=checkpoint_s,
            checkpoint_steps=checkpoint_steps,
            num_devices=num_devices,
            code=code,
            allow_changed_code=allow_changed_code,
        )


def train_agent(
    task: AgentTask,
    config: PpoConfig,
    folder: RunFolder,
    topology: Topology | None,
    say: Callable[[str], None],
    *,
    checkpoint_s: float | None = 60.0,
    checkpoint_steps: int | None = None,
    num_devices: int = 1,
    is_cancelled: Callable[[], bool] = lambda: False,
    code: Code | None = None,
    allow_changed_code: bool = False,
) -> dict[str, Any] | None:
    """Train in this process as one rank; the results, or None when it was asked to stop."""
    with joined(topology, num_devices=num_devices) as gang, StopFlag(is_cancelled) as stop:
        speak = say if gang.is_first else _silent
        BEACON.phase = "setup"
        forget_word(folder, gang)
        with _memory_told(config, gang.device):
            run = prepare(
                task, config, gang, folder, speak,
                code=code or {}, allow_changed_code=allow_changed_code,
            )  # fmt: skip
        record = open_record(
            gang, folder, run.progress.steps, speak, with_tensorboard=config.tensorboard
        )
        reporter = AgentReporter(record, speak)
        interval = Interval(seconds=checkpoint_s, steps=checkpoint_steps, is_first=gang.is_first)
        try:
            with _memory_told(config, gang.device):
                ending = learn(run, stop, reporter, interval)
        finally:
            run.env.close()
            reporter.close()
        if ending.kind == "requeue":
            leave_word(folder, gang, run.progress.steps)
            speak(f"stopped    at step {run.progress.steps:,}, saved: {ending.why}")
            return None
        BEACON.phase = "finish"
        results = sum_up(run, ending.why)
        tell_finished(folder, gang)
        _say_results(results, speak)
        return results


@contextmanager
def _memory_told(config: PpoConfig, device: torch.device) -> Iterator[None]:
    """Out of memory as an error that says which settings take it."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise no_room_error(config, device, error) from None


def _say_results(results: Mapping[str, Any], say: Callable[[str], None]) -> None:
    for split, metrics in results["metrics"].items():
        say(f"{split:<10} {'  '.join(f'{k} {v:.4g}' for k, v in metrics.items())}")
    measured = results["measured"]
    if measured["steps_per_s"]:
        shares = ", ".join(
            f"{phase} {measured[f'{phase}_share']:.0%}"
            for phase in ("acting", "stepping", "learning")
        )
        say(f"speed      {measured['steps_per_s']:,.0f} environment steps/s ({shares})")


def _silent(text: str) -> None:
    return
