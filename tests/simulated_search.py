"""A search on recorded learning curves: what a sampler and a rule would have found, and at what
price. Nothing runs; a second is enough for many whole searches."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muster.search.records import Decision, Ended, Ending, Heard, Point, Proposal, Record
from muster.search.search import Search
from muster.search.spec import SearchSpec

#: The objective after each step, for a setting and a seed.
Curve = Callable[[Mapping[str, Any], int | None], Sequence[float]]


@dataclass
class Simulated:
    """A search that is over."""

    search: Search
    steps: int
    """How many steps all tasks ran together."""
    records: list[Record]
    """What a ledger would hold."""


@dataclass
class _Task:
    proposal: Proposal
    curve: Sequence[float]
    step: int = 0
    is_running: bool = True


def simulate(
    spec: SearchSpec,
    curve: Curve,
    *,
    workers: int = 1,
    seconds_per_step: Callable[[Mapping[str, Any]], float] = lambda params: 1.0,
) -> Simulated:
    """Run a search with so many workers at once, each of which logs a point after every step.

    A paused task keeps its checkpoint; a promoted one goes before new ones, as in the farm.
    """
    search, records = Search(spec), list[Record]()
    tasks: dict[tuple[int, int | None], _Task] = {}
    ready: deque[_Task] = deque()
    busy: list[tuple[float, int, _Task]] = []
    steps = count = 0
    now = 0.0
    name = spec.objectives[0].name
    seeds: tuple[int | None, ...] = spec.seeds or (None,)

    def obey(decisions: list[Decision]) -> None:
        records.extend(decisions)
        for decision in decisions:
            for seed in seeds if decision.seed is None else (decision.seed,):
                if (task := tasks.get((decision.trial, seed))) is not None:
                    follow(decision, task, seed)

    def follow(decision: Decision, task: _Task, seed: int | None) -> None:
        if decision.kind == "promote":
            if not task.is_running and task.step < len(task.curve):
                task.is_running = True
                ready.append(task)
        elif task.is_running:
            task.is_running = False
            ending = Ending("paused" if decision.kind == "pause" else "stopped")
            records.append(Ended(decision.trial, seed, ending))
            obey(search.ended(decision.trial, seed, ending))

    while True:
        while len(busy) < workers:
            if not ready:
                for proposal in search.ask(1):
                    records.append(proposal)
                    task = _Task(proposal, curve(proposal.params, proposal.seed))
                    task.step = int(proposal.step or 0)  # of another's: along its own curve
                    tasks[proposal.trial, proposal.seed] = task
                    ready.append(task)
            if not ready:
                break
            task = ready.popleft()
            if task.is_running:
                count += 1
                duration = seconds_per_step(task.proposal.params)
                heapq.heappush(busy, (now + duration, count, task))
        if not busy:
            return Simulated(search, steps, records)
        now, _, task = heapq.heappop(busy)
        if not task.is_running:
            continue
        trial, seed = task.proposal.trial, task.proposal.seed
        steps += 1
        task.step += 1
        points = (Point(name, task.step, task.curve[task.step - 1]),)
        records.append(Heard(trial, seed, points))
        obey(search.heard(trial, seed, points))
        if task.is_running and task.step == len(task.curve):
            ending = Ending("done", {name: task.curve[-1]})
            task.is_running = False
            records.append(Ended(trial, seed, ending))
            obey(search.ended(trial, seed, ending))
        elif task.is_running:
            ready.appendleft(task)
