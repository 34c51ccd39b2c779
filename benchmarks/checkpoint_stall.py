"""What saving costs a training loop: muster's writer beside torch.save, DCP and a plain copy.

    python benchmarks/checkpoint_stall.py            # 30 rounds: about 6 minutes
    python benchmarks/checkpoint_stall.py --quick

A real loop (forward, backward, AdamW; one thread) with 151 MB of model and optimizer state, saved
every 20 steps. All run in one process in turn, each in its documented way; a copy into memory that
is kept for it is the least that anything can do that writes while the training goes on.

In each round every contender saves once and goes on for twice as many steps as the slowest needs
to write, 20 at most; then the rest of its writing is waited for, as the next save would have to.
Before and behind it are as many steps without saving. ``blocked`` is what the call takes, and that
wait. ``added`` is that and what the steps take beyond the mean of those before and behind, so a
writer that slows down the steps after the call pays for it, divided by 20: per step, the median
with its 95 % interval. It is told twice, by the wall time of the steps and by the CPU time of the
training thread in them, which other programs on the machine change least, but which leaves out
where a step waits for the interpreter or a core. That of "no saving", the same beside itself, shows
what is only scatter. Where an interval has the goal in it, the goal is not judged: this machine
cannot tell. ``worst`` is the longest step, with the save in it. muster and DCP sync their files to
the disk; torch.save does not.

Until 28 November 2026 all 20 steps were compared with 20 on one side of them, by wall time alone:
of a step of 58 ms the interval was 13 percent, where a copy adds 1.3.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from measuring import at_most, goal, interval, machine, summary, table, write_json
from muster.rank.checkpoint import CheckpointWriter, Snapshot
from muster.rank.checkpoint_files import model_tensors, optimizer_tensors

Tensors = Mapping[str, Tensor]


class Loop:
    """The training: ``step`` makes one, ``tensors`` is its state."""

    def __init__(self, width: int, batch: int) -> None:
        torch.manual_seed(0)
        layers = [m for _ in range(3) for m in (nn.Linear(width, width), nn.ReLU())]
        self.model = nn.Sequential(*layers[:-1])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._x = torch.randn(batch, width)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self._x).square().mean().backward()
        self.optimizer.step()

    def tensors(self) -> Tensors:
        state = {**model_tensors(self.model), **optimizer_tensors(self.model, self.optimizer)}
        return {name: tensor.detach() for name, tensor in state.items()}


class Nothing:
    def __init__(self, folder: Path, tensors: Tensors) -> None:
        self.folder = folder

    def save(self, step: int, tensors: Tensors) -> None:
        return

    def finish(self) -> None:
        return


class Copy(Nothing):
    """Into memory that was there before."""

    def __init__(self, folder: Path, tensors: Tensors) -> None:
        self._kept = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}

    def save(self, step: int, tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            self._kept[name].copy_(tensor)


class Muster(Nothing):
    def __init__(self, folder: Path, tensors: Tensors) -> None:
        self._writer = CheckpointWriter(folder, rank=0, num_ranks=1)
        self._writer.prepare(tensors)
        self._writer.wait()

    def save(self, step: int, tensors: Tensors) -> None:
        self._writer.save(Snapshot(step=step, tensors=tensors))

    def finish(self) -> None:
        self._writer.wait()


class TorchSave(Nothing):
    def save(self, step: int, tensors: Tensors) -> None:
        torch.save(dict(tensors), self.folder / f"step-{step}.pt")


class DcpAsync(Nothing):
    """``async_save`` as its tutorial has it: the write before is waited for."""

    def __init__(self, folder: Path, tensors: Tensors) -> None:
        self.folder = folder
        self._future: Any = None

    def options(self) -> dict[str, Any]:
        return {}

    def save(self, step: int, tensors: Tensors) -> None:
        self.finish()
        target = self.folder / f"step-{step}"
        self._future = dcp.async_save(dict(tensors), checkpoint_id=target, **self.options())

    def finish(self) -> None:
        if self._future is not None:
            self._future.result()
            self._future = None


class DcpKept(DcpAsync):
    """The same with a stager that keeps its memory from save to save."""

    def __init__(self, folder: Path, tensors: Tensors) -> None:
        super().__init__(folder, tensors)
        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        self._stager = DefaultStager(options)

    def options(self) -> dict[str, Any]:
        return {"async_stager": self._stager}

    def finish(self) -> None:
        if self._future is not None:
            getattr(self._future, "upload_completion", self._future).result()
            self._future = None


CONTENDERS: dict[str, Callable[[Path, Tensors], Nothing]] = {
    "no saving": Nothing,
    "plain copy": Copy,
    "muster": Muster,
    "DCP async_save": DcpAsync,
    "DCP async_save, DefaultStager": DcpKept,
    "torch.save": TorchSave,
}


class Found(NamedTuple):
    """Milliseconds: of the save and the wait for it; of all steps, and of the thread in them; of
    the longest step.
    """

    blocked: float
    steps: float
    thread: float
    worst: float


def run(saver: Nothing, loop: Loop, *, number: int, steps: int, folder: Path) -> Found:
    """One save, so many steps, and the wait for what is still being written."""
    began = time.perf_counter()
    saver.save(number, loop.tensors())
    saved = stepped = time.perf_counter()
    worst, thread_began = 0.0, time.thread_time()
    for _ in range(steps):
        loop.step()
        now = time.perf_counter()
        worst = max(worst, now - (stepped if worst else began))
        stepped = now
    thread = time.thread_time() - thread_began
    saver.finish()
    ended = time.perf_counter()
    for old in folder.iterdir():
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    times = (saved - began + ended - stepped, stepped - saved, thread, worst)
    return Found(*(1e3 * seconds for seconds in times))


def added(one: Found, before: Found, behind: Found, what: Literal["steps", "thread"]) -> float:
    """What a save adds, with what it does to the steps behind it."""
    here, *others = (getattr(found, what) for found in (one, before, behind))
    return one.blocked + float(here) - fmean(others)


def steps_of_a_write(savers: Mapping[str, Nothing], loop: Loop, place: Path, most: int) -> int:
    """In so many steps the slowest has written, on a disk that takes twice as long now and then."""
    slowest = 0.0
    for number, saver in enumerate(savers.values()):
        # The first save of all sets things up; a long training has one.
        for save in (1, 2):
            one = run(saver, loop, number=save, steps=1, folder=place / str(number))
        slowest = max(slowest, one.blocked / one.steps)
    return min(most, 4 + ceil(2 * slowest))


def _told(values: list[float]) -> str:
    return "{:.2f} [{:.2f}, {:.2f}]".format(median(values), *interval(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--folder", type=Path, help="where to write; default: temporary files")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.width, args.repeats = 512, 2
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    loop = Loop(args.width, args.batch)
    for _ in range(3):
        loop.step()
    size = sum(t.numel() * t.element_size() for t in loop.tensors().values())
    found: dict[str, list[Found]] = {name: [] for name in CONTENDERS}
    without: list[Found] = []  # before the first, and behind each
    with tempfile.TemporaryDirectory(prefix="muster-bench-", dir=args.folder) as name:
        store = dist.FileStore(f"{name}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        savers: dict[str, Nothing] = {}
        place = Path(name)
        for number, (contender, make) in enumerate(CONTENDERS.items()):
            folder = place / str(number)
            folder.mkdir()
            savers[contender] = make(folder, loop.tensors())
        steps = steps_of_a_write(savers, loop, place, args.every)
        nothing, nowhere = savers["no saving"], place / "0"
        without.append(run(nothing, loop, number=0, steps=steps, folder=nowhere))
        for turn in range(1, args.repeats + 1):
            for number, (contender, saver) in enumerate(savers.items()):
                folder = place / str(number)
                one = run(saver, loop, number=turn + 2, steps=steps, folder=folder)
                without.append(run(nothing, loop, number=0, steps=steps, folder=nowhere))
                found[contender].append(one)
                print(f"  round {turn}: {contender}: {one}", file=sys.stderr)
        dist.destroy_process_group()
    copies = found["plain copy"]
    adds: dict[tuple[str, str], list[float]] = {}
    for number, (contender, values) in enumerate(found.items()):
        mine = [*pairwise(without)][number :: len(found)]
        for what in ("steps", "thread"):
            adds[contender, what] = [
                added(one, *pair, what) / args.every for one, pair in zip(values, mine, strict=True)
            ]
    of_copy = {
        contender: [v.blocked / c.blocked for v, c in zip(values, copies, strict=True)]
        for contender, values in found.items()
    }
    record = {
        contender: {
            "blocked_ms": summary([v.blocked for v in values]),
            **{
                f"added_{what}_ms": summary(adds[contender, what])
                | {"interval": interval(adds[contender, what])}
                for what in ("thread", "steps")
            },
            "worst_ms": summary([v.worst for v in values]),
            "of_copy": summary(of_copy[contender]),
        }
        for contender, values in found.items()
    }
    about = machine()
    print(f"{about['processor']}, {about['cores']} cores, {about['date']}")
    step = median(one.steps for one in without) / steps
    print(f"{size / 1e6:.0f} MB every {args.every} steps of {step:.1f} ms; {args.repeats} rounds; "
          f"{steps} steps with each save and without")  # fmt: skip
    rows = [
        [
            contender,
            f"{r['blocked_ms']['median']:.1f}",
            f"[{r['blocked_ms']['low']:.1f}–{r['blocked_ms']['high']:.1f}]",
            f"{r['of_copy']['median']:.2f}",
            _told(adds[contender, "thread"]),
            _told(adds[contender, "steps"]),
            f"{r['worst_ms']['median']:.0f}",
        ]
        for contender, r in record.items()
    ]
    headers = ["", "blocked ms per save", "range", "of the copy", "added ms per step, CPU"]
    headers += ["added ms per step, wall", "worst step"]
    table(headers, rows)
    shares = of_copy["muster"]
    goal("a save blocks a step, × the copy", "≤ 1.5", _told(shares), at_most(shares, 1.5))
    # Beside what one copy takes, divided by the steps: what a copy adds to them is a difference of
    # two step times, and scatters by more than it is.
    copy = record["plain copy"]["blocked_ms"]["median"] / args.every
    for what, name in (("thread", "CPU"), ("steps", "wall")):
        times = [own / copy for own in adds["muster", what]]
        goal(
            f"time that saves add to a step, {name}, × the copy's", "≤ 1.5",
            f"{_told(times)} ({median(times) * copy:.2f} ms, {copy:.2f} ms)", at_most(times, 1.5),
        )  # fmt: skip
    write_json(args.json, {"machine": about, "bytes": size, "found": record})


if __name__ == "__main__":
    main()
