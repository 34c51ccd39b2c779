"""Runs that nobody ran: folders of any size, written through the ledger's own code."""

from __future__ import annotations

import json
import math
import random
import time
from contextlib import closing
from itertools import product
from pathlib import Path

from tests.hostile_texts import HOSTILE
from tests.tracked import gang_folder

from muster.api.start.options import SweepOptions
from muster.farm import canonical, metrics
from muster.farm.ledger.store import Ledger
from muster.farm.task import AttemptRecord, Finished, NewTask, Outcome, SlotSpec, Task
from muster.run.folder import RunFolder
from muster.run.record import new_record, write_run

TARGET = "train.py:run"
#: When the first task began, and how long a task takes.
BEGAN_S, TASK_S = 1_790_000_000.0, 2.0
_NUM_SLOTS = 8
_WIDTHS = (16, 32, 64, 128, 256)


def made_sweep(
    path: Path, num_tasks: int, *, num_curves: int = 0, num_points: int = 2000, num_open: int = 0
) -> RunFolder:
    """A finished sweep: settings lr, width, opt and seed, results loss and accuracy; every 50th
    task has failed in one of two ways. The first ``num_curves`` tasks that are done have logged
    ``num_points`` of two metrics each. ``num_open`` more tasks wait.
    """
    folder = RunFolder(path)
    folder.create()
    asked = {"target": TARGET, "space": {"grid": {"width": [str(w) for w in _WIDTHS]}}}
    record = new_record(
        folder, "sweep", SweepOptions(run_dir=path, devices=f"cpu:{_NUM_SLOTS}"), spec=asked,
        code={"train.py": "0" * 64}, argv=("muster", "sweep", TARGET),
    )  # fmt: skip
    write_run(folder, record)
    start = {"time": "2026-09-21T13:33:20+00:00", "event": "start", "tasks": num_tasks}
    end = {"time": "2026-09-21T20:33:20+00:00", "event": "end", "exit_code": 1}
    folder.events.write_text(f"{json.dumps(start)}\n{json.dumps(end)}\n")
    with closing(Ledger(folder.ledger)) as ledger:
        ledger.begin()
        _plan(ledger, num_tasks + num_open)
        ledger.set_meta("enqueued", "1")
        for number in range(_NUM_SLOTS):
            slot = SlotSpec(slot_id=number, label=f"cpu:{number}", devices=())
            ledger.worker_started(number + 1, slot, "host", folder.worker_log(number).name, "0" * 8)
        ledger.commit()
        for begin in range(0, num_tasks, 5000):
            ledger.begin()
            tasks = ledger.claim(min(5000, num_tasks - begin))
            _end(ledger, tasks, range(num_curves), num_points)
            ledger.commit()
    return folder


def _plan(ledger: Ledger, num_tasks: int) -> None:
    encoded, target_id = canonical.payload_and_key(TARGET), ledger.target_id(TARGET)
    seeds = range(math.ceil(num_tasks / (len(_WIDTHS) * 2)))
    settings = product(seeds, _WIDTHS, ("adam", "sgd"))
    tasks = []
    for _, (seed, width, opt) in zip(range(num_tasks), settings, strict=False):
        lr = 10 ** random.Random(seed).uniform(-5, -1)
        payload, key = encoded({"lr": lr, "width": width, "opt": opt, "seed": seed})
        tasks.append(NewTask(key, target_id, payload))
    ledger.add_tasks(tasks)


