"""Proves Muster on one GPU: what it promises there is done, measured and compared with its goals.

    scripts/gpu_acceptance                       # ten minutes on a machine with a GPU
    scripts/gpu_acceptance --only 5,6            # two of its steps
    scripts/gpu_acceptance --rehearse            # every step in a small form on the CPU: a minute
    scripts/gpu_acceptance --pack build/wheels   # on another machine, with network: see wheels.py

Each step is a process of its own with a limit of its own, so one that hangs costs the others
nothing. A step that needs more than the time left is left out, and said to be. Its outcome is one
line of JSON at once; the last things are a table of the steps and one of the goals, held or missed.
Exit code 0: every step that ran met its goals.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from acceptance import agent_steps, farm_steps, gang_steps, machine_steps, train_steps, wheels
from acceptance.here import GOALS, Here

ROOT = Path(__file__).parents[2]


class Step(NamedTuple):
    """``seconds``: what it needs on an H100; it is ended after half as much again."""

    number: int
    name: str
    seconds: int
    run: Callable[[Here], None]


STEPS = (
    Step(0, "machine", 15, machine_steps.machine),
    Step(1, "sampler is right", 40, machine_steps.sampler_tests),
    Step(2, "sampler is fast", 30, machine_steps.sampler_speed),
    Step(3, "sweep ssm fills the card", 60, farm_steps.sweep_ssm),
    Step(4, "training is exact", 70, train_steps.exact),
    Step(5, "training is fast", 90, train_steps.speed),
    Step(6, "saving costs little", 45, train_steps.saving),
    Step(7, "out of memory", 25, farm_steps.out_of_memory),
    Step(8, "packing", 45, farm_steps.packing),
    Step(9, "faults of devices", 25, farm_steps.faults),
    Step(10, "NCCL and FSDP, alone", 35, gang_steps.world_of_one),
    Step(11, "generation", 45, agent_steps.generation),
    Step(12, "agents", 45, agent_steps.agents),
    Step(13, "a hang is named", 30, gang_steps.hang),
    Step(14, "monitor and doctor", 30, machine_steps.monitor_and_doctor),
)
_REHEARSED_S = 5
_LONG_REHEARSALS = (4, 5, 6)


def main(argv: Sequence[str]) -> int:
    given = _parser().parse_args(argv)
    if given.pack is not None:
        return wheels.pack(given.pack)
    wheels.use(given.wheels)
    if given.step is not None:
        return _be_step(given)
    begin_s = time.monotonic()
    wanted = [step for step in STEPS if given.only is None or step.number in given.only]
    out: Path = given.out or Path(tempfile.mkdtemp(prefix="gpu-acceptance-"))
    out.mkdir(parents=True, exist_ok=True)

    def perform(step: Step) -> dict[str, Any]:
        left_s = given.deadline - (time.monotonic() - begin_s)
        found = _perform(step, left_s, out, rehearse=given.rehearse)
        line = json.dumps(found)
        print(line, flush=True)
        with (out / "steps.jsonl").open("a") as file:
            file.write(line + "\n")
        return found

    # In earnest nothing runs beside what is timed. A rehearsal, which has two cores in mind, begins
    # with the longest; a third one uses what the others leave while they wait.
    if given.rehearse:
        wanted.sort(key=lambda step: (step.number not in _LONG_REHEARSALS, step.number))
    with ThreadPoolExecutor(3 if given.rehearse else 1) as pool:
        found = sorted(pool.map(perform, wanted), key=lambda each: each["step"])
    print(_table(found), _goals(found, rehearse=given.rehearse), sep="\n")
    return int(any(each["status"] not in ("ok", "left out") for each in found))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deadline", type=float, default=570.0, help="seconds for all (570)")
    parser.add_argument("--only", type=_numbers, help="numbers of steps: 0,5,6")
    parser.add_argument("--out", type=Path, help="folder for the lines, logs and run folders")
    parser.add_argument("--rehearse", action="store_true", help="in small, on the CPU")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="fill a folder of wheels")
    parser.add_argument("--wheels", type=Path, default=ROOT / "build/wheels", help="that folder")
    parser.add_argument("--step", type=int, help=argparse.SUPPRESS)
    return parser


def _numbers(text: str) -> set[int]:
    return {int(part) for part in text.split(",")}


# ---------------------------------------------------------------------------- the parent of steps


def _perform(step: Step, left_s: float, out: Path, *, rehearse: bool) -> dict[str, Any]:
    """Run a step in a session of its own and say how it went."""
    head = {"step": step.number, "name": step.name}
    needs_s = _REHEARSED_S if rehearse else step.seconds
    if left_s < needs_s:
        said = f"it needs {needs_s} s, and {max(0.0, left_s):.0f} s are left"
        return {**head, "status": "left out", "error": said}
    limit_s = left_s if rehearse else min(left_s, 1.5 * step.seconds)
    folder = out / f"step-{step.number}"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(ROOT / "scripts/gpu_acceptance"), "--step", str(step.number)]
    command += ["--out", str(folder), *(["--rehearse"] if rehearse else [])]
    begin_s = time.monotonic()
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=Here(folder=folder, rehearse=rehearse).environment(),
            stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(limit_s)
        finally:
            _end_session(process)
    seconds = round(time.monotonic() - begin_s, 1)
    return {**head, "seconds": seconds, **_outcome(folder, process.returncode, limit_s)}


def _outcome(folder: Path, code: int, limit_s: float) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    except (OSError, ValueError):
        found = {}
    if code == 0:
        return {"status": "failed" if found.get("missed") else "ok", **found}
    tail = (folder / "output.txt").read_text(errors="replace").splitlines()[-12:]
    status = f"ended after {limit_s:.0f} s" if code == -signal.SIGKILL else "error"
    return {"status": status, **found, "error": "\n".join(tail)[-1500:]}


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """End whatever the step has left, in its own session or in those of its launchers."""
    if process.poll() is not None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return
    descendants = [process.pid]
    for pid in descendants:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):
                descendants += map(int, task.read_text().split())
    for pid in reversed(descendants):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _table(found: Sequence[dict[str, Any]]) -> str:
    lines = ["", f"{'step':>4}  {'name':26} {'status':18} {'s':>6}  missed"]
    for each in found:
        missed = "; ".join(each.get("missed", ())) or each.get("error", "").partition("\n")[0]
        status, seconds = each["status"], each.get("seconds", "")
        lines.append(f"{each['step']:>4}  {each['name']:26} {status:18} {seconds:>6}  {missed}")
    return "\n".join(lines)


def _goals(found: Sequence[dict[str, Any]], *, rehearse: bool) -> str:
    """What the project promises of a card, and whether this one shows it."""
    known = {name: value for each in found for name, value in each.get("goals", {}).items()}
    lines = ["", f"{'step':>4}  {'goal':48} {'wanted':14} {'value':>9}"]
    for goal in GOALS:
        value = known.get(goal.name)
        verdict = "not measured"
        if value is not None:
            verdict = "held" if goal.is_held(value) else "missed"
            verdict = "only rehearsed" if rehearse and goal.is_speed else verdict
        shown = "" if value is None else f"{value:g}"
        lines.append(f"{goal.step:>4}  {goal.name:48} {goal.wanted:14} {shown:>9}  {verdict}")
    return "\n".join(lines)


# -------------------------------------------------------------------------------------- the child


def _be_step(given: argparse.Namespace) -> int:
    step = next(each for each in STEPS if each.number == given.step)
    with Here(folder=given.out, rehearse=given.rehearse) as here:
        step.run(here)
    return 0
