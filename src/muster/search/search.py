"""A search as a value: it is asked for tasks, hears what they log, and says which end early.

It reads no clock, does no input or output, and draws only with seeds made of the search's seed and
a number. So the same calls in the same order give the same answers, and `Search.replay` makes the
search of any moment again from what the ledger had recorded by then.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from muster.search.names import StopRule
from muster.search.records import (
    Decision,
    Ended,
    Ending,
    Heard,
    Point,
    Proposal,
    Record,
    Spent,
    Standing,
)
from muster.search.spec import SearchSpec
from muster.search.stopping.halving import Asha, AshaStop, Hyperband
from muster.search.stopping.pbt import Pbt
from muster.search.trials import (
    Median,
    NoRule,
    Rule,
    Sampler,
    TaskTrace,
    Trial,
    make_sampler,
    random_for,
    rank_trials,
)

_RULES: dict[StopRule, type[Rule]] = {
    "none": NoRule, "asha": Asha, "asha-stop": AshaStop, "hyperband": Hyperband, "median": Median,
    "pbt": Pbt,
}  # fmt: skip
#: How often another setting is drawn in place of one that a trial has, before all are listed.
_REDRAWS = 200


class Search:
    """The state of one search.

    `ask`, `heard` and `ended` are called in one order, that of the ledger; each is recorded
    together with its answer before the answer is acted on.
    """

    def __init__(self, spec: SearchSpec) -> None:
        self.spec = spec
        self.trials: list[Trial] = []
        self._rule = _RULES[spec.stopping.rule](spec)
        self._sampler: Sampler = make_sampler(spec)
        self._queue: deque[Proposal] = deque()
        self._known: dict[str, int] = {}
        self._left = self._settings_left()
        self._is_used = False  # no setting is left
        self._asked = 0  # trials that count against the budget
        self._given = 0  # and those from before the search
        self._watched = {o.name for o in spec.objectives} | {c.name for c in spec.constraints}

    @classmethod
    def replay(cls, spec: SearchSpec, records: Iterable[Record]) -> Search:
        """The search that had these proposals and reports, in the order of the ledger.

        Decisions are made again, so those among the records are passed over. ``spec`` may have
        another budget than before.
        """
        search = cls(spec)
        for record in records:
            match record:
                case Proposal():
                    search.recall(record)
                case Heard(trial, seed, points):
                    search.heard(trial, seed, points)
                case Ended(trial, seed, ending):
                    search.ended(trial, seed, ending)
        return search

    # --- asking ---------------------------------------------------------------------------------

    def ask(self, count: int, spent: Spent = Spent()) -> list[Proposal]:  # noqa: B008 - frozen
        """Up to ``count`` tasks to run next; fewer where the budget or the space is used up, or
        where more results must come first."""
        proposals: list[Proposal] = []
        while len(proposals) < count and not self.is_spent(spent):
            if not self._queue and not self._begin_next():
                break
            proposals.append(self._queue.popleft())
        return proposals

    def is_spent(self, spent: Spent) -> bool:
        """Whether the time, the GPU hours or the money are used up, so that nothing new begins."""
        budget = self.spec.budget
        limits = (
            (spent.seconds, budget.seconds),
            (spent.gpu_hours, budget.gpu_hours),
            (spent.cost, budget.cost),
        )
        return any(limit is not None and used >= limit for used, limit in limits)

    def is_exhausted(self, spent: Spent = Spent()) -> bool:  # noqa: B008 - frozen
        """Whether `ask` would give nothing any more, unless a report changes that."""
        if self.is_spent(spent):
            return True
        if self._queue:
            return False
        return self._is_full() or self._is_space_used()

    def may_promote(self) -> bool:
        """Whether a task still runs by which a paused trial may yet be promoted."""
        return self._rule.pauses and any(
            task.state == "running"
            for trial in self.trials
            if trial.state in ("running", "waiting")
            for task in trial.tasks.values()
        )

    def is_wanted(self, trial: int) -> bool:
        """Whether those tasks of this trial should run that have not ended."""
        return self.trials[trial].state == "running"

    def best(self, count: int = 1) -> list[Standing]:
        """The best trials, the best first; of several objectives those that nothing beats first.

        Trials that finished come before those that ended early. A trial that breaks a constraint,
        failed, or has no number is not among them.
        """
        return rank_trials(self.spec, self.trials)[:count]

    # --- reports --------------------------------------------------------------------------------

    def heard(self, trial: int, seed: int | None, points: Sequence[Point]) -> list[Decision]:
        """What to do after a task logged these points. Points at a step that was heard before are
        passed over, because a resumed attempt may log them again."""
        found = self.trials[trial]
        task = found.tasks[seed]
        if task.state == "done":
            return []  # its result is its value; what comes late changes nothing
        goal = self.spec.objectives[0]
        decisions: list[Decision] = []
        for point in points:
            if point.name == goal.name:
                if task.step is None or point.step > task.step:
                    task.take(point, goal.maximize)
                    decisions += self._reach(found, seed, task)
            elif point.name in self._watched:
                task.last[point.name] = point.value
        return decisions

    def ended(self, trial: int, seed: int | None, ending: Ending) -> list[Decision]:
        """What to do after a task ended. A task that was run again ends again."""
        found = self.trials[trial]
        found.tasks[seed].end(ending, self.spec.objectives[0].name)
        states = {task.state for task in found.tasks.values()}
        if ending.state in ("failed", "cancelled"):
            # A mean over the seeds that did not fail would flatter the setting.
            found.state = "failed"
            self._tell(found)
            return self._obey(self._rule.left(found))
        if states == {"done"}:
            found.state = "done"
            self._tell(found)
            return self._obey(self._rule.finished(found))
        if ending.state == "done" and found.state == "running" and found.is_over():
            return self._stop_whole(found)  # its other tasks were stopped beyond the last step
        if ending.state == "paused" and found.state == "waiting":
            return self._obey(self._rule.rested(found))
        return self._settle([found]) if ending.state == "done" else []

    def _tell(self, trial: Trial) -> None:
        """Tell the sampler, unless the trial began with another's checkpoint: its numbers say
        nothing about its own setting alone."""
        if trial.parent is None:
            self._sampler.tell(trial)

    def _reach(self, trial: Trial, seed: int | None, task: TaskTrace) -> list[Decision]:
        """Note the marks that the task has come to, and decide at those that all tasks of the trial
        have come to."""
        name = self.spec.objectives[0].name
        assert task.step is not None
        while (mark := self._rule.mark(trial, len(task.reports))) is not None and task.step >= mark:
            task.reports.append(task.report(mark, name))
        limit = self.spec.stopping.max_step
        if limit is not None and task.step > limit and trial.state == "running":
            return self._end_beyond(trial, seed, task, limit)
        decisions = self._settle([trial])
        waits = trial.state == "running" and len(task.reports) > trial.marks
        if self._rule.pauses and waits and not task.held:
            task.held = True
            mark = task.reports[trial.marks].step
            decisions.append(Decision("pause", trial.number, seed, mark))
        return decisions

    def _end_beyond(
        self, trial: Trial, seed: int | None, task: TaskTrace, limit: float
    ) -> list[Decision]:
        """Stop a task that logs beyond the last step, and the whole trial with its last task."""
        if task.is_beyond:
            return []
        task.is_beyond = True
        if trial.is_over():
            return self._stop_whole(trial)
        evidence = {"step": task.step, "max_step": limit}
        own = Decision("stop", trial.number, seed, limit, evidence=evidence)
        return [own, *self._settle([trial])]

    def _stop_whole(self, trial: Trial) -> list[Decision]:
        limit = self.spec.stopping.max_step
        evidence = {"step": trial.step, "max_step": limit}
        stop = Decision("stop", trial.number, rung=limit, evidence=evidence)
        return self._obey([stop]) + self._obey(self._rule.left(trial))

    def _settle(self, trials: list[Trial]) -> list[Decision]:
        """Decide every mark that these trials have arrived at, and what follows from that."""
        decisions: list[Decision] = []
        for trial in trials:
            while trial.state == "running" and trial.has_arrived():
                report = trial.report_at(trial.marks)
                trial.marks += 1
                trial.reports.append(report)
                decisions += self._obey(self._rule.decide(trial, report))
        return decisions

    def _obey(self, decisions: list[Decision]) -> list[Decision]:
        """Change the trials as was decided. Returns the decisions and what follows from them: a
        promoted trial may have arrived at its next mark already."""
        following: list[Decision] = []
        for at, decision in enumerate(decisions):
            trial = self.trials[decision.trial]
            if decision.kind == "replace":
                decisions[at] = dataclasses.replace(decision, heir=self._begin_heir(decision))
            if decision.kind == "promote":
                if trial.state in ("done", "failed"):  # it ended by itself after it was to pause
                    following += self._obey(self._rule.left(trial))
                    continue
                trial.state = "running"
                for task in trial.tasks.values():
                    task.go_on()
                following += self._settle([trial])
                if trial.state == "running" and trial.is_over():
                    following += self._stop_whole(trial)
                continue
            trial.state = "waiting" if decision.kind == "pause" else "stopped"
            self._tell(trial)
        return decisions + following

    # --- trials ---------------------------------------------------------------------------------

    def _begin_next(self) -> bool:
        """Begin the next trial: a first guess, or what the sampler says."""
        number = len(self.trials)
        if self._is_full() or self._is_space_used():
            return False
        if self._asked < len(self.spec.tries):
            guess = self.spec.tries[self._asked]
            drawn = self.spec.space.draw(random_for(self.spec.seed, "try", number), guess)
            if not self._is_known(drawn):
                self._sampler.fix(number, drawn)
                self._begin(drawn, "try", self._limit())
                return True
        params = self._sampler.pick(number)
        if self._is_known(params):
            other = self._unused(number)
            if other is None:
                return False
            params = other
            self._sampler.fix(number, params)
        self._begin(params, self.spec.sampler, self._limit())
        return True

    def _begin_heir(self, decision: Decision) -> int:
        """Begin the trial that takes another's place, and return its number. Another trial may have
        the same setting: what begins with this parent's checkpoint is new all the same."""
        assert decision.params is not None and decision.parent is not None
        parent = self.trials[decision.parent]
        self._add(Trial(
            len(self.trials), decision.params, "pbt", self._traces(), None, parent.number,
            parent.step,
        ))  # fmt: skip
        return len(self.trials) - 1

    def _begin(self, params: Mapping[str, Any], by: str, limit: int | None) -> None:
        trial = Trial(len(self.trials), params, by, self._traces(), limit)
        self._known.setdefault(_identity(params), trial.number)
        self._asked += by != "given"
        self._given += by == "given"
        self._add(trial)

    def _traces(self) -> dict[int | None, TaskTrace]:
        seeds: tuple[int | None, ...] = self.spec.seeds or (None,)
        return {seed: TaskTrace() for seed in seeds}

    def _add(self, trial: Trial) -> None:
        self.trials.append(trial)
        self._rule.begun(trial)
        self._queue += (
            Proposal(
                trial.number, seed, trial.params, trial.by, trial.limit, trial.parent, trial.start
            )
            for seed in trial.tasks
        )

    def recall(self, proposal: Proposal) -> None:
        """Make a recorded proposal again."""
        if proposal.trial == len(self.trials):
            self._sampler.recall(proposal.trial, proposal.params, proposal.by)
            self._begin(proposal.params, proposal.by, proposal.limit)
        # By its name, not by its parameters: a tuple comes back from the ledger as a list.
        self._queue = deque(
            p for p in self._queue if (p.trial, p.seed) != (proposal.trial, proposal.seed)
        )

    def _limit(self) -> int | None:
        """How many trials the search chooses, None for any number."""
        size = self.spec.space.size
        own = None if size is None else size - self._given
        limits = (self.spec.budget.trials, own)
        return min((limit for limit in limits if limit is not None), default=None)

    def _is_full(self) -> bool:
        limit = self.spec.budget.trials
        return limit is not None and self._asked >= limit

    def _is_known(self, params: Mapping[str, Any]) -> bool:
        return _identity(params) in self._known

    def _is_space_used(self) -> bool:
        size = self.spec.space.size
        return self._is_used or (size is not None and len(self._known) >= size)

    def _unused(self, number: int) -> dict[str, Any] | None:
        """A setting that no trial has, None where none is found."""
        random = random_for(self.spec.seed, "redraw", number)
        for _ in range(_REDRAWS):
            params = self.spec.space.draw(random)
            if not self._is_known(params):
                return params
        return next(self._left, None)

    def _settings_left(self) -> Iterator[dict[str, Any]]:
        """Settings that no trial has when it is their turn. One pass serves the whole search: what
        it has left behind is known, and stays so."""
        if self.spec.space.is_countable:
            yield from (p for p in self.spec.space.settings() if not self._is_known(p))
            self._is_used = True


def _identity(params: Mapping[str, Any]) -> str:
    return json.dumps(params, sort_keys=True)
