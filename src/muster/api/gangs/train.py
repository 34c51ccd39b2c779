"""``muster train``: one model, or one agent, on every device."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from muster.api.gangs.gang import GangPlan, plan_gang, run_gang
from muster.api.gangs.host_plan import HostsPlan
from muster.api.gangs.work import Entry, GangAudience, GangEnding, GangWork
from muster.api.recipe import AgentRecipe, TrainRecipe
from muster.api.start.earlier_work import check_code, has_trained
from muster.api.start.options import GangOptions
from muster.base.atomic_files import write_atomic
from muster.base.cells import name_of, placed
from muster.base.code import Code, code_of
from muster.base.codec import as_read_back, plain, read_json, read_object, to_json, write_json
from muster.base.errors import (
    EXIT_OK,
    MusterError,
    PlacementError,
    PlanMismatchError,
    TargetError,
    UsageError,
)
from muster.base.modules import CLASS
from muster.base.settings import TASK_DIR, variable
from muster.base.shown_text import shell_word
from muster.base.signals import Requests, listening, stop_code
from muster.base.target import parse_target
from muster.devices.leases import Lease
from muster.gang.handle import SupervisorHandle
from muster.rl.config import PpoConfig
from muster.run.folder import RESULT_FILE, RunFolder, folder_for
from muster.run.record import Kind, read_run
from muster.train.config import TrainConfig

#: The module that holds what a rank runs, by the type of its configuration.
ENTRIES = {TrainConfig: "muster.train.loop", PpoConfig: "muster.rl.loop"}
_MOST_STARTS = 20


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """A task by name, its settings, and how it is trained.

    ``target``: ``file.py:Class`` or ``package.module:Class``; ``settings``: ``module:Class`` of a
    recipe's settings, else None; ``values``: those settings, or the fields of the task itself.
    ``config``: a PpoConfig for an agent, which learns by acting.
    """

    name: str
    target: str
    settings: str | None
    values: Mapping[str, Any]
    config: TrainConfig | PpoConfig
    checkpoint_s: float | None = 60.0
    checkpoint_steps: int | None = None
    run_dir: Path | None = None

    @property
    def kind(self) -> Kind:
        return "agent" if isinstance(self.config, PpoConfig) else "train"

    @property
    def folder(self) -> RunFolder:
        """``run_dir``, or ``runs/<name>-<hash of what decides about the result>``."""
        if self.run_dir is not None:
            return RunFolder(self.run_dir)
        digest = sha256(to_json(self.identity())).hexdigest()
        return folder_for(self.name, digest)

    def identity(self) -> dict[str, Any]:
        decisive = self.config.identity()
        return {"task": name_of(self.target), "settings": dict(self.values), "config": decisive}

    @cached_property
    def code(self) -> Code:
        return code_of([parse_target(self.target)])

    def work(self, rank: str = "", *, allow_changed_code: bool = False) -> GangWork:
        """What its ranks do. ``rank``: the function of each; "" for one that trains."""
        entry = Entry(
            target=rank or f"{ENTRIES[type(self.config)]}:run_rank",
            params={
                "task": placed(self.target, self.folder.path),
                "task_config": self.settings,
                "task_values": as_read_back(self.values),
                "config": as_read_back(self.config),
                "folder": str(self.folder.path.absolute()),
                "checkpoint_s": self.checkpoint_s,
                "checkpoint_steps": self.checkpoint_steps,
                "allow_changed_code": allow_changed_code,
            },
        )
        about = {
            "recipe": self.name,
            "train": as_read_back(self.identity()),
            "config": as_read_back(self.config),
        }
        return GangWork(
            folder=self.folder, program=entry, kind=self.kind, code=self.code, about=about
        )


@dataclass(frozen=True, kw_only=True)
class Trained:
    """How a training ended. ``results`` is what training_results.json says, None without one."""

    folder: RunFolder
    exit_code: int
    ending: GangEnding | None
    results: Mapping[str, Any] | None


def job_of_recipe(
    recipe: TrainRecipe | AgentRecipe, settings: Any, config: TrainConfig | PpoConfig, **rest: Any
) -> TrainJob:
    """The job of a recipe with its ``settings``, an instance of ``recipe.config``."""
    kind = recipe.config
    return TrainJob(
        name=recipe.name,
        target=recipe.task,
        settings=f"{kind.__module__}:{kind.__qualname__}",
        values=_stored(recipe.name, plain(settings)),
        config=config,
        **rest,
    )


def job_of_target(
    text: str, values: Mapping[str, Any], config: TrainConfig | PpoConfig, **rest: Any
) -> TrainJob:
    """The job of the task class that ``text`` names; ``values`` are its dataclass fields."""
    ref = parse_target(text, kind=CLASS)
    name = ref.attribute.rpartition(".")[2]
    return TrainJob(
        name=name, target=str(ref), settings=None, values=_stored(text, values), config=config,
        **rest,
    )  # fmt: skip


def plan_training(job: TrainJob, options: GangOptions) -> GangPlan | HostsPlan:
    """What would be started, where. It changes nothing; raises what ``run_training`` raises."""
    check_job(job, options)
    return plan_gang(job.work(), _options_for(job, options))


def run_training(
    job: TrainJob,
    options: GangOptions,
    audience: GangAudience,
    *,
    supervisor: SupervisorHandle | None = None,
) -> Trained:
    """Train, or go on with a training; whatever happens, nothing it started is left running.

    Raises what placing raises, PlanMismatchError for a folder of another training, and the
    errors that a rank reports as the user's.
    """
    check_job(job, options)
    folder = job.folder
    options = _options_for(job, options)
    with listening() as requests:
        ending = _until_it_ends(job, options, audience, supervisor, requests)
        if ending.word.get("ending") == "refused":
            raise _Refused(ending.word)
        results = None
        if ending.exit_code == EXIT_OK:
            results = read_object(folder.training_results) or None
        tell_task(results)
        if results is not None and folder.plan_json.is_file():
            from muster.plan.compare import write_comparison

            write_comparison(folder)
    return Trained(folder=folder, exit_code=ending.exit_code, ending=ending, results=results)


def _until_it_ends(
    job: TrainJob,
    options: GangOptions,
    audience: GangAudience,
    supervisor: SupervisorHandle | None,
    requests: Requests,
) -> GangEnding:
    """Start the ranks, again where they ask for it, and on other devices where somebody does.

    Where they cannot begin there, they keep those that they had; where others have taken these
    meanwhile, it ends, and what it has saved goes on later.
    """
    folder, num_starts = job.folder, 0
    before: bytes | None = None
    moved: GangEnding | None = None  # how the start before ended, where it was to move
    can_go_back = False
    kept: dict[str, Lease] = {}
    try:
        while True:
            work = job.work(allow_changed_code=options.allow_changed_code)
            asked = None if options.restart else _devices_of(folder)
            try:
                ending = run_gang(work, options, audience, supervisor=supervisor, kept=kept)
                refusal = _refusal_to_begin(ending)
            except (PlacementError, UsageError) as error:
                if moved is None:
                    raise
                if not can_go_back:
                    audience.warn(
                        f"{error}\nIt cannot have its earlier devices back either. It has saved: "
                        f"muster resume {shell_word(folder.path)} goes on with it."
                    )
                    return dataclasses.replace(moved, is_moving=False)
                refusal = str(error)
            supervisor = None
            options = dataclasses.replace(options, restart=False)
            if can_go_back and refusal:
                audience.warn(f"{refusal}\nIt keeps the devices that it had.")
                _have_devices(folder, before)
                folder.ending_json.unlink(missing_ok=True)
                can_go_back = False
                continue
            before, can_go_back = asked, ending.is_moving
            moved = ending if ending.is_moving else None
            if moved is not None and requests.take():  # it has saved, and goes on nowhere now
                number = requests.reason
                return dataclasses.replace(
                    moved, is_moving=False, exit_code=stop_code(number),
                    stopped_by=signal.Signals(number).name,
                )  # fmt: skip
            if moved is not None:
                continue
            num_starts += 1
            word = ending.word
            if word.get("ending") != "restart" or ending.stopped_by or num_starts == _MOST_STARTS:
                return ending
            audience.warn(str(word.get("message", "starting again")))
    finally:
        for lease in kept.values():
            lease.release()


def _refusal_to_begin(ending: GangEnding) -> str:
    """Why these ranks could not begin at all; "" where they have begun, or somebody ended them."""
    word = ending.word
    is_refusal = word.get("ending") == "refused" and word.get("phase") == "setup"
    has_begun = ending.restarts > 0 or bool(ending.stopped_by)
    return str(word.get("message")) if is_refusal and not has_begun else ""


def _devices_of(folder: RunFolder) -> bytes | None:
    """What somebody has asked for, as it is on disk."""
    return folder.devices_json.read_bytes() if folder.devices_json.exists() else None


def _have_devices(folder: RunFolder, asked: bytes | None) -> None:
    if asked is None:
        folder.devices_json.unlink(missing_ok=True)
    else:
        write_atomic(folder.devices_json, asked)


def verify_task(
    job: TrainJob,
    options: GangOptions,
    audience: GangAudience,
    *,
    supervisor: SupervisorHandle | None = None,
) -> tuple[GangEnding, list[Mapping[str, Any]]]:
    """Compare the gradients of a task on one rank and on several; see ``train.verify``."""
    with TemporaryDirectory(prefix="muster-verify-") as place:
        here = dataclasses.replace(job, run_dir=Path(place))
        work = here.work("muster.train.verify:verify_rank")
        ending = run_gang(work, options, audience, supervisor=supervisor)
        if ending.word.get("ending") == "refused":
            raise _Refused(ending.word)
        if ending.exit_code != EXIT_OK:
            return ending, []
        return ending, list(read_json(here.folder.verify_json, "list of findings"))


def check_job(job: TrainJob, options: GangOptions) -> None:
    """Raise PlanMismatchError when the run folder holds checkpoints or results of another training,
    or of this one with other code."""
    folder = job.folder
    if options.restart or not folder.exists():
        return
    if not has_trained(folder):
        return
    stored = read_run(folder)
    stored.check_kind(job.kind, folder)
    lines = _differences(stored.spec.get("train") or {}, as_read_back(job.identity()))
    if lines:
        raise PlanMismatchError(
            "This run folder holds another training:\n  " + "\n  ".join(lines),
            hint="choose another --run-dir for the new one, or begin anew with --restart; this one "
            "is untouched.",
        )
    check_code(folder, job.code, may_change=options.allow_changed_code)


class _Refused(MusterError):
    """What a rank has reported as a mistake of the user's, told by the launcher."""

    def __init__(self, word: Mapping[str, Any]) -> None:
        super().__init__(str(word.get("message", "A rank refused to begin.")))
        code = word.get("exit_code")
        self.exit_code = code if isinstance(code, int) and 0 < code < 128 else self.exit_code


