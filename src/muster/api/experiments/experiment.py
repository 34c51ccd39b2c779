"""An experiment with phases on disk: a folder with a run folder for each, and how they stand.

What a phase has come to is read from its own run folder. The experiment keeps what was asked, in
``experiment.json``, and what no run folder tells, in ``phases.jsonl``: a phase that was refused
before it had one, or that was done without the files it promised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.api.experiments.file import (
    Experiment,
    Phase,
    Reference,
    experiment_of,
    needs,
    resolved,
)
from muster.api.look.listing import array_of, find_first_stage, job_of, places_of, word_of
from muster.api.runs import Run
from muster.base.clock import SystemClock
from muster.base.code import project_folder
from muster.base.codec import read_record, write_json
from muster.base.errors import MusterError, SetupError, UnknownNameError, UsageError
from muster.base.journal import Journal, read_journal
from muster.base.settings import variable
from muster.base.shown_text import count, is_secret_name, shell_word
from muster.farm.rows import rows
from muster.run.folder import EXPERIMENT_FILE, RunFolder
from muster.run.session import is_held, open_run

if TYPE_CHECKING:
    from muster.api.look.why import Why

FORMAT = 1
#: The kind of an end in the journal: the phase is done, and lacks a file that it promised.
PRODUCT = "product"


@dataclass(frozen=True, kw_only=True)
class PhaseStatus:
    """How a phase stands. ``state``: as of a run; "waits" for one that cannot begin yet."""

    name: str
    path: str
    command: str
    state: str
    num_done: int | None = None
    num_total: int | None = None
    unit: str = ""
    after: tuple[str, ...] = ()
    why: str = ""
    may_fail: bool = False

    @property
    def is_good(self) -> bool:
        """Whether what comes after it may begin."""
        return self.state == "done" or (self.state == "failed" and self.may_fail and not self.why)

    @property
    def stands(self) -> str:
        """The state as the end of a sentence."""
        return {"waits": "waits", "failed": "has failed"}.get(self.state, f"is {self.state}")


class ExperimentFolder:
    """The folder of an experiment that has phases."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record = path / EXPERIMENT_FILE
        self.journal = path / "phases.jsonl"

    def exists(self) -> bool:
        return self.record.is_file()

    def phase(self, name: str) -> RunFolder:
        return RunFolder(self.path / name)

    def is_held(self) -> bool:
        return is_held(RunFolder(self.path))

    @contextmanager
    def working(self, experiment: Experiment) -> Iterator[Journal]:
        """Hold the folder, and have what is asked written down. Raises SetupError where somebody
        else works on it, UsageError where it is a run's."""
        if RunFolder(self.path).exists():
            raise UsageError(
                f"{self.path} is the folder of a run, not of an experiment with phases.",
                hint="choose another name or run_dir.",
            )
        self.path.mkdir(parents=True, exist_ok=True)
        with open_run(RunFolder(self.path)):
            places = [[list(keys), place] for keys, place in experiment.places.items()]
            asked = {
                "format": FORMAT, "name": experiment.name, "file": str(experiment.file.absolute()),
                "folder": str(experiment.folder.absolute()), "tree": experiment.tree,
                "places": places,
            }  # fmt: skip
            write_json(self.record, asked)
            with closing(Journal(self.journal, SystemClock())) as journal:
                journal.write("start")
                yield journal

    def read(self) -> Experiment:
        """What was asked at the last start."""
        shape = {"format": int, "file": str, "folder": str, "tree": dict, "places": list}
        record = read_record(self.record, "record of the experiment", shape)
        if record["format"] > FORMAT:
            raise SetupError(
                f"{self.record} was written by a newer muster (format {record['format']}).",
                hint="upgrade muster: pip install --upgrade muster-gpu.",
            )
        try:
            places = {tuple(map(str, keys)): str(place) for keys, place in record["places"]}
        except (TypeError, ValueError):
            raise SetupError(
                f"The record of the experiment at {self.record} is damaged.",
                hint="start its file again, which writes it anew.",
            ) from None
        found = replace(
            experiment_of(Path(record["file"]), record["tree"], places),
            folder=Path(record["folder"]),
        )
        # Named as it was, unless it has been moved: values of the phases may hold the name.
        here = self.path.absolute()
        with suppress(OSError):
            if (found.folder / found.run_dir).samefile(here):
                return found
        return replace(found, run_dir=here)

    def status(self) -> list[PhaseStatus]:
        """How each phase stands, in the order in which they are done."""
        experiment, found = self.read(), dict[str, PhaseStatus]()
        last = {str(line["phase"]): line for line in read_journal(self.journal) if "phase" in line}
        for phase in experiment.phases:
            found[phase.name] = self._status(phase, last.get(phase.name, {}), found)
        return list(found.values())

    def _status(
        self, phase: Phase, last: Mapping[str, Any], before: Mapping[str, PhaseStatus]
    ) -> PhaseStatus:
        about = PhaseStatus(
            name=phase.name, path=str(self.path / phase.name), command=phase.said.command,
            state="not begun", after=tuple(needs(phase)), may_fail=phase.order.may_fail,
        )  # fmt: skip
        why = str(last.get("why") or "") if last.get("event") == "end" else ""
        run = run_in(self.phase(phase.name))
        if run is not None:
            try:
                found = run.status()
                state = str(word_of(found, array_of(run, asks_slurm=False), job_of(run)))
            except MusterError as error:
                return replace(about, state="damaged", why=str(error).splitlines()[0])
            if state == "done" and last.get("kind") == PRODUCT:
                state = "failed"
            elif state in ("done", "running", "starting again", "queued"):
                why = ""  # why an earlier start was refused
            return replace(
                about, state=state, why=why,
                num_done=found.num_done, num_total=found.num_total, unit=found.unit,
            )  # fmt: skip
        if why:
            return replace(about, state="refused", why=why)
        for one in about.after:
            if (other := before.get(one)) and not other.is_good:
                return replace(about, state="waits", why=f"for {one}, which {other.stands}")
        return about


