"""What recording samples costs: CPU time per sample, and its share of one core at an interval.

python benchmarks/monitor_overhead.py            # about 2 minutes
python benchmarks/monitor_overhead.py --quick

Two ways of measuring. Alone: the recorder's own loop, without waiting, on this host, on this host
with 8 recorded GPUs, and on its own GPUs where it has some; CPU time of the thread. In a run: the
launcher of ``muster run`` with and without recording, 20 samples per second so that the difference
stands out; CPU time of the launcher, divided by the samples in monitor.csv.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent))
from measuring import goal, machine, summary, table, write_json
from muster.base.clock import SystemClock
from muster.base.settings import Settings
from muster.devices.nvml_usage import usage_source
from muster.monitor.recorder import record
from muster.monitor.sample import Sampler
from muster.monitor.sinks import open_sink

INTERVAL_S = 5.0
GOAL_PERCENT = 0.5
IN_RUN_INTERVAL_S = 0.05


def recorded_facts(folder: Path) -> Path:
    """Eight GPUs with a process each: this one, so that its run and task are looked for."""
    holder = {"pid": psutil.Process().pid, "user": "ada", "used_mib": 70_000, "command": "python"}
    gpus = [
        {"index": n, "uuid": f"GPU-{n}", "name": "NVIDIA H100 80GB HBM3", "holders": [holder],
         "memory_total_mib": 81_559, "memory_used_mib": 70_000}
        for n in range(8)
    ]  # fmt: skip
    path = folder / "facts.json"
    path.write_text(json.dumps({"devices": gpus}))
    return path


def alone(settings: Settings, folder: Path, num_samples: int) -> tuple[float, int]:
    """CPU milliseconds per sample of the recorder's loop, and the number of GPUs."""
    source = usage_source(settings)
    num_gpus = len(source.read(quick=True))
    clock = SystemClock()
    sampler = Sampler(source, clock)
    sink = open_sink(folder / f"alone-{time.monotonic_ns()}.csv")
    left = iter(range(num_samples))

    def do_not_wait(seconds: float) -> bool:
        return next(left, None) is None

    began = time.thread_time()
    record(sampler, sink, INTERVAL_S, clock, do_not_wait)
    spent = time.thread_time() - began
    sink.close()
    return 1000 * spent / (num_samples + 1), num_gpus


def launcher_cpu_s(folder: Path, interval_s: float, seconds: float) -> tuple[float, int]:
    """CPU seconds of the launcher of a run of about ``seconds``, and its samples."""
    name = f"run-{time.monotonic_ns()}"
    words = ["run", "--devices", "cpu:1", "--run-dir", name, "--quiet", "--no-python"]
    words += ["--monitor-interval", str(interval_s), "sleep", str(seconds)]
    child = psutil.Popen([sys.executable, "-m", "muster", *words], cwd=folder)
    spent = 0.0
    while child.poll() is None:
        try:
            times = child.cpu_times()
        except psutil.Error:
            break
        spent = max(spent, times.user + times.system)
        time.sleep(0.05)
    child.wait()
    log = folder / name / "monitor.csv"
    return spent, len(log.read_text().splitlines()) - 1 if log.exists() else 0


def in_run(folder: Path, seconds: float, repeats: int) -> list[float]:
    """CPU milliseconds per sample: the difference between a recorded run and one that is not."""
    costs = []
    for _ in range(repeats):
        without, _ = launcher_cpu_s(folder, 0, seconds)
        recorded, num_rows = launcher_cpu_s(folder, IN_RUN_INTERVAL_S, seconds)
        costs.append(1000 * (recorded - without) / max(1, num_rows))
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.samples, args.seconds, args.repeats = 50, 1.0, 1
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        folder = Path(name)
        hosts = {
            "alone": Settings(),
            "alone, 8 recorded GPUs": Settings(device_facts=recorded_facts(folder)),
        }
        for _ in range(args.repeats):
            for label, settings in hosts.items():
                cost, num_gpus = alone(settings, folder, args.samples)
                words = f"alone, {num_gpus} GPUs of this host" if label == "alone" else label
                figures.setdefault(words, []).append(cost)
        figures["in a run on the CPU"] = in_run(folder, args.seconds, args.repeats)
    about = machine("pyarrow", "nvidia-ml-py")
    print(f"{about['processor']}, {about['cores']} cores, {about['date']}")
    rows = []
    for label, costs in figures.items():
        cost = statistics.median(costs)
        spread = f"{min(costs):.2f}–{max(costs):.2f}"
        share = 100 * cost / 1000 / INTERVAL_S
        wanted, percent = f"< {GOAL_PERCENT} %", f"{share:.3f} %"
        word = goal(f"of a core, {label}", wanted, percent, share < GOAL_PERCENT, shown=False)
        rows.append([label, f"{cost:.2f}", spread, percent, word])
    headers = ["", "CPU ms per sample", "spread", f"of one core at {INTERVAL_S:g} s"]
    table([*headers, f"goal < {GOAL_PERCENT} %"], rows)
    write_json(
        args.json,
        {
            "machine": about,
            "interval_s": INTERVAL_S,
            "cpu_ms_per_sample": {label: summary(costs) for label, costs in figures.items()},
        },
    )


if __name__ == "__main__":
    main()