def _options_for(job: TrainJob, options: GangOptions) -> GangOptions:
    changes: dict[str, Any] = {"restart_on": "crash"}
    if isinstance(job.config, PpoConfig):
        return dataclasses.replace(options, **changes)
    if options.hosts is not None and job.config.strategy in ("dp", "single"):
        raise UsageError(
            f"--strategy {job.config.strategy} is one process, and --hosts starts one for each "
            "device.",
            hint="use --strategy ddp or fsdp, or leave it out.",
        )
    if job.config.strategy == "dp":
        changes["one_process"] = True
    if job.config.strategy == "single" and options.devices == "auto" and options.gpu_ids is None:
        changes["max_gpus"] = 1
    return dataclasses.replace(options, **changes)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    if before.get("task") != now["task"]:
        return [f"task {before.get('task')}, now {now['task']}"]
    lines = []
    for group in ("settings", "config"):
        old, new = before.get(group, {}), now[group]
        for name in new:
            if old.get(name) != new[name]:
                flag = name.replace("_", "-")
                lines.append(f"--{flag} {old.get(name)}, now {new[name]}")
    return lines


def _stored(owner: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of ``owner`` as a run's record has them; TargetError for one that it cannot."""
    for name, value in values.items():
        try:
            to_json(value)
        except TypeError as error:
            raise TargetError(
                f"The field {name} of {owner} cannot be kept in the record of a run: {error}.",
                hint="make it a string, a number, a path, an Enum, or a list, set, dict or "
                "dataclass of those.",
            ) from None
    found: Mapping[str, Any] = as_read_back(values)
    return found


def tell_task(results: Mapping[str, Any] | None) -> None:
    """Make the numbers of a training the result of the task of a sweep that it is, if it is one."""
    place = variable(TASK_DIR)
    if not place or results is None or (file := Path(place) / RESULT_FILE).exists():
        return
    found = {
        f"{split}.{name}": value
        for split, metrics in results["metrics"].items()
        for name, value in metrics.items()
        if isinstance(value, int | float)
    }
    write_json(file, {**found, "steps": results["steps"]})
