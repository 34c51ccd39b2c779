"""What every step works with: its folder, its device, its clock, and where its figures go."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]


class Goal(NamedTuple):
    """What is promised of one H100. ``is_speed``: a rehearsal shows the figure and judges nothing.

    Of a figure that a step takes several times the worst counts.
    """

    step: int
    name: str
    at_least: float = -math.inf
    at_most: float = math.inf
    is_speed: bool = True

    @property
    def wanted(self) -> str:
        is_least = self.at_least > -math.inf
        return f"at least {self.at_least:g}" if is_least else f"at most {self.at_most:g}"

    def is_held(self, value: float) -> bool:
        return self.at_least <= value <= self.at_most

    def worse(self, one: float, other: float) -> float:
        return min(one, other) if self.at_least > -math.inf else max(one, other)


GOALS = (
    Goal(2, "sampler, share of a kernel that only draws", at_least=0.5),
    Goal(3, "sweep ssm, share of time with a kernel", at_least=0.8),
    Goal(5, "bf16 GPT of 124 M, share of the raw loop", at_least=0.97),
    Goal(5, "small MLP, share of the raw loop", at_least=0.90),
    Goal(6, "share of time that saving takes", at_most=0.02),
    Goal(7, "innocent failures, out of memory", at_most=0, is_speed=False),
    Goal(8, "innocent failures, packing", at_most=0, is_speed=False),
    Goal(9, "innocent failures, faults of devices", at_most=0, is_speed=False),
    Goal(9, "s until the memory of a broken context is back", at_most=10),
    Goal(11, "generation, times one at a time", at_least=5),
    Goal(13, "s until the memory of a killed run is back", at_most=10),
)


class Here:
    """One step under way. Its figures are on disk after each one, whatever comes then."""

    def __init__(self, *, folder: Path, rehearse: bool) -> None:
        self.folder = folder
        self.rehearse = rehearse
        self.device = "cpu" if rehearse else "cuda"
        #: As the flag has it: the first GPU, or one rank or worker on the CPU.
        self.devices = "cpu:1" if rehearse else "1"
        self._figures: dict[str, Any] = {}
        self._missed: list[str] = []
        self._goals: dict[str, float] = {}

    def __enter__(self) -> Here:
        self._write()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._write()

    def note(self, name: str, value: Any) -> None:
        """Keep a figure that has no goal."""
        self._figures[name] = round(value, 4) if isinstance(value, float) else value
        self._write()

    def expect(self, name: str, value: Any, is_met: bool, goal: str) -> None:
        """Keep a figure and whether its goal is met; in a rehearsal no figure of speed counts."""
        self.note(name, value)
        if not is_met:
            self._missed.append(f"{name} is {self._figures[name]}, not {goal}")
            self._write()

    def fast(
        self, name: str, value: float, *, at_least: float = -math.inf, at_most: float = math.inf
    ) -> None:
        """The same for a figure that only means something on the card."""
        is_met = self.rehearse or at_least <= value <= at_most
        goal = f"at least {at_least:g}" if at_least > -math.inf else f"at most {at_most:g}"
        self.expect(name, value, is_met, goal)

    def goal(self, name: str, value: float) -> None:
        """Keep a figure that ``GOALS`` promises, and say so if it is missed."""
        [promised] = [each for each in GOALS if each.name == name]
        worst = promised.worse(self._goals.get(name, value), value)
        self._goals[name] = round(worst, 4)
        is_judged = not (self.rehearse and promised.is_speed)
        is_met = not is_judged or promised.is_held(worst)
        self._missed = [each for each in self._missed if not each.startswith(f"{name} is")]
        self.expect(name, worst, is_met, promised.wanted)

    def size(self, real: int, small: int) -> int:
        """How much of something: as much as tells, or as little as shows that it works."""
        return small if self.rehearse else real

    # ------------------------------------------------------------------------------ programs

    def muster(
        self, *words: str, env: Mapping[str, str] | None = None, code: int | None = 0
    ) -> subprocess.CompletedProcess[str]:
        """``muster WORDS`` in the step's folder; fails the step on another exit code."""
        command = [sys.executable, "-m", "muster", *words]
        return self.run(command, env=env, code=code)

    def pytest(self, file: str, *words: str) -> None:
        """One file of tests/gpu in a process of its own; a rehearsal only sees that it is there."""
        path = f"tests/gpu/{file}"
        if self.rehearse:
            self.expect(path, (ROOT / path).is_file(), (ROOT / path).is_file(), "there")
            return
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
        done = self.run([*command, path, *words], cwd=ROOT, code=None)
        last = (done.stdout.strip().splitlines() or [""])[-1]
        self.expect(f"pytest {file}", last, done.returncode == 0, "passed")

    def run(
        self,
        command: list[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        code: int | None = 0,
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command, cwd=cwd or self.folder, env=self.environment(env), check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        print(f"$ {' '.join(command)}\n{done.stdout}[exit code {done.returncode}]", flush=True)
        if code is not None and done.returncode != code:
            what = " ".join(command[2:6])
            raise RuntimeError(f"{what} … ended with {done.returncode}, not {code}")
        return done

    def environment(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        """A rehearsal sees no GPU, whatever the machine has, and takes one core a program."""
        hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if self.rehearse else {}
        leases = {"MUSTER_LEASE_DIR": str(self.folder / "leases")}
        return {**os.environ, **hidden, **leases, **(env or {})}

    # -------------------------------------------------------------------------------- clocks

    def synchronize(self) -> None:
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], repeats: int = 5) -> float:
        """The median time of ``work``, on the device's own clock, after a first time unmeasured."""
        import torch

        work()
        self.synchronize()
        taken = []
        for _ in range(2 if self.rehearse else max(5, repeats)):
            if self.device == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                work()
                end.record()
                end.synchronize()
                taken.append(begin.elapsed_time(end) / 1e3)
            else:
                begin_s = time.perf_counter()
                work()
                taken.append(time.perf_counter() - begin_s)
        return statistics.median(taken)

    def _write(self) -> None:
        beside = self.folder / "figures.json.new"
        found = {"figures": self._figures, "missed": self._missed, "goals": self._goals}
        beside.write_text(json.dumps(found))
        beside.replace(self.folder / "figures.json")
