"""What a rank of ``muster train`` does, from its parameters to its ending."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from muster.base.code import Code
from muster.base.codec import decode, write_json
from muster.base.errors import MusterError
from muster.gang.beacon import BEACON
from muster.gang.topology import Topology, read_topology
from muster.rank.life import (
    Interval,
    StartAgain,
    StopFlag,
    forget_word,
    leave_word,
    refusals_told,
    tell_finished,
)
from muster.rank.meter import is_out_of_memory, remember_micro_batch
from muster.rank.process_group import joined
from muster.rank.record import open_record
from muster.rank.task import code_of_task
from muster.run.folder import RunFolder
from muster.train.config import TrainConfig
from muster.train.diagnose import no_room_error, out_of_memory_error
from muster.train.loop import fit
from muster.train.reporting import Reporter
from muster.train.results import sum_up
from muster.train.setup import Training, prepare
from muster.train.task import Task, make_task
from muster.train.verify import verify


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
    """One rank of a training, as the launcher starts it: everything it needs is JSON.

    A user's mistake ends the rank with exit code 2 or 3 and is written where the launcher finds
    it, without a traceback.
    """
    place = RunFolder(Path(folder))
    with refusals_told(place):
        code = code_of_task(task)  # before it is imported
        train(
            make_task(task, task_config, task_values),
            decode(TrainConfig, config, ignore_unknown=True),
            place,
            read_topology(),
            print,
            checkpoint_s=checkpoint_s,
            checkpoint_steps=checkpoint_steps,
            num_devices=num_devices,
            code=code,
            allow_changed_code=allow_changed_code,
        )


def verify_rank(
    *,
    task: str,
    task_config: str | None,
    task_values: Mapping[str, Any],
    config: Mapping[str, Any],
    folder: str,
    **_: Any,
) -> None:
    """One rank of ``muster verify``; rank 0 leaves the findings in the folder."""
    place = RunFolder(Path(folder))
    with refusals_told(place), joined(read_topology()) as gang:
        made = make_task(task, task_config, task_values)
        say = print if gang.is_first else _silent
        findings = verify(made, decode(TrainConfig, config, ignore_unknown=True), gang, say)
        if gang.is_first:
            write_json(place.verify_json, findings)


def train(
    task: Task,
    config: TrainConfig,
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
        try:
            run = prepare(
                task, config, gang, folder, speak,
                code=code or {}, allow_changed_code=allow_changed_code,
            )  # fmt: skip
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise no_room_error(gang.device, error) from None
        record = open_record(
            gang, folder, run.progress.step, speak, with_tensorboard=config.tensorboard
        )
        reporter = Reporter(record, speak)
        interval = Interval(seconds=checkpoint_s, steps=checkpoint_steps, is_first=gang.is_first)
        try:
            ending = fit(run, stop, reporter, interval)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise _smaller_next_time(run, error) from None
        finally:
            run.feed.close()
            reporter.close()
        if ending.kind == "requeue":
            leave_word(folder, gang, run.progress.step, run.limits.total_steps)
            speak(f"stopped    at step {run.progress.step}, saved: {ending.why}")
            return None
        BEACON.phase = "finish"
        results = sum_up(run, ending.why)
        tell_finished(folder, gang)
        _say_results(results, speak)
        return results


def _smaller_next_time(run: Training, error: Exception) -> MusterError:
    """Out of memory where the ranks cannot recover together: all start anew with half of it.

    That is so for a sharded model, whose collectives cannot be finished by a rank that has lost
    its activations. The launcher starts the gang again, from the last checkpoint.
    """
    smaller = run.plan.halved()
    if smaller is None:
        return out_of_memory_error(run, error)
    remember_micro_batch(
        run.folder.memory_json, smaller.micro_batch, smaller.global_batch, smaller.num_ranks
    )
    return StartAgain(
        f"memory     ran out with micro-batches of {run.plan.micro_batch}; starting again with "
        f"{smaller} from the last checkpoint"
    )


def _say_results(results: Mapping[str, Any], say: Callable[[str], None]) -> None:
    if results["reported"] == "last":
        say("model      the last one, not the best by the validation data")
    for split, metrics in results["metrics"].items():
        shown = "  ".join(f"{k} {v:.4f}" for k, v in metrics.items() if isinstance(v, int | float))
        say(f"{split:<10} {shown}")
    measured = results["measured"]
    if measured["samples_per_s"]:
        steps = f"{measured['steps']:,} step{'s' * (measured['steps'] != 1)}"
        say(f"speed      {measured['samples_per_s']:,.0f} samples/s over {steps}")


def _silent(text: str) -> None:
    return
