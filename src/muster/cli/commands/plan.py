"""``muster plan``: what it will take and cost, before hours are spent on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from muster.api.look.listing import find_run
from muster.api.look.plan import known_model, known_task, plan_memory, plan_sweep, plan_training
from muster.api.runs import Run
from muster.base.errors import EXIT_OK, EXIT_SOME_FAILED, SetupError, UnknownNameError, UsageError
from muster.base.flags import Flag
from muster.base.settings import read_settings
from muster.base.shown_text import shell_word
from muster.cli import output, screens
from muster.cli.flags import JsonFlags
from muster.cli.parse import parse_groups
from muster.cli.recipes import AGENTS, TASKS
from muster.plan.compare import compare_run, has_plan, store_plan
from muster.plan.inputs import Known
from muster.plan.prices import FILE_NAME, read_prices, write_prices
from muster.plan.request import PlanRequest
from muster.run.folder import RunFolder

_HELP = f"""Predict step time, speed-up, wall time, energy and money for 1 to N devices.

WHAT is a task of `muster train` ({", ".join(sorted(TASKS))}, file.py:Class), a model (params=7e9,
hf:config.json), or a run: of a sweep, to see how long it takes with other numbers of workers; of a
training with a plan, to see predicted against measured. Flags of a task come after --.

Every number has its origin: measured (here, or in that run), given (by you), table (a data sheet)
or assumed. A prediction is as good as the weakest of what went into it.

Examples:
  muster plan digits --calibrate --devices cpu:2 --global-batch 64
  muster plan har --calibrate --devices 8 -- --mode flatten
  muster plan params=7e9 --flops-per-sample 8.6e13 --devices "H100 SXM x8" --global-batch 512 \\
      --samples 1e6
  muster plan hf:config.json --sequence-length 4096 --memory --devices "A100 80GB SXM x4"
  muster plan digits --calibrate --for-run runs/first
  muster plan runs/first
  muster plan runs/my-sweep --workers 1,2,4,8
  muster plan --write-prices
"""


@dataclass(frozen=True, kw_only=True)
class _Shown(JsonFlags):
    """What is planned and shown."""

    memory: bool = False
    """Memory per device by part, whether it fits (exit code 1 if not), and what would make it."""
    workers: str | None = None
    """Numbers of workers for a sweep: 1,2,4,8."""
    for_run: Path | None = None
    """Keep the plan in this run folder, to compare it with the run: `muster plan RUN`."""
    prices: Path | None = None
    """The file with prices. Default: prices.toml here, or else muster's own list."""
    write_prices: bool = False
    """Write the file of prices, to be edited."""


@dataclass(frozen=True)
class _Plan:
    """What is planned."""

    what: Annotated[str, Flag(is_positional=True)] = ""
    """A task, params=…, hf:config.json, or a run."""
    request: PlanRequest = field(default_factory=PlanRequest)
    shown: _Shown = field(default_factory=_Shown)


def main(argv: list[str]) -> int:
    parsed = parse_groups({"plan": _Plan}, argv, "plan", _HELP, takes_rest=True)
    flags: _Plan = parsed.plan
    task_flags = list(parsed.program)
    request = flags.request
    if flags.shown.write_prices:
        return _write_prices(flags.shown)
    if not flags.what:
        raise UsageError(
            "There is nothing to plan: WHAT is missing.",
            hint="write a task, params=7e9, hf:config.json or a run; `muster plan --help` has "
            "examples.",
        )
    known = known_model(flags.what, request)
    if known is None and _is_task(flags.what):
        known = known_task(flags.what, task_flags, request, read_settings(), output.remark)
    elif known is not None and request.calibrate:
        raise UsageError(
            f"--calibrate measures the steps of a task, and {flags.what} is a model without one.",
            hint="write the task instead, or leave --calibrate out.",
        )
    elif task_flags:
        raise UsageError(f"-- {' '.join(task_flags)}: only a task has flags of its own.")
    if known is None:
        return _plan_run(flags)
    if flags.shown.workers is not None:
        raise UsageError(f"--workers {flags.shown.workers}: only the run of a sweep has workers.")
    if flags.shown.memory:
        return _plan_memory(known, flags.shown)
    return _plan_training(flags.what, known, flags.shown)


def _plan_training(what: str, known: Known, shown: _Shown) -> int:
    plan = plan_training(what, known, read_settings(), read_prices(shown.prices))
    record = plan.record()
    if shown.for_run is not None:
        path = store_plan(RunFolder(shown.for_run), record)
        output.remark(f"stored in {path}; after the run: muster plan {shell_word(shown.for_run)}")
    if shown.json:
        output.say_json(record)
    else:
        screens.show_training(plan)
    return EXIT_OK


def _plan_memory(known: Known, shown: _Shown) -> int:
    if shown.for_run is not None:
        raise UsageError(
            "--for-run has no effect with --memory, which plans no step times.",
            hint="leave one of them out.",
        )
    plans = plan_memory(known, read_settings())
    if shown.json:
        output.say_json([plan.record() for plan in plans])
    else:
        for plan in plans:
            screens.show_memory(plan)
    return EXIT_SOME_FAILED if any(plan.fits is False for plan in plans) else EXIT_OK


def _plan_run(flags: _Plan) -> int:
    run = _open(flags.what)
    if run.folder.ledger.exists():
        plan = plan_sweep(run, _worker_counts(flags.shown.workers))
        if flags.shown.json:
            output.say_json(screens.sweep_record(plan))
        else:
            screens.show_sweep(plan)
        return EXIT_OK
    if not has_plan(run.folder):
        raise UsageError(
            f"No plan was made for {run.folder.name}, so there is nothing to compare.",
            hint=f"before it runs: muster plan TASK … --for-run {run.path}.",
        )
    found = compare_run(run.folder)
    if flags.shown.json:
        output.say_json(found.record())
    else:
        screens.show_comparison(run.folder.name, found)
    return EXIT_OK


def _open(what: str) -> Run:
    try:
        return find_run(what)
    except UnknownNameError:
        if has_plan(RunFolder(Path(what))):
            raise SetupError(
                f"{what} has a plan, but its training has not begun.",
                hint=f"run it there: muster train TASK --run-dir {what}.",
            ) from None
        if what in AGENTS:
            raise UsageError(
                f"muster plan predicts the training of a task; {what} learns by acting, and what "
                "its environment takes is not in the model.",
                hint="its own lines tell steps/s and the time to go within seconds.",
            ) from None
        if what in TASKS or "/" in what:
            raise
        raise UnknownNameError("task or run", what, TASKS) from None


def _write_prices(shown: _Shown) -> int:
    path = shown.prices or Path(FILE_NAME)
    write_prices(path)
    if shown.json:
        output.say_json({"made": [str(path)]})
    else:
        output.say(f"{path} is written; edit its prices, dates and sources.")
    return EXIT_OK


def _is_task(what: str) -> bool:
    path, colon, name = what.rpartition(":")
    return what in TASKS or (bool(colon and path) and name.isidentifier())


def _worker_counts(text: str | None) -> list[int]:
    if text is None:
        return [1, 2, 4, 8]
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and 0 < int(part) < 1_000_000 for part in parts):
        raise UsageError(f"--workers {text}: write whole numbers above 0: 1,2,4,8.")
    return [int(part) for part in parts]
