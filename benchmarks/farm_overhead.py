"""No-op tasks per second with durable results, beside peers in the same run.

    python benchmarks/farm_overhead.py                 # 20,000 tasks, 5 rounds, about 8 minutes
    python benchmarks/farm_overhead.py --quick

Peers are measured when they can be imported (``pip install -e '.[bench]'``) or, for GNU parallel,
when it is on the PATH. ``durable`` says after what a finished result is still there: nothing,
the crash of a process, or the loss of power. Slow peers get fewer tasks; the column says how many.
``whole`` counts from the call to its return, with the start of workers and, for muster, the table
in Parquet and CSV; ``steady`` only from the first to the last result, for muster and peers alike.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import multiprocessing
import os
import pickle
import random
import shutil
import sqlite3
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import orjson

sys.path.insert(0, str(Path(__file__).parent))
from measuring import alternate, goal, machine, summary, table, write_json

WORKERS = 2
TARGET = "def noop(i: int, seed: int = 0):\n    return {'i': i}\n"


def noop(i: int) -> int:
    return i


class Steady:
    """Seconds from the first to the last of ``count`` results."""

    def __init__(self) -> None:
        self.rate = 0.0

    def consume(self, results: Iterable[object], count: int) -> None:
        iterator = iter(results)
        next(iterator)
        begin = time.perf_counter()
        for _ in iterator:
            pass
        self.rate = (count - 1) / (time.perf_counter() - begin)


class Contest:
    """Each contender returns its whole rate and leaves its steady rate in ``steady``."""

    def __init__(self, folder: Path, tasks: int, few: int) -> None:
        self.folder = folder
        self.tasks = tasks
        self.few = few
        self.steady: dict[str, list[float]] = {}
        self.counts: dict[str, int] = {}

    def _note(self, name: str, count: int, begin: float, steady: float) -> float:
        self.steady.setdefault(name, []).append(steady)
        self.counts[name] = count
        return count / (time.perf_counter() - begin)

    def muster_function(self) -> float:
        import muster

        target = self.folder / "noop.py"
        target.write_text(TARGET)
        run = self.folder / "muster-function"
        shutil.rmtree(run, ignore_errors=True)
        begin = time.perf_counter()
        done = muster.sweep(
            f"{target}:noop",
            grid={"i": range(1000)},
            seeds=self.tasks // 1000,
            devices=f"cpu:{WORKERS}",
            run_dir=run,
        )
        rate = self._note("muster, function", self.tasks, begin, _drain(run))
        assert done.exit_code == 0
        return rate

    def muster_command(self) -> float:
        import muster

        run = self.folder / "muster-command"
        shutil.rmtree(run, ignore_errors=True)
        begin = time.perf_counter()
        muster.sweep(
            ["true", "{seed}"],
            seeds=self.few,
            devices=f"cpu:{WORKERS}",
            run_dir=run,
        )
        return self._note("muster, command", self.few, begin, _drain(run))

    def fork_exec(self) -> float:
        begin = time.perf_counter()
        workers = [
            multiprocessing.Process(target=_spawn_trues, args=(self.few // WORKERS,))
            for _ in range(WORKERS)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        rate = self.few / (time.perf_counter() - begin)
        return self._note("raw fork+exec of true", self.few, begin, rate)

    def fork_exec_kept(self) -> float:
        """What a command is promised, and nothing else: what a loop of forty lines takes for it."""
        place = self.folder / "kept"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        begin = time.perf_counter()
        rate = _spawn_kept_trues(place, self.few)
        return self._note("fork+exec, folders, log, row", self.few, begin, rate)

    def function_kept(self) -> float:
        """What a function is promised, and nothing else, in a loop of eighty lines."""
        place = self.folder / "kept-functions"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        begin = time.perf_counter()
        rate = _do_kept_functions(place, self.tasks)
        return self._note("key, seed, log, pipe, rows", self.tasks, begin, rate)

    def process_pool_executor(self) -> float:
        count, begin, steady = self.tasks, time.perf_counter(), Steady()
        with ProcessPoolExecutor(WORKERS) as pool:
            futures = [pool.submit(noop, i) for i in range(count)]
            steady.consume(as_completed(futures), count)
        return self._note("ProcessPoolExecutor", count, begin, steady.rate)

    def pool(self) -> float:
        count, begin, steady = self.tasks, time.perf_counter(), Steady()
        with multiprocessing.Pool(WORKERS) as pool:
            steady.consume(pool.imap_unordered(noop, range(count)), count)
        return self._note("multiprocessing.Pool", count, begin, steady.rate)

    def loky(self) -> float:
        from loky import ProcessPoolExecutor as Loky

        count, begin, steady = self.tasks, time.perf_counter(), Steady()
        with Loky(WORKERS) as pool:
            futures = [pool.submit(noop, i) for i in range(count)]
            steady.consume(as_completed(futures), count)
        return self._note("loky", count, begin, steady.rate)

    def joblib(self) -> float:
        from joblib import Parallel, delayed

        count, begin = self.tasks, time.perf_counter()
        with Parallel(n_jobs=WORKERS) as parallel:
            parallel(delayed(noop)(i) for i in range(100))
            warm = time.perf_counter()
            parallel(delayed(noop)(i) for i in range(count))
            steady = count / (time.perf_counter() - warm)
        return self._note("joblib, auto batches", count, begin, steady)

    def ray(self) -> float:
        import ray

        count, begin, steady = self.few, time.perf_counter(), Steady()
        ray.init(
            num_cpus=WORKERS,
            include_dashboard=False,
            _node_ip_address="127.0.0.2",
            logging_level="ERROR",
            log_to_driver=False,
        )
        try:
            task = ray.remote(noop)
            waiting = [task.remote(i) for i in range(count)]

            def results() -> Iterable[object]:
                left = waiting
                while left:
                    done, left = ray.wait(left, num_returns=min(len(left), 100))
                    yield from ray.get(done)

            steady.consume(results(), count)
        finally:
            ray.shutdown()
        return self._note("Ray tasks", count, begin, steady.rate)

    def optuna(self) -> float:
        count = max(20, self.few // 10)
        journal = self.folder / "optuna.journal"
        journal.unlink(missing_ok=True)
        begin = time.perf_counter()
        with ProcessPoolExecutor(WORKERS) as pool:
            list(pool.map(_optuna_trials, [str(journal)] * WORKERS, [count // WORKERS] * WORKERS))
        rate = count / (time.perf_counter() - begin)
        return self._note("Optuna, journal file", count, begin, rate)

    def gnu_parallel(self) -> float:
        count = max(50, self.few // 4)
        log = self.folder / "joblog"
        log.unlink(missing_ok=True)
        begin = time.perf_counter()
        subprocess.run(
            ["parallel", "-j", str(WORKERS), "--joblog", str(log), "true"],
            input="\n".join(map(str, range(count))).encode(),
            check=True,
            stderr=subprocess.DEVNULL,
        )
        rate = count / (time.perf_counter() - begin)
        return self._note("GNU parallel, job log", count, begin, rate)

    def sqlite(self) -> float:
        path = self.folder / "floor.sqlite"
        path.unlink(missing_ok=True)
        database = sqlite3.connect(path, isolation_level=None)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute("CREATE TABLE results (id INTEGER PRIMARY KEY, value BLOB)")
        count, begin = self.tasks, time.perf_counter()
        for start in range(0, count, 100):
            database.execute("BEGIN")
            rows = [(i, b'{"i":1}') for i in range(start, start + 100)]
            database.executemany("INSERT INTO results VALUES (?, ?)", rows)
            database.execute("COMMIT")
        rate = count / (time.perf_counter() - begin)
        database.close()
        return self._note("SQLite alone, groups of 100", count, begin, rate)


DURABLE = {
    "muster, function": "power loss",
    "muster, command": "power loss",
    "fork+exec, folders, log, row": "power loss",
    "key, seed, log, pipe, rows": "power loss",
    "Optuna, journal file": "power loss",
    "SQLite alone, groups of 100": "power loss",
    "GNU parallel, job log": "process crash",
}


def _drain(run: Path) -> float:
    """From the start of the first to the end of the last task; its commit is 10 ms later."""
    database = sqlite3.connect(run / "ledger.sqlite")
    count, seconds = database.execute(
        "SELECT count(*), max(started_s + seconds) - min(started_s) FROM attempts"
    ).fetchone()
    database.close()
    return float(count / (seconds + 0.01))


def _spawn_trues(count: int) -> None:
    environment = dict(os.environ)
    for number in range(count):
        os.waitpid(os.posix_spawnp("true", ["true", str(number)], environment), 0)


def _spawn_kept_trues(place: Path, count: int) -> float:
    """Two folders, a log and an environment for each, its result file looked for, and a row on the
    disk, many to a commit; returns the rate.
    """
    database = sqlite3.connect(place / "rows.sqlite", isolation_level=None)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    database.execute(
        "CREATE TABLE rows (id INTEGER PRIMARY KEY, code, began, ended, start, end, v)"
    )
    ends, workers, begin = [], [], time.perf_counter()
    for number in range(WORKERS):
        ours, theirs = multiprocessing.Pipe(duplex=False)
        part = range(number, count, WORKERS)
        workers.append(multiprocessing.Process(target=_keep_trues, args=(place, part, theirs)))
        workers[-1].start()
        theirs.close()
        ends.append(ours)
    while ends:
        wait(ends)
        time.sleep(0.01)  # what arrives meanwhile shares a commit
        rows = []
        for end in list(ends):
            while end in ends and end.poll():
                row = end.recv()
                rows.append(row) if row else ends.remove(end)
        database.execute("BEGIN")
        database.executemany("INSERT INTO rows VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        database.execute("COMMIT")
    for worker in workers:
        worker.join()
    database.close()
    return count / (time.perf_counter() - begin)


def _keep_trues(place: Path, numbers: range, results: Any) -> None:
    log = os.open(f"{place}/worker-{numbers.start}.log", os.O_CREAT | os.O_APPEND | os.O_RDWR)
    os.dup2(log, 1)
    for number in numbers:
        began, start = time.time(), os.lseek(log, 0, os.SEEK_END)
        own, saved = f"{place}/{number}", f"{place}/{number}-saved"
        os.mkdir(own)
        os.mkdir(saved)
        said = {"TASK_DIR": own, "SAVED": saved, "PARAMS": json.dumps({"seed": number})}
        pid = os.posix_spawnp("true", ["true", str(number)], {**os.environ, **said})
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        found = os.path.exists(f"{own}/result.json")
        value = Path(own, "result.json").read_bytes() if found else b"{}"
        os.rmdir(own)
        os.rmdir(saved)
        end = os.lseek(log, 0, os.SEEK_END)
        results.send((number, code, began, time.time(), start, end, value))
    results.send(None)


_RESULT = struct.Struct("<HqddqqI")
_HELD = 512


def _do_kept_functions(place: Path, count: int) -> float:
    """Tasks are listed with keys, claimed by hundreds before they are sent, and done with two rows
    on the disk, many to a commit; each result leaves its worker before the next begins. Returns
    the rate from the first result to the last.
    """
    database = sqlite3.connect(place / "rows.sqlite", isolation_level=None)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    database.execute("CREATE TABLE tasks (id INTEGER PRIMARY KEY, key UNIQUE, params, state, n)")
    database.execute("CREATE TABLE results (id INTEGER PRIMARY KEY, value)")
    database.execute("CREATE TABLE attempts (id INTEGER PRIMARY KEY, began, took, a, z, peak)")
    for first in range(0, count, 2000):
        database.execute("BEGIN")
        params = [orjson.dumps({"i": i, "seed": 0}) for i in range(first, min(count, first + 2000))]
        rows = [(hashlib.blake2b(one, digest_size=16).digest(), one) for one in params]
        database.executemany("INSERT INTO tasks VALUES (NULL, ?, ?, 0, 0)", rows)
        database.execute("COMMIT")
    lines, held, began = {}, dict[int, int](), 0.0
    for number in range(WORKERS):
        (orders, to_do), (done, told) = os.pipe(), os.pipe()
        worker = multiprocessing.Process(target=_keep_functions, args=(place, number, orders, told))
        worker.start()
        os.close(orders), os.close(told)
        lines[done], held[done] = (worker, os.fdopen(to_do, "wb", 0), bytearray()), 0
    claimed = num_done = 0
    while num_done < count:
        database.execute("BEGIN")
        for done in wait(list(lines)) if claimed else lines:
            _, _, buffer = lines[done]
            rows = _read_results(done, buffer) if claimed else []
            held[done] -= len(rows)
            num_done += len(rows)
            database.executemany("UPDATE tasks SET state = 2 WHERE id = ?", [r[:1] for r in rows])
            database.executemany("INSERT INTO results VALUES (?, ?)", [(r[0], r[-1]) for r in rows])
            plain = [(*row[:-1], 20.0) for row in rows]
            database.executemany("INSERT INTO attempts VALUES (?, ?, ?, ?, ?, ?)", plain)
        orders_of = {}
        for done in lines:
            if held[done] < _HELD // 2 and claimed < count:
                sql = "SELECT id, params FROM tasks WHERE id > ? ORDER BY id LIMIT ?"
                tasks = database.execute(sql, (claimed, _HELD - held[done])).fetchall()
                sql = "UPDATE tasks SET state = 1, n = 1 WHERE id BETWEEN ? AND ?"
                database.execute(sql, (tasks[0][0], tasks[-1][0]))
                claimed = tasks[-1][0]
                held[done] += len(tasks)
                orders_of[done] = tasks
        database.execute("COMMIT")
        began = began or time.perf_counter()
        for done, tasks in orders_of.items():
            data = pickle.dumps(tasks)
            lines[done][1].write(struct.pack("<I", len(data)) + data)
        time.sleep(0.004)  # what arrives meanwhile shares a commit
    rate = count / (time.perf_counter() - began)
    for done, (worker, to_do, _) in lines.items():
        to_do.write(struct.pack("<I", 0))
        worker.join()
        to_do.close(), os.close(done)
    database.close()
    return rate


def _read_results(done: int, buffer: bytearray) -> list[tuple[Any, ...]]:
    buffer += os.read(done, 1 << 20)
    rows, place = [], 0
    while len(buffer) - place >= _RESULT.size:
        size, task, began, took, start, end, _ = _RESULT.unpack_from(buffer, place)
        if len(buffer) - place < _RESULT.size + size:
            break
        value = bytes(buffer[place + _RESULT.size : place + _RESULT.size + size])
        rows.append((task, began, took, start, end, value))
        place += _RESULT.size + size
    del buffer[:place]
    return rows


def _keep_functions(place: Path, number: int, orders: int, told: int) -> None:
    log = os.open(f"{place}/worker-{number}.log", os.O_CREAT | os.O_APPEND | os.O_RDWR)
    kept, folder, mask = [os.dup(one) for one in (0, log, log)], os.getcwd(), os.umask(0o22)
    stream = os.fdopen(orders, "rb")
    while size := struct.unpack("<I", stream.read(4))[0]:
        for task, params in pickle.loads(stream.read(size)):
            began, begin = time.time(), time.perf_counter()
            start = os.lseek(log, 0, os.SEEK_END)
            random.seed(task)
            arguments = orjson.loads(params)
            value = orjson.dumps({"value": noop(arguments["i"])})
            took = time.perf_counter() - begin
            for one, at in enumerate(kept):  # a task may have changed any of these
                os.dup2(at, one)
            sys.stdout.flush(), sys.stderr.flush()
            os.umask(mask)
            if os.getcwd() != folder:
                os.chdir(folder)
            end = os.lseek(log, 0, os.SEEK_END)
            os.write(told, _RESULT.pack(len(value), task, began, took, start, end, 0) + value)


def _optuna_trials(journal: str, count: int) -> None:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(journal)),
        study_name="noop",
        load_if_exists=True,
        sampler=optuna.samplers.RandomSampler(),
    )
    study.optimize(lambda trial: 0.0, n_trials=count)


def contenders(contest: Contest) -> dict[str, Callable[[], float]]:
    found: dict[str, Callable[[], float]] = {
        "muster, function": contest.muster_function,
        "multiprocessing.Pool": contest.pool,
        "ProcessPoolExecutor": contest.process_pool_executor,
        "muster, command": contest.muster_command,
        "raw fork+exec of true": contest.fork_exec,
        "fork+exec, folders, log, row": contest.fork_exec_kept,
        "key, seed, log, pipe, rows": contest.function_kept,
        "SQLite alone, groups of 100": contest.sqlite,
    }
    for package, name, run in (
        ("joblib", "joblib, auto batches", contest.joblib),
        ("loky", "loky", contest.loky),
        ("optuna", "Optuna, journal file", contest.optuna),
        ("ray", "Ray tasks", contest.ray),
    ):
        if importlib.util.find_spec(package):
            found[name] = run
        else:
            print(f"{package} is not installed: not measured", file=sys.stderr)
    if shutil.which("parallel"):
        found["GNU parallel, job log"] = contest.gnu_parallel
    else:
        print("GNU parallel is not installed: not measured", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, default=20_000)
    parser.add_argument("--few", type=int, default=4_000, help="tasks of slow contenders")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.tasks, args.few, args.repeats = 2_000, 200, 1
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        contest = Contest(Path(name), args.tasks, args.few)
        whole = alternate(contenders(contest), args.repeats)
    about = machine("joblib", "loky", "optuna", "ray")
    print(f"{about['processor']}, {about['cores']} cores, {about['date']}, {about['versions']}")
    ours = summary(contest.steady["muster, function"])["median"]
    rows = []
    record = {}
    order = sorted(whole, key=lambda kind: -summary(contest.steady[kind])["median"])
    for kind in order:
        values = whole[kind]
        steady, all_in = summary(contest.steady[kind]), summary(values)
        record[kind] = {"steady": steady, "whole": all_in, "tasks": contest.counts[kind]}
        rows.append(
            [
                kind,
                f"{contest.counts[kind]:,}",
                f"{steady['median']:,.0f}",
                f"[{steady['low']:,.0f}–{steady['high']:,.0f}]",
                f"{all_in['median']:,.0f}",
                f"{ours / steady['median']:.2f}",
                DURABLE.get(kind, "none"),
            ]
        )
    table(["", "tasks", "steady/s", "range", "whole/s", "muster is ×", "durable"], rows)
    commands = summary(contest.steady["muster, command"])["median"]
    raw = summary(contest.steady["raw fork+exec of true"])["median"]
    share = commands / raw
    all_in = summary(whole["muster, function"])["median"]
    loop = summary(contest.steady["key, seed, log, pipe, rows"])["median"]
    goal("empty tasks, steady, tasks/s", "≥ 80,000", f"{ours:,.0f}", ours >= 80_000,
         bound=f"{loop:,.0f}: a loop that keeps the same promises (decision 0078)")  # fmt: skip
    goal("the same with start and table", "≥ 30,000", f"{all_in:,.0f}", all_in >= 30_000)
    kept = summary(contest.steady["fork+exec, folders, log, row"])["median"] / raw
    goal("commands, of fork+exec", "≥ 0.9", f"{share:.2f}", share >= 0.9,
         bound=f"{kept:.2f}: a loop that keeps the same promises (decision 0070)")  # fmt: skip
    write_json(args.json, {"machine": about, "figures": record})


if __name__ == "__main__":
    main()
