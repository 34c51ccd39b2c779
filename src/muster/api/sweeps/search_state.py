"""How a search stands, read from its ledger, also while it runs."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import orjson

from muster.api.start.placing import gpus_per_worker
from muster.base.atomic_files import replacing
from muster.base.errors import UsageError
from muster.farm import canonical
from muster.farm.canonical import short_key
from muster.farm.ledger.queries import SearchRow
from muster.farm.ledger.read import LedgerReader
from muster.run.folder import RunFolder
from muster.run.record import read_run
from muster.search.distributions import word_of
from muster.search.records import Decision, Ended, Ending, Heard, Point, Proposal, Record, Standing
from muster.search.search import Search
from muster.search.spec import SearchSpec
from muster.search.trials import Trial, pareto_front


@dataclass(frozen=True, kw_only=True)
class SearchState:
    """How a search stands."""

    spec: SearchSpec
    search: Search
    decisions: tuple[Decision, ...]
    decided_s: tuple[float | None, ...]
    """When each of them was made (seconds since 1970), None where an older muster made it."""
    ended: tuple[int, ...]
    """The trials of which a task has ended, in the order of their last ends."""
    tasks: Mapping[int, tuple[str, ...]]
    """The keys of each trial's tasks, by the number of the trial."""
    spent_s: float
    gpu_hours: float

    @property
    def cost(self) -> float:
        """What its workers have cost, 0 where the search has no price."""
        return self.gpu_hours * (self.spec.budget.price_per_gpu_hour or 0.0)

    @property
    def num_by_rung(self) -> dict[float, int]:
        """Trials that were stopped or paused at each rung and have not been promoted since."""
        rungs = list(self.stopped_at.values())
        return {rung: rungs.count(rung) for rung in sorted(set(rungs))}

    @property
    def stopped_at(self) -> dict[int, float]:
        """The rung of each trial that was stopped or paused and has not been promoted since."""
        at: dict[int, float] = {}
        for decision in self.decisions:
            if decision.kind == "promote":
                at.pop(decision.trial, None)
            elif decision.rung is not None and decision.seed is None:
                at[decision.trial] = decision.rung
        trials = self.search.trials
        return {n: rung for n, rung in at.items() if trials[n].state in ("waiting", "stopped")}

    @property
    def num_asked(self) -> int:
        """Trials that count against the budget."""
        return sum(trial.by not in ("given", "pbt") for trial in self.search.trials)

    def lineage(self, number: int) -> list[Trial]:
        """A trial and those before it, the first first: each began with the checkpoint of the one
        before, at its ``start``."""
        found = [self.search.trials[number]]
        while (parent := found[0].parent) is not None:
            found.insert(0, self.search.trials[parent])
        return found

    def schedule(self, number: int) -> list[tuple[float | None, Trial]] | None:
        """What a trial with others before it has become what it is by: the steps at which the
        settings changed (None: its end), and whose they were until then. None where it has one
        setting, which can be run again."""
        found = self.lineage(number)
        ends = [after.start for after in found[1:]]
        return list(zip([*ends, None], found, strict=True)) if ends else None

    def unbeaten(self) -> list[Standing]:
        """Of one objective the best trial, of several the finished ones that none beats in all."""
        front = pareto_front(self.spec, self.search.trials)
        return front if len(self.spec.objectives) > 1 and front else self.search.best()


def read_search(folder: RunFolder) -> SearchState | None:
    """The search of a run, which may be at work; None where it has none."""
    if not folder.ledger.exists():
        return None
    with LedgerReader(folder.ledger) as ledger:
        text = ledger.meta(SEARCH)
        if text is None:
            return None
        rows = ledger.search_rows()
        keys = ledger.keys()
        seconds = ledger.seconds_of_attempts(_chosen(rows))
        has_gpus = ledger.has_had_gpus()
    spec = SearchSpec.from_json(orjson.loads(text))
    rate = gpus_per_worker(read_run(folder).options, has_gpus=has_gpus)
    return state_of(spec, rows, keys, seconds * rate / 3600)


def _chosen(rows: Sequence[SearchRow]) -> Iterator[int]:
    """The tasks that the search chose; those that it was given count against no budget."""
    for row in rows:
        if row.kind == "proposal" and row.task_id is not None:
            record = from_row(row)
            if isinstance(record, Proposal) and record.by != "given":
                yield row.task_id


def state_of(
    spec: SearchSpec, rows: Sequence[SearchRow], keys: Mapping[int, bytes], gpu_hours: float
) -> SearchState:
    """The state that these rows of a ledger describe. ``keys``: of tasks, by their numbers."""
    records = [from_row(row) for row in rows]
    decisions, decided_s = [], []
    ended: dict[int, None] = {}
    tasks: dict[int, tuple[str, ...]] = {}
    spent_s = 0.0
    for row, record in zip(rows, records, strict=True):
        match record:
            case Proposal(trial):
                key = short_key(keys.get(row.task_id or 0, b""))
                tasks[trial] = (*tasks.get(trial, ()), key)
                spent_s = max(spent_s, seconds_in(row))
            case Ended(trial):
                ended.pop(trial, None)
                ended[trial] = None
                spent_s = max(spent_s, seconds_in(row))
            case Decision():
                decisions.append(record)
                decided_s.append(moment_of(row))
    return SearchState(
        spec=spec,
        # Its proposals are recorded, so what chose them is not needed to look at it.
        search=Search.replay(dataclasses.replace(spec, sampler="random"), records),
        decisions=tuple(decisions),
        decided_s=tuple(decided_s),
        ended=tuple(ended),
        tasks=tasks,
        spent_s=spent_s,
        gpu_hours=gpu_hours,
    )


