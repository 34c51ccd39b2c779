"""All benchmarks, one after the other, and one table of their goals: held or missed.

python benchmarks/all.py --to benchmarks/results    # about an hour on two cores that rest otherwise
python benchmarks/all.py --to benchmarks/results --resume    # what has no record of this commit yet
python benchmarks/all.py --only metrics startup
python benchmarks/all.py --quick     # about 15 minutes: that all of them run; no figure means much

Each is run as its goals need it; its own flags have longer forms. Peers and servers that are not
installed are said to be so and left out (`pip install -c constraints.txt torch==2.13.0`, then `-e
'.[test,bench]'`, has most). One that fails, or takes much longer than it should, is named at the
end, and the others are run nevertheless. A quick run judges only what does not depend on size.
docs/generate_measurements.py makes the pages of what is in benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import SKIPPED, commit, machine, table

FOLDER = Path(__file__).parent
DEFAULT = FOLDER.parent / "build" / "bench"
RESULTS = FOLDER / "results"
#: Of a machine, what a figure depends on; the versions of peers and the date are not asked for.
_MACHINE = ("processor", "cores", "kernel")


@dataclass(frozen=True)
class Run:
    """A benchmark as a full run has it; ``minutes``: on two cores that rest otherwise."""

    minutes: float
    words: str = ""
    #: Where it is not the name of the record.
    script: str = ""


RUNS = {
    "agent_client": Run(2.0),
    "chaos": Run(3.0, "--peer-limit 60"),
    "checkpoint_stall": Run(4.0, "--repeats 20"),
    "cluster_overhead": Run(2.5, "--repeats 1"),
    "dashboard": Run(2.5, "--only browser files idle memory --repeats 5 "
                          "--memory-minutes 1.5 --idle-seconds 15"),
    "dashboard-viewers": Run(3.0, "--only viewers --repeats 3", "dashboard"),
    "ddp_throughput": Run(3.0, "--only turns ddp --repeats 2 "
                               "--peers raw muster accelerate lightning hf"),
    "farm_overhead": Run(2.0, "--repeats 3"),
    "faults": Run(3.0, "--repeats 1 --limit 30"),
    "generate": Run(1.5, "--repeats 2"),
    "growth": Run(1.2),
    "hosts_overhead": Run(1.4, "--only 'functions: muster' commands gang --commands 60 "
                               "--repeats 2"),
    "launch": Run(1.0, "--ranks 8 --repeats 3"),
    "listing": Run(1.0),
    "llm_server": Run(2.0, "--only 'muster, faults' --repeats 1"),
    "makespan": Run(0.8, "--repeats 3"),
    "many_workers": Run(0.3),
    "map_images": Run(2.0),
    "map_memory": Run(2.0),
    "map_overhead": Run(4.0, "--peers-up-to 200000"),
    "map_overhead-stage": Run(2.0, "--rows 100000 --stage-us 200 --only 'by hand' 'muster map'",
                              "map_overhead"),
    "metrics": Run(2.5, "--repeats 3"),
    "monitor_overhead": Run(1.0, "--repeats 3"),
    "plan_error": Run(2.5, "--repeats 1 --steps 40"),
    "ray_overhead": Run(1.2, "--only empty"),
    "resume": Run(1.3, "--repeats 1"),
    "rl_throughput": Run(3.5, "--only cartpole market --seeds 2 --steps 4096 --market-seeds 2 "
                              "--market-cycles 3 --market-envs 1024"),
    "scale": Run(2.5),
    "search": Run(2.0, "--trials 27 --rounds 1"),
    "search_decisions": Run(0.3),
    "search_stop": Run(0.8),
    "ssm_sampler": Run(0.5),
    "ssvae_ensemble": Run(3.0, "--cases exact-5 supervised-75 --repeats 1 "
                               "--forms"),
    "startup": Run(1.2),
    "trackers": Run(7.0, "--seconds 60"),
}  # fmt: skip
#: Without a goal, against another commit, or longer than an hour allows: run where asked for.
ASKED_FOR = {
    "house_overhead": Run(5.0, "--ref ef43f7d --pairs 5"),
    "scale-large": Run(6.0, "--pilots 1000 --tasks 5000000", "scale"),
    "scaling": Run(2.0),
}


def main() -> int:
    every = {**RUNS, **ASKED_FOR}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=[*every], metavar="NAME")
    parser.add_argument("--to", type=Path, default=DEFAULT, help="the folder of all records")
    parser.add_argument(
        "--resume", action="store_true", help="keep the records of this commit and machine"
    )
    given = parser.parse_args()
    if given.quick and given.to.resolve() == RESULTS.resolve():
        parser.error(f"{given.to} holds measurements, which a quick run has none of. "
                     "Leave --quick or --to out.")  # fmt: skip
    # Quick, two forms of one script are the same.
    names = given.only or [name for name, run in RUNS.items() if not (given.quick and run.script)]
    folder = given.to.resolve()
    if given.quick and given.to == DEFAULT:
        folder /= "quick"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {name: words_of(every[name], is_quick=given.quick) for name in names}
    kept = [name for name in names if given.resume and is_there(folder, name, wanted[name])]
    for name in kept:
        print(f"{name}: recorded already")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    new = [name for name in names if name not in kept]
    codes = dict(run_all(new, every, wanted, folder))
    show_goals({name: record_in(folder, name) for name in names if codes.get(name, 0) == 0})
    print(f"records: {folder}")
    skipped = [name for name, code in codes.items() if code == SKIPPED]
    failed = [name for name, code in codes.items() if code not in (0, SKIPPED)]
    for word, some in (("skipped", skipped), ("failed", failed)):
        if some:
            print(f"{word}: {', '.join(some)}", file=sys.stderr)
    return int(bool(failed))


def words_of(run: Run, *, is_quick: bool) -> list[str]:
    """What the benchmark is started with, apart from where its record goes."""
    return ["--quick"] if is_quick else shlex.split(run.words)


def record_in(folder: Path, name: str) -> dict[str, Any]:
    """Empty where there is none that can be read."""
    try:
        found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    except (OSError, ValueError):
        return {}
    return found


def is_there(folder: Path, name: str, words: Sequence[str]) -> bool:
    """Whether this commit has been measured so, on this machine."""
    record, here = record_in(folder, name), machine()
    return (
        bool(commit())
        and record.get("commit") == commit()
        and record.get("words") == [*words]
        and all(record["machine"][key] == here[key] for key in _MACHINE)
    )


def run_all(
    names: Sequence[str], every: Mapping[str, Run], wanted: Mapping[str, Sequence[str]],
    folder: Path, scripts: Path = FOLDER,
) -> Iterator[tuple[str, int | None]]:  # fmt: skip
    """Run them in turn; yields the exit code of each, None of one that took too long."""
    expected = {name: expected_s(folder, name, every[name], wanted[name]) for name in names}
    began_s, done_s = time.monotonic(), 0.0
    for number, name in enumerate(names, 1):
        left_s = sum(expected[one] for one in names[number - 1 :])
        eta_s = left_s * pace(time.monotonic() - began_s, done_s)
        at = time.strftime("%H:%M", time.localtime(time.time() + eta_s))
        print(f"\n== {number} of {len(names)}: {name} (all in about {eta_s / 60:.0f} min, at {at})",
              flush=True)  # fmt: skip
        script = scripts / f"{every[name].script or name}.py"
        line = [sys.executable, str(script), *wanted[name], "--json", str(folder / f"{name}.json")]
        code = ended(line, max(600.0, 5 * expected[name]))
        done_s += expected[name]
        if code not in (0, SKIPPED):
            why = "it took too long" if code is None else f"exit code {code}"
            print(f"{name} has failed: {why}", file=sys.stderr, flush=True)
        yield name, code


def expected_s(folder: Path, name: str, run: Run, words: Sequence[str]) -> float:
    """As long as the last time, where it was the same."""
    record = record_in(folder, name)
    if record.get("words") == [*words]:
        return max(1.0, float(record["took_s"]))
    return 20.0 if words == ["--quick"] else 60 * run.minutes


def pace(spent_s: float, expected: float) -> float:
    """How much longer than expected it has taken so far.

    >>> pace(0.0, 0.0), pace(90.0, 60.0)
    (1.0, 1.5)
    """
    return spent_s / expected if expected else 1.0


def ended(line: Sequence[str], limit_s: float) -> int | None:
    """The exit code; None where it was ended because it took too long."""
    # A group of its own, so that what it has started ends with it.
    process = subprocess.Popen(line, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def show_goals(records: Mapping[str, Mapping[str, Any]]) -> None:
    said = {True: "held", False: "NOT held", None: "not judged"}
    goals = [(name, record, goal) for name, record in records.items() for goal in record["goals"]]
    print()
    table(
        ["benchmark", "what", "goal", "measured", "", "bound", "on"],
        [
            [name, goal["what"], goal["wanted"], goal["measured"], said[goal["is_held"]],
             goal.get("bound", ""), record["machine"]["date"]]
            for name, record, goal in goals
        ],
    )  # fmt: skip
    verdicts = [goal["is_held"] for *_, goal in goals]
    print(", ".join(f"{verdicts.count(one)} {word}" for one, word in said.items()))
    without = [name for name, record in records.items() if not record["goals"]]
    if without:
        print(f"without a goal: {', '.join(without)}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("stopped; --resume goes on with what is left")
