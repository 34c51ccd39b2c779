"""Steps about many tasks on one card: filled, packed, short of memory, and with broken devices."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from typing import Any

from acceptance.here import Here

_PROGRAMS = "acceptance.programs."


def sweep_ssm(here: Here) -> None:
    """How busy the card is while the recipe samples, with its own blocks and with larger ones.

    Some ten seconds of kernels: the driver tells of each second, and the first one compiles.
    """
    words = ["sweep", "ssm", "--no-gd", "--devices", here.devices, "--quiet"]
    words += ["--num-seeds", str(here.size(8, 1))]
    words += ["--student-dims", *(("16", "64", "150") if not here.rehearse else ("4",))]
    words += ["--gnc-num-samples", str(here.size(1_600_000_000, 20_000))]
    ways = {
        "own blocks": (),
        "two workers": ("--per-gpu", "2"),
        "blocks of 64 M": ("--gnc-batch-size", "64000000"),
    }
    for number, (name, more) in enumerate(ways.items()):
        with Busy(here) as busy:
            begin_s = time.perf_counter()
            here.muster(*words, *more, "--run-dir", f"ssm-{number}")
            here.note(f"{name}, s", time.perf_counter() - begin_s)
        here.note(f"{name}, busiest second", busy.most)
        here.note(f"{name}, share of time with a kernel", busy.share)
        if not more:
            here.goal("sweep ssm, share of time with a kernel", busy.share)
        if here.rehearse:
            break


class Busy:
    """The share of time in which the driver sees a kernel on the card.

    ``share``: from the first kernel to the last, less the second in which the first was compiled;
    ``most``: of the busiest second.
    """

    def __init__(self, here: Here) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._is_there = here.device == "cuda"
        self._shares: list[float] = []

    def __enter__(self) -> Busy:
        if self._is_there:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._is_there:
            self._thread.join()

    @property
    def most(self) -> float:
        spans = [self._shares[i : i + 10] for i in range(max(1, len(self._shares) - 9))]
        return max((sum(span) / len(span) for span in spans if span), default=0.0)

    @property
    def share(self) -> float:
        at_work = [i for i, share in enumerate(self._shares) if share > 0]
        span = self._shares[at_work[0] + 10 : at_work[-1] + 1] if at_work else []
        return sum(span) / len(span) if span else self.most

    def _look(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        card = pynvml.nvmlDeviceGetHandleByIndex(0)
        while not self._stop.wait(0.1):
            self._shares.append(pynvml.nvmlDeviceGetUtilizationRates(card).gpu / 100)


# ---------------------------------------------------------------------------------------- memory


def out_of_memory(here: Here) -> None:
    """Calls that need more than the card has come down to what fits, and lose nothing."""
    env = {"TOTAL_MIB": str(_card(here)["memory_total_mib"]), "DEVICE": here.device}
    found = _swept(here, "hungry:together", 16, "calls", env=env)
    here.expect("tasks of a batched call", found, found == {"done": 16}, "16 done")
    lost = 16 - found.get("done", 0)
    (here.folder / "in.jsonl").write_text("".join(f'{{"x": {n}}}\n' for n in range(16)))
    done = here.muster(
        "map", _PROGRAMS + "hungry:Stage", "--input", "in.jsonl", "--output", "out.jsonl",
        "--batch-size", "16", "--devices", here.devices, "--run-dir", "map", env=env, code=None,
    )  # fmt: skip
    lines = len((here.folder / "out.jsonl").read_text().splitlines()) if done.returncode == 0 else 0
    here.expect("records of a map", lines, lines == 16, "16")
    lost += 16 - lines
    if not here.rehearse:
        found = _swept(here, "hungry:fills", 8, "cublas", "--per-gpu", "2", env=env)
        here.expect("tasks that fill the card", found, found == {"done": 8}, "8 done")
        lost += 8 - found.get("done", 0)
    here.goal("innocent failures, out of memory", lost)


def packing(here: Here) -> None:
    """As many workers on the card as the memory of the tasks allows, and none lost beyond that."""
    total_mib, count = _card(here)["memory_total_mib"], here.size(64, 4)
    env = {"DEVICE": here.device, "SLEEP_S": str(here.size(2, 0))}
    env["SHARE_MIB"] = str(here.size(total_mib * 3 // 40, 1))
    per_gpu = ("--per-gpu", "auto") if not here.rehearse else ()
    begin_s = time.perf_counter()
    found = _swept(here, "packed:work", count, "auto", *per_gpu, env=env)
    rate = count / (time.perf_counter() - begin_s)
    here.expect("tasks", found, found == {"done": count}, f"{count} done")
    lost = count - found.get("done", 0)
    here.fast("tasks/s beside one worker's", rate * 2.1, at_least=4)
    if not here.rehearse:
        env["SHARE_MIB"] = str(total_mib * 3 // 20)
        found = _swept(here, "packed:work", 16, "over", "--per-gpu", "8", env=env)
        here.expect("tasks of an oversubscribed card", found, found == {"done": 16}, "16 done")
        lost += 16 - found.get("done", 0)
    here.goal("innocent failures, packing", lost)


# ---------------------------------------------------------------------------------------- faults


def faults(here: Here) -> None:
    """A device that is gone takes no tasks with it, and a poisoned context no innocent one."""
    lost = 0
    if not here.rehearse:
        real = {name: value for name, value in _card(here).items() if name != "lost"}
        gone = {**real, "index": 1, "uuid": "GPU-00000000-0000-0000-0000-00000000dead"}
        facts = {"devices": [{**real, "index": 0}, gone], "problem": None}
        (here.folder / "facts.json").write_text(json.dumps(facts))
        env = {"MUSTER_DEVICE_FACTS": str(here.folder / "facts.json")}
        found = _swept(here, "broken:adds", 40, "gone", "--devices", "2", env=env)
        here.expect("tasks beside a GPU that is gone", found, found == {"done": 40}, "40 done")
        lost += 40 - found.get("done", 0)
    for how in ("assert", "access") if not here.rehearse else ("raise",):
        found = _swept(here, "broken:poisons", 12, how, env={"HOW": how})
        wanted = {"done": 11, "failed": 1}
        here.expect(f"tasks beside one that ends by {how}", found, found == wanted, "11 done")
        lost += 11 - found.get("done", 0)
    here.goal("innocent failures, faults of devices", lost)
    if here.device == "cuda":
        begin_s = time.perf_counter()
        while (used := _card(here)["memory_used_mib"]) > 100:
            if time.perf_counter() - begin_s > 15:
                break
        taken = time.perf_counter() - begin_s
        here.expect("MiB that are not back", used, used <= 100, "at most 100")
        here.goal("s until the memory of a broken context is back", taken)


def _swept(
    here: Here, target: str, count: int, run: str, *more: str, env: Mapping[str, str]
) -> dict[str, int]:
    """Sweep ``target`` over ``i`` = 0 … ``count`` - 1; how many tasks came to which end."""
    values = ",".join(map(str, range(count)))
    devices = () if "--devices" in more else ("--devices", here.devices)
    done = here.muster(
        "sweep", _PROGRAMS + target, "--grid", f"i={values}", "--retries", "2", "--json",
        "--run-dir", run, *devices, *more, env=env, code=None,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    if "{" not in lines:
        return {}
    begin, end = lines.index("{"), len(lines) - lines[::-1].index("}")
    counts: dict[str, int] = json.loads("\n".join(lines[begin:end]))["counts"]
    return {state: count for state, count in counts.items() if count}


def _card(here: Here) -> dict[str, Any]:
    """The first GPU as the driver has it: a context of this process's own would hold it."""
    gpus: list[dict[str, Any]] = json.loads(here.muster("devices", "--json").stdout)["gpus"]
    return gpus[0] if gpus else {"memory_total_mib": 100, "memory_used_mib": 0}
