"""What happens after a fault: how long until the end, who is named, and what is left behind.

    python benchmarks/faults.py            # 3 rounds: about 15 minutes, most of it waiting
    python benchmarks/faults.py --quick    # an exception only, one round

One hand-written training of two ranks, under ``muster run`` and under torchrun, each with its
defaults. An exception, a kill -9 and a SIGSTOP hit rank 1; a data loader of rank 1 sleeps; or the
launcher itself is killed with -9. A launcher that has not ended after ``--limit`` seconds is given
up, and everything it left is killed.

``ended after`` and ``named after`` count from the fault: until the launcher's exit, and until its
output first names the cause (the message of the exception, the signal, or the rank that the others
wait for). ``line`` is where in all it wrote since the fault that is. ``left`` is how many ranks
live on three seconds after the launcher has ended.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import psutil

from measuring import goal, machine, summary, table, write_json

PROGRAM = Path(__file__).parent / "programs" / "faulty.py"
LAUNCHERS = {
    "muster run": ["-m", "muster", "run", "--devices", "cpu:2"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}
#: Fault → what counts as naming its cause.
CAUSES = {
    "exception": r"ValueError: bad sample 7",
    "kill": r"(?i)signal 9|SIGKILL|Signal\.?9|killed",
    "stop": r"(?i)rank 1\b.*(stop|wait|holds|stall)|(stopped|SIGSTOP|waits? for).*rank 1\b",
    "sleep": r"(?i)rank 1\b.*(loader|wait|holds|stall|data)|waits? for.*rank 1\b",
    "launcher": "",
}
TITLES = {
    "exception": "exception in rank 1",
    "kill": "kill -9 of rank 1",
    "stop": "SIGSTOP of rank 1",
    "sleep": "loader of rank 1 sleeps",
    "launcher": "kill -9 of the launcher",
}
_SETTLE_S = 3.0


@dataclass(frozen=True)
class Found:
    """None: never, within the limit. ``named_line`` of ``num_lines`` written after the fault."""

    ended_s: float | None
    named_s: float | None
    named_line: int | None
    num_lines: int
    left: int
    exit_code: int | None
    named_text: str


def try_out(launcher: str, fault: str, limit_s: float) -> Found:
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        folder = Path(name)
        program = [str(PROGRAM), name, "none" if fault == "launcher" else fault]
        process = subprocess.Popen(
            [sys.executable, *LAUNCHERS[launcher], *program],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        family: dict[int, psutil.Process] = {}
        lines: list[tuple[float, str]] = []
        reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
        reader.start()
        try:
            fault_s = _wait_for_fault(process, folder, fault, family)
            ended_s = _wait_for_end(process, fault_s + limit_s)
            time.sleep(_SETTLE_S)
            left = [pid for pid in _ranks(folder) if _is_alive(pid)]
        finally:
            _kill_all(process, folder, family)
        reader.join(timeout=5)
    after = [(at, line) for at, line in lines if at >= fault_s - 0.005 and line.strip()]
    named = None
    if CAUSES[fault]:
        named = next(
            (
                (number, at, line)
                for number, (at, line) in enumerate(after, 1)
                if re.search(CAUSES[fault], line)
            ),
            None,
        )
    return Found(
        ended_s=None if ended_s is None else ended_s - fault_s,
        named_s=None if named is None else named[1] - fault_s,
        named_line=None if named is None else named[0],
        num_lines=len(after),
        left=len(left),
        exit_code=None if ended_s is None else process.returncode,
        named_text="" if named is None else named[2].strip(),
    )


def _read(process: subprocess.Popen[str], lines: list[tuple[float, str]]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.append((time.time(), line))


def _wait_for_fault(
    process: subprocess.Popen[str], folder: Path, fault: str, family: dict[int, psutil.Process]
) -> float:
    deadline = time.monotonic() + 120
    steps = [folder / "step-0", folder / "step-1"]
    while time.monotonic() < deadline:
        time.sleep(0.05)
        _note_family(process, family)
        if fault != "launcher" and (folder / "fault").exists():
            return float((folder / "fault").read_text() or time.time())
        if fault == "launcher" and all(s.exists() and int(s.read_text() or 0) > 20 for s in steps):
            process.kill()
            return time.time()
        if process.poll() is not None and not (folder / "fault").exists():
            raise SystemExit("the launcher ended before the fault")
    raise SystemExit("the fault did not happen within two minutes")


def _wait_for_end(process: subprocess.Popen[str], deadline_s: float) -> float | None:
    while time.time() < deadline_s:
        if process.poll() is not None:
            return time.time()
        time.sleep(0.02)
    return None


def _note_family(process: subprocess.Popen[str], family: dict[int, psutil.Process]) -> None:
    try:
        for child in psutil.Process(process.pid).children(recursive=True):
            family[child.pid] = child
    except psutil.NoSuchProcess:
        return


def _ranks(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("pid-*")]


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill_all(
    process: subprocess.Popen[str], folder: Path, family: dict[int, psutil.Process]
) -> None:
    """Everything this try has started: by the ids it was seen with, never by a name."""
    _note_family(process, family)
    if process.poll() is None:
        process.kill()
    for child in family.values():
        try:
            if child.is_running():  # the same process, not a later one with its number
                child.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=float, default=45.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--faults", nargs="+", choices=list(TITLES), default=list(TITLES))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.faults = 1, ["exception"]
    found: dict[tuple[str, str], list[Found]] = {}
    for round_number in range(args.repeats):
        for fault in args.faults:
            for launcher in LAUNCHERS:
                one = try_out(launcher, fault, args.limit)
                found.setdefault((fault, launcher), []).append(one)
                print(f"  round {round_number + 1}: {fault}: {launcher}: {one}", file=sys.stderr)
    about = machine()
    print(f"{about['processor']}, {about['cores']} cores, {about['date']}; {args.repeats} rounds")
    rows = []
    record: list[dict[str, Any]] = []
    for (fault, launcher), values in found.items():
        ended = [v.ended_s for v in values if v.ended_s is not None]
        named = [v.named_s for v in values if v.named_s is not None]
        at = [v.named_line for v in values if v.named_line is not None]
        never = f"not in {args.limit:.0f} s"
        rows.append(
            [
                TITLES[fault],
                launcher,
                _seconds(ended, len(values), never),
                _seconds(named, len(values), "never") if CAUSES[fault] else "–",
                f"{max(at)} of {max(v.num_lines for v in values)}" if at else "–",
                str(max(v.left for v in values)),
            ]
        )
        record.append(
            {
                "fault": fault,
                "launcher": launcher,
                "ended_s": summary(ended) if ended else None,
                "named_s": summary(named) if named else None,
                "tries": [vars(v) for v in values],
            }
        )
    table(["fault", "under", "ended after", "named after", "line", "left"], rows)
    ours = [(fault, one) for (fault, under), tries in found.items() if under == "muster run"
            for one in tries]  # fmt: skip
    if ours:
        counts = {
            "ended": [one.ended_s is not None for _, one in ours],
            "named": [one.named_s is not None for fault, one in ours if CAUSES[fault]],
            "without a process left": [one.left == 0 for _, one in ours],
        }
        for what, held in counts.items():
            goal(f"gangs with a fault, {what}", "all", f"{sum(held)} of {len(held)}", all(held),
                 at_any_size=True)  # fmt: skip
    write_json(args.json, {"machine": about, "found": record})


def _seconds(values: list[float], tries: int, never: str) -> str:
    if not values:
        return never
    found = summary(values)
    text = f"{found['median']:.2f} s [{found['low']:.2f}–{found['high']:.2f}]"
    return text if len(values) == tries else f"{text} in {len(values)} of {tries}"


if __name__ == "__main__":
    main()
