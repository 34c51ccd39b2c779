"""What ``muster map`` costs besides the stage: records per second and memory beside its peers.

    python benchmarks/map_overhead.py            # 200,000 and 2,000,000 rows; tens of minutes
    python benchmarks/map_overhead.py --peers-up-to 200000    # minutes
    python benchmarks/map_overhead.py --quick    # 20,000 rows, one round
    python benchmarks/map_overhead.py --peers-python /path/to/python    # where the peers are
    python benchmarks/map_overhead.py --stage-us 200 --rows 50000    # a stage that works

A stage that returns its record, over JSON lines of about 200 bytes, from JSON lines to JSON lines,
on two workers. "plain loop" is one Python process with ``json`` that writes, syncs and renames a
file per 10,000 rows. "by hand" is what somebody would write who has two cores and knows their
input: two forked processes, orjson, parts that are synced and renamed, skipped where they are there
already, and joined at the end. It gives no ids, rejects no record, notices no changed input, counts
nothing and survives no worker: it bounds what muster can reach here. ``datasets`` maps with
``num_proc=2`` and exports; Ray Data has two CPUs; datatrove has two tasks, and for them the input
in two files. Peers that are not installed are left out. Seconds are from the start of the command
to its end, start of workers included. Of all but datatrove and Ray Data, which promise no order,
the output is compared row by row.

Memory is the peak of the sum over all processes of the command, read every 50 ms: proportional set
size, in which a page that two processes share counts half for each. Ray's servers belong to it. It
has one more round of its own: reading it takes a tenth of a core, which the plain loop leaves free
and two workers do not.
Goals: 1.5 times the plain loop (1.9 times with a stage that takes 200 µs), and no more memory for
ten times the rows (10 % at most).
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from measuring import goal, machine, summary, table, write_json

#: Processor time that the stage takes for a record, in all contenders.
STAGE_S = 0.0
ROWS_PER_FILE = 10_000
SAMPLE_EVERY_S = 0.05
MUSTER, PLAIN, BY_HAND = "muster map", "plain loop", "by hand"
#: Contender -> its package.
PEERS = {"datasets.map": "datasets", "Ray Data": "ray", "datatrove": "datatrove"}
UNORDERED = ("Ray Data", "datatrove")
JUDGED = 100_000  # rows, and more
GOAL_SPEED, GOAL_WITH_WORK, GOAL_MEMORY = 1.5, 1.9, 1.10


@dataclass
class Found:
    """Records a second in each round, and the memory in a round of its own."""

    rates: list[float] = field(default_factory=list)
    peak_mib: float = 0.0


# ---------------------------------------------------------------------- the contenders


def same(record: dict[str, Any]) -> dict[str, Any]:
    if STAGE_S:
        end = time.process_time() + STAGE_S
        while time.process_time() < end:
            pass
    return record


def plain(source: Path, out: Path) -> None:
    """Read, write, sync and rename: the least that a program does which must not lose a row."""
    out.mkdir()

    def publish(lines: list[str], number: int) -> None:
        final = out / f"part-{number:05d}.jsonl"
        temporary = final.with_suffix(".tmp")
        with temporary.open("w") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(final)

    lines: list[str] = []
    number = 0
    for path in inputs(source):
        with path.open() as file:
            for line in file:
                lines.append(json.dumps(same(json.loads(line))) + "\n")
                if len(lines) == ROWS_PER_FILE:
                    publish(lines, number)
                    lines, number = [], number + 1
    if lines:
        publish(lines, number)


def by_hand(source: Path, out: Path) -> None:
    """What two processes can do at most: nothing but the rows, kept so that a kill loses a part."""
    import multiprocessing
    import shutil

    out.mkdir(exist_ok=True)
    jobs = [job for path in inputs(source) for job in pieces(path, out)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(do_piece, jobs, chunksize=1)
    temporary = out / "out.tmp"
    with temporary.open("wb") as whole:
        for *_, part in jobs:
            with part.open("rb") as file:
                shutil.copyfileobj(file, whole, 1 << 20)
        whole.flush()
        os.fsync(whole.fileno())
    temporary.rename(out / "out.jsonl")
    for *_, part in jobs:
        part.unlink()


def pieces(path: Path, out: Path) -> Iterator[tuple[Path, int, int, Path]]:
    """A file in pieces of about a megabyte that end with a line: file, begin, end, part."""
    begin, size = 0, path.stat().st_size
    with path.open("rb") as file:
        while begin < size:
            file.seek(min(begin + (1 << 20), size))
            file.readline()
            end = file.tell()
            yield path, begin, end, out / f"{path.stem}-{begin:012d}.part"
            begin = end


def do_piece(job: tuple[Path, int, int, Path]) -> None:
    import orjson

    path, begin, end, part = job
    if part.exists():
        return
    with path.open("rb") as file:
        file.seek(begin)
        lines = file.read(end - begin).splitlines()
    newline = orjson.OPT_APPEND_NEWLINE
    temporary = part.with_suffix(".tmp")
    with temporary.open("wb") as file:
        made = (orjson.dumps(same(orjson.loads(line)), option=newline) for line in lines)
        file.write(b"".join(made))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(part)


def with_datasets(source: Path, out: Path) -> None:
    import datasets

    files = [str(path) for path in inputs(source)]
    cache = str(out.parent / "cache")
    loaded = datasets.load_dataset("json", data_files=files, split="train", cache_dir=cache)
    out.mkdir()
    loaded.map(same, num_proc=2).to_json(out / "out.jsonl")


def with_ray(source: Path, out: Path) -> None:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    ray.data.read_json(str(source), lines=True).map_batches(same).write_json(str(out))
    ray.shutdown()


def with_datatrove(source: Path, out: Path) -> None:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter

    def stage(documents: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        yield from documents

    steps = [
        JsonlReader(str(source), text_key="text", id_key="id"),
        stage,
        JsonlWriter(str(out), output_filename="${rank}.jsonl", compression=None),
    ]
    logs = str(out.parent / "logs")
    LocalPipelineExecutor(steps, tasks=2, workers=2, logging_dir=logs).run()


PROGRAMS: dict[str, Callable[[Path, Path], None]] = {
    PLAIN: plain,
    BY_HAND: by_hand,
    "datasets.map": with_datasets,
    "Ray Data": with_ray,
    "datatrove": with_datatrove,
}


def command_for(contender: str, source: Path, folder: Path, peers_python: str) -> list[str]:
    out = folder / "out"
    if contender == MUSTER:
        head = f"import time\nfrom typing import Any\n\nSTAGE_S = {STAGE_S}\n\n\n"
        (folder / "stage.py").write_text(head + inspect.getsource(same))
        return [
            *(sys.executable, "-m", "muster", "map", "stage.py:same", "--input", str(source)),
            *("--output", str(out / "out.jsonl"), "--devices", "cpu:2", "--quiet"),
            *("--run-dir", str(folder / "run")),
        ]
    python = peers_python if contender in PEERS else sys.executable
    work = ["--stage-us", str(STAGE_S * 1e6)]
    return [python, str(Path(__file__).resolve()), *work, "--as", contender, str(source), str(out)]


def installed(python: str) -> dict[str, str]:
    """The peers that this interpreter has, with their versions; nothing of them is imported."""
    program = (
        "import importlib.metadata as m, json, sys\n"
        "here = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
        "print(json.dumps([here.get(name) for name in sys.argv[1:]]))"
    )
    done = subprocess.run(
        [python, "-c", program, *PEERS.values()], capture_output=True, text=True, check=True
    )
    found = zip(PEERS, json.loads(done.stdout), strict=True)
    return {peer: version for peer, version in found if version is not None}


# ---------------------------------------------------------------------- measuring


def write_input(folder: Path, count: int) -> None:
    """About 200 bytes a row, in two files."""
    folder.mkdir()
    text = "the quick brown fox jumps over the lazy dog " * 3
    for half in range(2):
        with (folder / f"in-{half}.jsonl").open("w") as file:
            for n in range(half * count // 2, (half + 1) * count // 2):
                # Six digits: the export of datasets writes ten at most.
                score = round(n / 7, 6)
                row = {"id": n, "text": f"{text}{n}", "score": score, "tag": f"t{n % 97}"}
                file.write(json.dumps(row) + "\n")


def inputs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl"))


class Memory:
    """The peak of the proportional set size of a process and all below it, in MiB."""

    def __init__(self, pid: int) -> None:
        self.peak_mib = 0.0
        self._pid = pid
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def stop(self) -> float:
        self._is_over.set()
        self._thread.join()
        return self.peak_mib

    def _watch(self) -> None:
        import psutil

        top = psutil.Process(self._pid)
        while not self._is_over.wait(SAMPLE_EVERY_S):
            total = 0
            try:
                family = [top, *top.children(recursive=True)]
            except psutil.Error:
                return
            for process in family:
                try:
                    total += process.memory_full_info().pss
                except (psutil.Error, OSError):
                    continue
            self.peak_mib = max(self.peak_mib, total / 2**20)


def measure(
    contender: str, source: Path, count: int, peers_python: str, *, watches: bool, compares: bool
) -> tuple[float, float]:
    """Records a second, and the peak of memory in MiB where ``watches`` says so; ``compares`` every
    row with that of the input, which takes longer than most contenders.
    """
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        folder = Path(name)
        with (folder / "log").open("w+") as log:
            began = time.monotonic()
            process = subprocess.Popen(
                command_for(contender, source, folder, peers_python),
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            memory = Memory(process.pid) if watches else None
            process.wait()
            seconds = time.monotonic() - began
            peak_mib = 0.0 if memory is None else memory.stop()
            if process.returncode != 0:
                log.seek(0)
                raise SystemExit(f"{contender} failed:\n{log.read()[-3000:]}")
        check(contender, source, folder / "out", count, compares=compares)
    return count / seconds, peak_mib


def check(contender: str, source: Path, out: Path, count: int, *, compares: bool) -> None:
    """That it did the work: as many rows as went in, and the same ones where it promises order."""
    num_rows = 0
    expected = (json.loads(line) for path in inputs(source) for line in path.open("rb"))
    files = sorted(path for path in out.rglob("*") if path.suffix in (".json", ".jsonl"))
    for path in files:
        with path.open("rb") as file:
            for line in file:
                num_rows += 1
                if compares and json.loads(line) != next(expected):
                    raise SystemExit(f"{contender}: row {num_rows} is not that of the input")
    if num_rows != count:
        raise SystemExit(f"{contender} wrote {num_rows:,} rows of {count:,}")


def run_size(
    count: int, contenders: list[str], repeats: int, peers_python: str, *, watches: bool
) -> dict[str, Found]:
    found = {name: Found() for name in contenders}
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        source = Path(name) / "input"
        write_input(source, count)
        for number in range(1, repeats + 1):
            # Every other round backwards: whoever always comes after a certain other is not
            # favoured.
            for one in contenders if number % 2 else contenders[::-1]:
                compares = number == 1 and one not in UNORDERED
                rate, _ = measure(
                    one, source, count, peers_python, watches=False, compares=compares
                )
                found[one].rates.append(rate)
                say(count, f"round {number}: {one}: {rate:,.0f} records/s")
        for one in contenders if watches else ():
            _, found[one].peak_mib = measure(
                one, source, count, peers_python, watches=True, compares=False
            )
            say(count, f"{one}: {found[one].peak_mib:,.0f} MiB")
    return found


def say(count: int, text: str) -> None:
    print(f"  {count:,} rows, {text}", file=sys.stderr)


def report(count: int, found: dict[str, Found]) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for name, values in found.items():
        pairs = list(zip(values.rates, found[PLAIN].rates, strict=True))
        record[name] = {
            "records_per_s": summary(values.rates),
            "of_plain_loop": summary([rate / base for rate, base in pairs]),
            "peak_mib": summary([values.peak_mib]),
        }
    print(f"\n{count:,} rows, {len(found[PLAIN].rates)} rounds")
    rows = []
    for name, figures in record.items():
        rate, ratio, peak = figures.values()
        rows.append(
            [
                name,
                f"{rate['median']:,.0f}",
                f"[{rate['low']:,.0f}–{rate['high']:,.0f}]",
                f"{ratio['median']:.2f}",
                f"{peak['median']:,.0f}",
            ]
        )
    table(["", "records/s", "range", "of plain loop", "peak MiB"], rows)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[200_000, 2_000_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers-python", default=sys.executable, help="an interpreter with peers")
    parser.add_argument(
        "--only", nargs="+", choices=[BY_HAND, MUSTER, *PEERS], help="beside the plain loop"
    )
    parser.add_argument("--peers-up-to", type=int, help="rows; for more, peers are left out")
    parser.add_argument("--stage-us", type=float, default=0, help="µs of work on each record")
    parser.add_argument("--quick", action="store_true", help="20,000 rows, one round")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--as", dest="program", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    global STAGE_S
    STAGE_S = args.stage_us / 1e6
    if args.program is not None:
        contender, source, out = args.program
        PROGRAMS[contender](Path(source), Path(out))
        return
    if args.quick:
        args.rows, args.repeats = [20_000], 1
    peers = installed(args.peers_python)
    contenders = [PLAIN, BY_HAND, MUSTER, *peers]
    if args.only is not None:
        contenders = [name for name in contenders if name == PLAIN or name in args.only]
    about = machine()
    print(f"{about['processor']}, {about['cores']} cores, {about['date']}")
    versions = ", ".join(f"{peer}: {peers.get(peer, 'not installed')}" for peer in PEERS)
    print(f"peers: {versions}")
    record: dict[str, Any] = {"machine": about, "peers": peers, "rows": {}}
    most = args.peers_up_to or max(args.rows)
    for count in args.rows:
        here = [name for name in contenders if name not in PEERS or count <= most]
        # With a stage that works there is no goal for memory, and a round takes long.
        watches = not args.stage_us
        found = run_size(count, here, args.repeats, args.peers_python, watches=watches)
        record["rows"][count] = report(count, found)
    if MUSTER in contenders:
        print()
        judge(record["rows"], GOAL_WITH_WORK if args.stage_us else GOAL_SPEED)
    write_json(args.json, record)


def judge(by_count: dict[int, dict[str, Any]], least_ratio: float) -> None:
    for count, figures in by_count.items():
        ratio = figures[MUSTER]["of_plain_loop"]["median"]
        if count < JUDGED:  # the start is all that such a run takes
            continue
        what = f"{count:,} rows{', 200 µs each' * bool(STAGE_S)}, of the plain loop"
        hand = figures.get(BY_HAND, {"of_plain_loop": {"median": 0.0}})["of_plain_loop"]["median"]
        bound = f"{hand:.2f}: two processes by hand that keep nothing else" if hand else ""
        goal(what, f"≥ {least_ratio}", f"{ratio:.2f}", ratio >= least_ratio, bound=bound)
    if len(by_count) > 1 and not STAGE_S:
        least, most = min(by_count), max(by_count)
        growth = (
            by_count[most][MUSTER]["peak_mib"]["median"]
            / by_count[least][MUSTER]["peak_mib"]["median"]
        )
        what = f"memory for {most:,} rows, × that for {least:,}"
        goal(what, f"≤ {GOAL_MEMORY}", f"{growth:.2f}", growth <= GOAL_MEMORY)


if __name__ == "__main__":
    main()