def _end(ledger: Ledger, tasks: list[Task], logged: range, num_points: int) -> None:
    done, values, failed = [], [], []
    for task in tasks:
        number = task.task_id - 1
        draw = random.Random(number)
        is_failed = number % 50 == 49
        params = canonical.decode(task.payload)
        loss = abs(math.log10(params["lr"]) + 3) + draw.random() / 10
        finished = Finished(
            task.task_id, task.token, Outcome.EXCEPTION if is_failed else Outcome.OK,
            BEGAN_S + number // _NUM_SLOTS * TASK_S, TASK_S * (0.5 + draw.random() / 2), 0, 0,
            100.0 + params["width"],
        )  # fmt: skip
        if is_failed:
            kind = "ValueError: the loss is not finite" if number % 100 == 99 else "KeyError: 'x'"
            finished = finished._replace(message=kind, trace=f"Traceback\n  line 1\n{kind}")
        record = AttemptRecord(task.task_id, task.token, number % _NUM_SLOTS + 1, finished)
        if is_failed:
            failed.append(record)
        else:
            done.append(record)
            result = {"loss": loss, "accuracy": 1 / (1 + loss)}
            values.append((canonical.encode(result), None))
            if number in logged:
                ledger.record_metrics([(task.task_id, task.token, 1, _curve(loss, num_points))])
    ledger.record_done(done, values)
    ledger.record_failed(failed)


def _curve(end: float, num_points: int) -> bytes:
    draw = random.Random(end)
    return metrics.encode(
        (name, step, BEGAN_S + step / 100, sign * (end + math.exp(-step / 300) + draw.random()))
        for step in range(num_points)
        for name, sign in (("loss", 1.0), ("score", -1.0))
    )  # fmt: skip


def go_on(ledger: Ledger, step: int, num_points: int = 1) -> None:
    """Ten of the tasks that wait end, and the first one of all logs points from ``step`` on."""
    ledger.begin()
    ended = [
        AttemptRecord(task.task_id, task.token, 1, Finished(
            task.task_id, task.token, Outcome.OK, time.time(), 0.1, 0, 0, 100.0))
        for task in ledger.claim(10)
    ]  # fmt: skip
    values = [(canonical.encode({"loss": 0.5, "accuracy": 0.5}), None) for _ in ended]
    ledger.record_done(ended, values)
    logged = (("loss", step + n, time.time(), 0.5) for n in range(num_points))
    ledger.record_metrics([(1, 1, 1, metrics.encode(logged))])
    ledger.commit()


def hostile_sweep(path: Path) -> RunFolder:
    """A sweep whose settings, results and failures hold every hostile text."""
    run = made_sweep(path, 1)
    said = [*HOSTILE.values()]
    with closing(Ledger(run.ledger)) as ledger:
        ledger.begin()
        db = ledger._db
        payload = canonical.encode({f"p{n}": text for n, text in enumerate(said)})
        db.execute("UPDATE tasks SET payload = ?", (payload,))
        db.execute("UPDATE results SET value = ?", (payload,))
        for n, text in enumerate(said):
            db.execute(
                "INSERT INTO failures VALUES (?, ?, 'exception', ?, ?)",
                (n + 1, str(n), *[text.encode("utf-8", "replace").decode()] * 2),
            )
            row = (1, n + 5, 1, 1.0, 1.0, "exception", None, 1.0, 0, 0, n + 1, None)
            db.execute(f"INSERT INTO attempts VALUES ({','.join('?' * len(row))})", row)
        ledger.commit()
    return run


def hostile_training(path: Path) -> RunFolder:
    """A training whose records hold every hostile text as a name and as a value."""
    lines = [
        {"kind": "evaluation", "step": at, text: 0.5, "loss": float("nan")}
        for at, text in enumerate(HOSTILE.values())
    ]
    folder = gang_folder(path, lines)
    events = [{"event": "start", "ranks": list(HOSTILE.values())},
              {"event": "end", "exit_code": 1, "stall": HOSTILE["html"] + HOSTILE["bidi"],
               "report": list(HOSTILE.values())}]  # fmt: skip
    folder.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    results = {"best": {"metric": HOSTILE["cursor"], "value": 1},
               "metrics": {HOSTILE["title"]: {"a": 1}}}  # fmt: skip
    folder.training_results.write_text(json.dumps(results))
    return folder