def export_study(folder: RunFolder, target: Path) -> int:
    """Write the search of a run as a study of Optuna's, an SQLite file that optuna-dashboard opens;
    returns the number of trials.

    Raises UsageError where the run has no search or the file is there already, and SetupError where
    it cannot be written. It is there as a whole or not at all.
    """
    from muster.farm.export import check_target, writing
    from muster.search.optuna_study import write_study

    state = None if read_run(folder).is_gang else read_search(folder)
    if state is None:
        raise UsageError(
            f"{folder.path} is not a search, so there are no trials for an Optuna study.",
            hint="a search is begun with `muster sweep … --space … --maximize METRIC`; a table of "
            "any sweep ends in .csv, .parquet or .jsonl.",
        )
    if target.exists():
        raise UsageError(
            f"{target} already exists, and may be a study of your own.",
            hint="remove it, or name another file.",
        )
    check_target(target)
    with LedgerReader(folder.ledger) as ledger:
        of_tasks = {short_key(key): span for key, span in ledger.spans().items()}
    spans = {}
    for trial, keys in state.tasks.items():
        if found := [of_tasks[key] for key in keys if key in of_tasks]:
            begins, ends = zip(*found, strict=True)
            spans[trial] = min(begins), max(ends)
    with writing(target), replacing(target) as beside:
        write_study(state.spec, state.search.trials, spans, beside, folder.name)
    return len(state.search.trials)


#: Strings that, typed bare, a function would not get as strings.
_NO_WORDS = frozenset(
    ("true", "false", "yes", "no", "on", "off", "none", "null", "nan", "inf", "infinity")
)


def again(target: Mapping[str, Any], spec: SearchSpec, params: Mapping[str, Any]) -> str:
    """The command that runs a setting with all of its seeds again. ``target``: as in run.json."""
    words = ["muster", "sweep"]
    command = target.get("kind") == "command"
    if not command:
        words.append(str(target["name"]))
    for name, value in params.items():
        words += ["--grid", f"{name}={_grid_text(value, of_command=command)}"]
    if spec.seeds is not None:
        words += ["--seeds", ",".join(map(str, spec.seeds)) + ("," if len(spec.seeds) == 1 else "")]
    if command:
        if source := target.get("metrics_from"):
            words += ["--metrics-from", str(source)]
        words += [*(["--shell"] if target.get("shell") else []), "--", *target["argv"]]
    return shlex.join(words)


def _grid_text(value: Any, *, of_command: bool) -> str:
    """What ``--grid`` reads back as this value: JSON, unless it is plainly a number or a word."""
    if of_command:  # whose values stay texts
        value = word_of(value)
        is_plain = re.fullmatch(r"[\w.+-]+", value, re.ASCII) is not None
    elif isinstance(value, str):
        is_word = re.fullmatch(r"[A-Za-z]\w*", value, re.ASCII) is not None
        is_plain = is_word and value.lower() not in _NO_WORDS
    else:
        is_plain = isinstance(value, int | float) and not isinstance(value, bool)
    return word_of(value) if is_plain else json.dumps([value])


#: The meta value that holds the search's specification.
SEARCH = "search"


def to_row(record: Record, task_id: int | None, **more: Any) -> SearchRow:
    """``more`` goes into the row and is not part of the record."""
    match record:
        case Proposal():
            kind, body = "proposal", _without(asdict(record), "parent", "step")
        case Heard(trial, seed, points):
            short = [[point.name, point.step, point.value] for point in points]
            kind, body = "heard", {"trial": trial, "seed": seed, "points": short}
        case Ended(trial, seed, ending):
            values = dict(ending.values)
            state = ending.state
            kind, body = "ended", {"trial": trial, "seed": seed, "state": state, "values": values}
        case Decision():
            kind, body = "decision", _without(asdict(record), "parent", "params", "heir")
    return SearchRow(kind, task_id, canonical.encode({**body, **more}))


def _without(body: dict[str, Any], *of_heirs: str) -> dict[str, Any]:
    """Without what only the heirs of a population have, where this is none."""
    return {
        name: value for name, value in body.items() if value is not None or name not in of_heirs
    }


def from_row(row: SearchRow) -> Record:
    body = canonical.decode(row.body)
    match row.kind:
        case "proposal":
            return Proposal(**{f.name: body[f.name] for f in fields(Proposal) if f.name in body})
        case "heard":
            points = tuple(Point(*point) for point in body["points"])
            return Heard(body["trial"], body["seed"], points)
        case "ended":
            return Ended(body["trial"], body["seed"], Ending(body["state"], body["values"]))
    return Decision(**{f.name: body[f.name] for f in fields(Decision) if f.name in body})


def seconds_in(row: SearchRow) -> float:
    """How long the search had been at work, as a proposal and an end say."""
    return float(canonical.decode(row.body).get("spent_s", 0.0))


def moment_of(row: SearchRow) -> float | None:
    """When a decision was made (seconds since 1970); an older muster did not write it down."""
    found: float | None = canonical.decode(row.body).get("time_s")
    return found


def numbers_of(value: bytes) -> dict[str, float]:
    """The numbers among the fields of an encoded result, without those too large for a float."""
    numbers = {}
    for name, item in canonical.decode(value).items():
        if isinstance(item, int | float):
            with suppress(OverflowError):
                numbers[name] = float(item)
    return numbers
