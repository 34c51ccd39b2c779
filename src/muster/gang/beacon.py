"""A rank's heartbeat: once a second it tells the gang's store where the rank is.

A training loop that knows muster sets ``BEACON.step`` and ``BEACON.phase`` itself; these are plain
attributes and cost nothing. For any other program the thread looks at the Python stack of the main
thread and counts the optimizer's steps. Heartbeats travel through the supervisor's
TCPStore and never through NCCL, which is what may hang.

torch is used once the program has imported it, and never imported from here: a second thread in
the middle of that import could see half of it.
"""

from __future__ import annotations

import atexit
import dataclasses
import dis
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from muster.gang.stall import Heartbeat
from muster.gang.topology import Topology

EVERY_S = 1.0
_FIRST_LOOKS_S = 0.1  # often at first, so that hardly an optimizer step is missed
_STORE_TIMEOUT = timedelta(seconds=30)
_MAX_FRAMES = 80
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

#: Where a frame's file is → what the rank is doing. The innermost frame that says something wins.
_FOLDERS = (
    ("torch/utils/data/", "data loader"),
    ("torch/optim/", "optimizer"),
    ("torch/serialization.py", "checkpoint"),
    ("torch/distributed/checkpoint/", "checkpoint"),
)
_COLLECTIVES = {
    "all_reduce": "all-reduce",
    "all_reduce_coalesced": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_object": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "all_to_all": "all-to-all",
    "all_to_all_single": "all-to-all",
    "barrier": "barrier",
    "monitored_barrier": "barrier",
    "broadcast": "broadcast",
    "broadcast_object_list": "broadcast",
    "gather": "gather",
    "gather_object": "gather",
    "recv": "receive",
    "reduce": "reduce",
    "reduce_scatter": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "scatter": "scatter",
    "scatter_object_list": "scatter",
    "send": "send",
    "init_process_group": "the start of the process group",
    "new_group": "the start of a process group",
    "_sync_module_states": "broadcast",
    "_verify_param_shape_across_processes": "all-gather",
    "wait_tensor": "a collective",
}
#: Calls that return when the GPU is done with what they are about.
_GPU_WAITS = {
    "item", "tolist", "cpu", "numpy", "to", "float", "int", "bool", "synchronize",
    "_cuda_synchronize",
}  # fmt: skip


class Beacon:
    """Where a rank's program is, as it says itself; -1 and empty texts where it does not say.

    ``phase``: setup, data, compiling, forward, backward, optimizer, evaluation, checkpoint, finish,
    ending (after an error);
    ``collective``: the name of the one that is waited for, "" outside; ``own_done`` returns what
    ``Heartbeat.own_done`` holds.
    """

    __slots__ = ("collective", "own_done", "phase", "step")

    def __init__(self) -> None:
        self.step = -1
        self.phase = ""
        self.collective = ""
        self.own_done: Callable[[], bool | None] = lambda: None


#: Of this process.
BEACON = Beacon()