def state_of_all(phases: list[PhaseStatus], *, is_running: bool) -> str:
    """One word for an experiment."""
    states = ["done" if one.is_good else one.state for one in phases]
    if is_running:
        return "running"
    for word in ("failed", "refused", "damaged", "cancelled"):
        if word in states:
            return word if word == "cancelled" else "failed"
    if all(state == "done" for state in states):
        return "done"
    return "not begun" if all(s in ("not begun", "waits") for s in states) else "stopped"


def find_experiment(text: str) -> ExperimentFolder | None:
    """The experiment with phases that is called so, else None."""
    for path in places_of(text):
        with suppress(OSError):
            if (found := ExperimentFolder(path)).exists():
                return found
    return None


def resumed_as(path: Path) -> Path:
    """The folder that `muster resume` goes on with: of a phase, that of its experiment."""
    around = ExperimentFolder(path.parent)
    return around.path if around.exists() else path


def experiments_in(root: Path) -> list[ExperimentFolder]:
    """Those directly below ``root``, by name."""
    try:
        found = [one for path in root.iterdir() if (one := ExperimentFolder(path)).exists()]
    except OSError:
        return []
    return sorted(found, key=lambda one: one.path.name)


def run_in(folder: RunFolder) -> Run | None:
    """The run there; of a map that goes stage by stage and has no other yet, its first stage."""
    return Run(folder.path) if folder.exists() else find_first_stage(str(folder.path))


def is_done(run: Run | None, says_the_same: Callable[[Run], bool]) -> bool:
    """Whether there is nothing left to do, for the same command and the same code."""
    if run is None or run.path.parent.name == "stages":
        return False
    word = word_of(run.status(), array_of(run, asks_slurm=True), job_of(run))
    return word == "done" and _has_same_code(run) and says_the_same(run)


def _has_same_code(run: Run) -> bool:
    """Whether the files that it ran are as they were; what is no file is left to its command."""
    stored = run.stored
    base = project_folder(Path(stored.cwd))
    for name, digest in stored.code.items():
        path = base / name
        with suppress(OSError):
            if path.is_file() and sha256(path.read_bytes()).hexdigest() != digest:
                return False
    return True


def why_experiment(folder: ExperimentFolder) -> Why:
    """Why it stands as it does: what holds it up, and the causes in the first phase that failed."""
    from muster.api.look.why import Why, why  # here: a listing says no causes

    phases = folder.status()
    state = state_of_all(phases, is_running=folder.is_held())
    lines = tuple(f"{one.name}: {one.state}{f', {one.why}' if one.why else ''}" for one in phases)
    bad = min(
        (one for one in phases if one.state in ("failed", "refused", "damaged")),
        key=lambda one: one.is_good, default=None,
    )  # fmt: skip
    num_done = sum(one.state == "done" for one in phases)
    sentence = f"{num_done} of {count(len(phases), 'phase')} done"
    if bad is not None:
        sentence += f"; {bad.name} {bad.stands}"
    run = None if bad is None else run_in(folder.phase(bad.name))
    found = None if run is None else why(run)
    tries = () if found is None else found.tries
    if state not in ("done", "running"):
        tries = (*tries, f"go on with all of it: muster resume {shell_word(folder.path)}")
    return Why(
        path=str(folder.path), kind="experiment", state=state, sentence=sentence, reasons=lines,
        causes=() if found is None else found.causes, log="" if found is None else found.log,
        lines=() if found is None else found.lines, tries=tries,
    )  # fmt: skip


