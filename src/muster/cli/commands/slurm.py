"""What goes to SLURM without a coordinator: ``muster sweep … --on slurm --array N``, one array; and
``muster slurm-script``, a batch script as a file, for people who edit it.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from muster.api.slurm.array import (
    Array,
    ArrayPlan,
    make_ready,
    part_of,
    plan_array,
    script_of,
    send,
)
from muster.api.start.options import SweepOptions
from muster.api.sweeps.workload import Workload
from muster.base.atomic_files import explain_os_error, write_atomic
from muster.base.errors import EXIT_OK, UnknownNameError, UsageError
from muster.base.flags import Flag
from muster.base.shown_text import count, shell_word
from muster.cli import output
from muster.cli.commands.sweep import flags_of_sweep, workload_of
from muster.cli.flags import job_digest, sweep_options
from muster.cli.main import COMMANDS, read_command
from muster.cli.parse import Parsed, parse_groups
from muster.farm.executors.cluster import ClusterRequest
from muster.run.folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class SlurmArray:
    """What would be sent."""

    plan: ArrayPlan
    workload: Workload
    options: SweepOptions
    argv: Sequence[str]

    def script(self) -> str:
        return script_of(self.plan, self.options)

    def make_ready(self) -> Path:
        """Make the run folder for a script that is sent by hand; where its output goes."""
        make_ready(self.plan, self.workload, self.options, self.argv)
        return self.plan.folder.job_files


def array_of(
    workload: Workload, options: SweepOptions, parsed: Parsed, argv: Sequence[str]
) -> SlurmArray:
    """The array that these flags mean; UsageError where they contradict each other."""
    if options.executor != "slurm":
        raise UsageError("--array has no effect without --on slurm.", hint="add --on slurm.")
    if parsed.sharing.part is not None:
        raise UsageError("--array and --part contradict each other.", hint="give one of them.")
    if options.cluster.num_workers != 1:
        raise UsageError("--array and --workers contradict each other.", hint="give one of them.")
    options.refuse_watching("nobody watches over all elements of an array", "give it a --time.")
    num_elements = parsed.sharing.array
    space = getattr(parsed, "space", None)
    offset = None if space is None or space.seeds != str(num_elements) else space.seed_offset
    plan = plan_array(workload, options, num_elements, offset)._replace(of=digest_of_array(parsed))
    return SlurmArray(plan=plan, workload=workload, options=options, argv=argv)


def digest_of_array(parsed: Parsed) -> str:
    return job_digest(parsed, ("space", "recipe"))


def element_of(array: Array, folder: RunFolder, number: int) -> tuple[Workload, SweepOptions]:
    """The tasks of an element of the run in ``folder``, and how it runs them: as a sweep of its own
    on the machine that SLURM has given it.
    """
    parsed = flags_of_sweep(array.argv[2:])
    if array.seed_offset is not None:
        space = parsed.make("space", seeds="1", seed_offset=array.seed_offset + number)
        workload = workload_of(dataclasses.replace(parsed, made={"space": space}))
    else:
        workload = part_of(workload_of(parsed), f"{number}/{array.elements}")
    options = dataclasses.replace(
        sweep_options(parsed), executor="local", cluster=ClusterRequest(), name=None,
        run_dir=folder.element(number).path, restart=False, allow_changed_code=False,
        log_to=(),  # a tracker would have each task twice: of its element, and of the whole run
    )  # fmt: skip
    return workload, options


def send_array(array: SlurmArray, run: Any) -> int:
    """Show the script, or send it and say how to go on."""
    if run.dry_run:
        text = array.script()
        if run.json:
            output.say_json({"run_dir": str(array.plan.folder.path), "script": text})
        else:
            output.say(text.rstrip())
            output.say("Nothing was sent (--dry-run).")
        return EXIT_OK
    run.refuse_detach("an array is sent, and the command returns at once", "leave it out.")
    plan, workload = array.plan, array.workload
    job_id = send(plan, workload, array.options, array.argv)
    path, num_elements = plan.folder.path, plan.num_elements
    if run.json:
        output.say_json({"job_id": job_id, "path": str(path), "elements": num_elements})
    elif not run.quiet:
        elements, tasks = count(num_elements, "element"), count(workload.total, "task")
        output.say(f"job {job_id}: {elements}, {tasks}, in {path}")
        output.say(f"Bring the results together: muster collect {shell_word(path)}")
        if log_to := ",".join(array.options.log_to):
            quoted = shell_word(path)
            output.say(f"Then send them to trackers: muster track {quoted} --log-to {log_to}")
    return EXIT_OK


#: command → the function that says what its flags would send.
_SCRIPTS = {
    "train": "muster.cli.commands.train:slurm_gang",
    "run": "muster.cli.commands.run:slurm_gang",
    "sweep": "muster.cli.commands.sweep:slurm_array",
}
_HELP = """Write the batch script that `muster train … --on slurm` would send, to edit and send it.

COMMAND is train, run or sweep with its own words, and --output may stand among its flags.

Examples:
  muster slurm-script train har --nodes 2 --gpus 4 --time 4:00:00
  muster slurm-script --output job.sh run --gpus 4 train.py --lr 1e-3
  muster slurm-script --output job.sh sweep train.py:run --seeds 100 --array 100 --time 1:00:00
"""


@dataclass(frozen=True, kw_only=True)
class FileFlags:
    """Where the script goes."""

    output: Annotated[Path | None, Flag(metavar="FILE", aliases=("o",))] = None
    """Write the script there, and the record of what it runs; else it is printed."""


def slurm_script(argv: list[str]) -> int:
    said = parse_groups({"file": FileFlags}, argv, "slurm-script", _HELP, program="COMMAND …")
    if not said.program:
        raise UsageError(
            "COMMAND is missing.", hint=f"say whose script to write: {', '.join(_SCRIPTS)}."
        )
    command, *words = said.program
    if command in COMMANDS and command not in _SCRIPTS:
        raise UsageError(
            f"muster {command} has no script of its own to send; {', '.join(_SCRIPTS)} have.",
            hint="with --on slurm it sends its workers' jobs itself." * (command == "map") or None,
        )
    if command not in _SCRIPTS:
        raise UnknownNameError("command", command, _SCRIPTS)
    parsed = read_command(["muster", command, *words], {"file": FileFlags})
    if (on := parsed.given("options").get("executor", "slurm")) != "slurm":
        raise UsageError(f"--on {on} and a script for SLURM contradict each other.")
    parsed.shown.refuse_detach("a job is nobody's foreground", "leave it out.")
    target = said.file.output or parsed.file.output
    job = _job(command, parsed.saying(("file.output",), executor="slurm"))
    text = job.script()
    if target is None:
        output.say(text.rstrip("\n"))
        output.remark("--output FILE writes the record that it runs as well; this has written none")
        return EXIT_OK
    try:
        place = job.make_ready()
        write_atomic(target, text.encode())
    except OSError as error:
        raise explain_os_error(
            error, "write the script", target, other="choose another --output"
        ) from error
    output.remark(f"{target}: send it with `sbatch {target}`; it prints to {place}")
    return EXIT_OK


def _job(command: str, parsed: Any) -> Any:
    module, _, function = _SCRIPTS[command].partition(":")
    return getattr(importlib.import_module(module), function)(parsed)