class HeartbeatSender:
    """Sends one rank's heartbeats from a daemon thread, and a last one when the program ends."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="muster-beacon", daemon=True)
        self._main = threading.main_thread().ident
        self._pid = os.getpid()
        self._steps = _Steps()
        self._store: Any = None
        self._count = 0

    def start(self) -> None:
        self._thread.start()
        # A daemon thread inside C++ while the interpreter ends would crash it.
        atexit.register(self.stop)

    def stop(self) -> None:
        if os.getpid() == self._pid:
            self._stop.set()
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        # No error of ours may disturb the program: without a store there are just no heartbeats.
        try:
            self._look_for_torch()
            while not self._stop.wait(EVERY_S if self._count else 0):
                self._send()
            if self._store is not None:
                self._send(has_ended=True)
        except Exception:
            return

    def _look_for_torch(self) -> None:
        begin_s = time.monotonic()
        while not self._stop.is_set():
            self._steps.attach()
            distributed = _loaded("torch.distributed")
            if self._steps.is_attached and distributed is not None:
                break
            self._stop.wait(_FIRST_LOOKS_S if time.monotonic() - begin_s < 60 else EVERY_S)
        if self._stop.is_set() or not distributed.is_available():
            return
        self._store = distributed.TCPStore(
            self._topology.master_addr,
            self._topology.master_port,
            is_master=False,
            wait_for_workers=False,
            timeout=_STORE_TIMEOUT,
        )

    def _send(self, *, has_ended: bool = False) -> None:
        self._count += 1
        if self._store is None:
            self._stop.wait()
            return
        value = json.dumps(dataclasses.asdict(self._heartbeat(has_ended)))
        self._store.set(heartbeat_key(self._topology.restart_count, self._topology.rank), value)

    def _heartbeat(self, has_ended: bool) -> Heartbeat:
        beacon = BEACON
        frames = sys._current_frames()
        compiles = any(map(is_compiling, frames.values()))  # backward's may be in another thread
        main = frames.get(self._main or 0)
        phase, collective = read_place(main)
        distributed, cuda = _loaded("torch.distributed"), _loaded("torch.cuda")
        # Asked only now: while a CUDA graph is captured, no thread may ask for events.
        on_gpu = cuda is not None and cuda.is_initialized() and waits_for_gpu(main)
        is_ready = bool(distributed is not None and distributed.is_initialized())
        return Heartbeat(
            rank=self._topology.rank,
            count=self._count,
            step=beacon.step if beacon.step >= 0 else self._steps.most(),
            phase="compiling" if compiles else beacon.phase or phase,
            collective="" if compiles else beacon.collective or collective,
            num_collectives=_num_collectives(distributed) if is_ready else 0,
            cpu_s=family_cpu_s() or 0.0,
            is_ready=is_ready,
            has_ended=has_ended,
            on_gpu=on_gpu,
            own_done=beacon.own_done() if on_gpu else None,
        )


def heartbeat_key(restart_count: int, rank: int) -> str:
    return f"muster/beat/{restart_count}/{rank}"


def read_place(frame: FrameType | None) -> tuple[str, str]:
    """Phase and collective that a stack shows, from its innermost frame outwards."""
    theirs = ""
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        path, name = frame.f_code.co_filename.replace("\\", "/"), frame.f_code.co_name
        if "torch/distributed/" in path or "torch/nn/parallel/" in path:
            if name in _COLLECTIVES:
                return "", _COLLECTIVES[name]
        elif "torch/autograd/" in path and "backward" in name:
            return "backward", ""
        for folder, phase in _FOLDERS:
            if folder in path:
                return phase, ""
        if not theirs and _is_users(path):
            theirs = f"{path.rpartition('/')[2]}:{frame.f_lineno} in {name}"
        frame = frame.f_back
    return theirs, ""


def waits_for_gpu(frame: FrameType | None) -> bool:
    """Whether the call that a stack is in returns when a GPU is done: ``loss.item()``, say.

    Such a call is made in C and has no frame, but the bytecode of its caller names it.
    """
    if frame is None:
        return False
    code = list(dis.get_instructions(frame.f_code))
    # At the instruction, or at the last of the caches behind it.
    index = sum(each.offset <= frame.f_lasti for each in code) - 1
    if "CALL" not in code[index].opname:
        return False
    # What is called is the last thing loaded where the expression of the call begins.
    begins = _begin_of(code[index])
    named = [
        each.argval
        for each in code[:index]
        if each.opname.startswith("LOAD_")
        and not each.opname.startswith("LOAD_CONST")  # since 3.13 the names of keywords
        and _begin_of(each) == begins
    ]
    return bool(named) and named[-1] in _GPU_WAITS


def _begin_of(instruction: dis.Instruction) -> tuple[int | None, int | None] | None:
    """Line and column of what an instruction is about."""
    place = instruction.positions
    return None if place is None else (place.lineno, place.col_offset)


def is_compiling(frame: FrameType | None) -> bool:
    """Whether torch.compile is compiling in this stack; running compiled code does not count."""
    while frame is not None:
        path, name = frame.f_code.co_filename.replace("\\", "/"), frame.f_code.co_name
        if path.endswith("torch/_dynamo/convert_frame.py"):
            return True
        if path.endswith("torch/_inductor/compile_fx.py") and "compile" in name:
            return True
        frame = frame.f_back
    return False


def _is_users(path: str) -> bool:
    ours = ("/muster/gang/rank.py", "<frozen", "/site-packages/torch/")
    return not any(part in path for part in ours) and not path.startswith(_LIBRARY)


_LIBRARY = os.path.dirname(threading.__file__).replace("\\", "/") + "/"  # noqa: PTH120


class _Steps:
    """Counts the steps of every optimizer; the largest count is the program's step."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.is_attached = False

    def attach(self) -> None:
        module = None if self.is_attached else _loaded("torch.optim.optimizer")
        if module is None:
            return
        self.is_attached = True
        compiler = sys.modules["torch"].compiler

        def count(optimizer: Any, *_: Any) -> None:
            if not compiler.is_compiling():  # nothing of this may end up in a compiled step
                key = id(optimizer)
                self._counts[key] = self._counts.get(key, 0) + 1

        module.register_optimizer_step_post_hook(count)

    def most(self) -> int:
        return max(self._counts.values(), default=0) - 1


def _loaded(name: str) -> Any:
    """The module if its import is complete, None before."""
    for part in (name.partition(".")[0], name):
        module = sys.modules.get(part)
        spec = getattr(module, "__spec__", None)
        if module is None or getattr(spec, "_initializing", False):
            return None
    return sys.modules[name]


def _num_collectives(distributed: Any) -> int:
    try:
        group = distributed.distributed_c10d._get_default_group()
        return int(group._get_sequence_number_for_group())
    except Exception:  # not every backend counts
        return 0


def family_cpu_s(pid: int | None = None) -> float | None:
    """Processor time of a process and its living descendants (data-loader workers).

    Without ``pid`` it is this process. None where the process has ended, or this is not Linux.
    """
    if sys.platform != "linux":
        if pid is not None:
            return None
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system
    first = pid or os.getpid()
    total: float | None = None
    waiting, seen = [first], set[int]()
    while waiting:
        member = waiting.pop()
        if member in seen:
            continue
        seen.add(member)
        try:
            text = Path(f"/proc/{member}/stat").read_bytes()
        except OSError:
            continue
        fields = text[text.rindex(b")") + 2 :].split()
        # Of the first one also what its ended children have used.
        used = sum(map(int, fields[11 : 15 if member == first else 13]))
        total = (total or 0.0) + used / _TICKS
        waiting += _children(member)
    return total


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_bytes().split())
    except OSError:
        pass
    return found