# ---------------------------------------------------------------------- values of other phases


def value_of(experiment: Experiment, folder: ExperimentFolder, phase: Phase, at: Reference) -> Any:
    """What ``${…}`` stands for in ``phase``; UsageError where it stands for nothing."""
    said, where = f"${{{at.head}{'.' if at.rest else ''}{at.rest}}}", phase.origin
    if at.head == "env":
        if is_secret_name(at.rest):
            raise UsageError(
                f"{where}: {said} looks like a secret, and the record of a run would hold it.",
                hint="leave it out: programs find it in their environment.",
            )
        found = variable(at.rest)
        if found is None:
            raise UsageError(f"{where}: {said}: the environment has no {at.rest}.")
        return found
    if at.head == "dir" and not at.rest:
        return str(folder.path if experiment.is_single else folder.phase(phase.name).path)
    other = next((one for one in experiment.phases if one.name == at.head), None)
    if other is None:
        raise UnknownNameError(f"reference in {where}:", at.head,
                               [one.name for one in experiment.phases])  # fmt: skip
    if at.rest == "dir":
        return str(folder.phase(other.name).path)
    first, _, name = at.rest.partition(".")
    if first == "best" and name:
        return best_of(Run(folder.phase(other.name).path), other.order.best, name, said)
    if at.rest in other.order.produces:
        return resolved(
            other.order.produces[at.rest], lambda one: value_of(experiment, folder, other, one)
        )
    known = ["dir", "best.NAME", *other.order.produces]
    raise UnknownNameError(f"value {said} of {where}; what {other.name} has:", at.rest, known)


def best_of(run: Run, rule: str, name: str, said: str) -> Any:
    """The parameter, or else the mean result, called ``name`` of the best setting of a sweep."""
    run.expect_tasks()
    from muster.api.sweeps.search_state import read_search

    search = read_search(run.folder)
    if search is not None and not rule:
        best = search.unbeaten()
        if len(best) != 1:
            if not best:
                raise UsageError(f"{said}: no trial of the search in {run.path} has a value.")
            raise UsageError(
                f"{said}: the search in {run.path} has {len(best)} trials, none better than "
                "another in all objectives.",
                hint='say in the phase of the search which is best: best = "maximize METRIC".',
            )
        goals = [goal.name for goal in search.spec.objectives]
        setting = dict(best[0].params)
        values = dict(zip(goals, best[0].values, strict=True))
    else:
        setting, values = _best_setting(run, rule, said)
    for where in (setting, values):
        if name in where:
            return where[name]
    raise UnknownNameError(f"value {said}; the best setting in {run.path} has", name,
                           [*setting, *values])  # fmt: skip


def _best_setting(run: Run, rule: str, said: str) -> tuple[dict[str, Any], dict[str, float]]:
    """Of the settings with the most seeds that are done, the one with the best mean."""
    word, _, metric = rule.strip().partition(" ")
    if word not in ("maximize", "minimize") or not metric:
        raise UsageError(
            f"{said}: nothing says what is best in {run.path}.",
            hint='say it in that phase: best = "maximize accuracy".',
        )
    settings: dict[str, tuple[dict[str, Any], list[dict[str, float]]]] = {}
    for params, metrics, system in rows(run.folder):
        setting = {key: value for key, value in params.items() if key != "seed"}
        value = metrics.get(metric)
        if system["state"] == "done" and isinstance(value, int | float) and value == value:
            numbers = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float)}
            settings.setdefault(repr(sorted(setting.items())), (setting, []))[1].append(numbers)
    if not settings:
        raise UsageError(f"{said}: no task in {run.path} has a value of {metric}.")
    most = max(len(seeds) for _, seeds in settings.values())

    def mean(seeds: list[dict[str, float]], name: str) -> float:
        return sum(one[name] for one in seeds) / len(seeds)

    whole = [one for one in settings.values() if len(one[1]) == most]
    choose = max if word == "maximize" else min
    setting, seeds = choose(whole, key=lambda one: mean(one[1], metric))
    names = set.intersection(*(set(one) for one in seeds))
    return setting, {name: mean(seeds, name) for name in sorted(names)}
