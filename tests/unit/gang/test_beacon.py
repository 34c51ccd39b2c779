"""What a rank says of itself: whether it compiles, and how much processor time it has used."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from muster.gang.beacon import family_cpu_s, is_compiling, waits_for_gpu


def frame_in(*places: tuple[str, str]) -> FrameType:
    """A stack whose frames are in these files and functions, the outermost first."""
    call = "sys._getframe()"
    scope: dict[str, object] = {"sys": sys}
    for number, (path, name) in enumerate(reversed(places)):
        exec(compile(f"def {name}():\n    return {call}", path, "exec"), scope)
        scope[f"made_{number}"] = scope[name]
        call = f"made_{number}()"
    found = eval(call, scope)
    assert isinstance(found, FrameType)
    return found


@pytest.mark.parametrize(
    ("places", "wanted"),
    [
        ([("train.py", "step")], False),
        ([("/x/torch/_dynamo/eval_frame.py", "compile_wrapper"), ("train.py", "loss")], False),
        ([("/x/torch/_dynamo/convert_frame.py", "_compile"), ("/x/sympy/core.py", "eval")], True),
        ([("/x/torch/_inductor/compile_fx.py", "bw_compiler"), ("subprocess.py", "wait")], True),
        ([("/x/torch/_inductor/compile_fx.py", "run"), ("/tmp/c.py", "call")], False),
    ],
)
def test_compiling_is_seen_in_the_stack(places: list[tuple[str, str]], wanted: bool) -> None:
    assert is_compiling(frame_in(*places)) is wanted


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_processor_time_of_another_process() -> None:
    busy = "import time\nwhile time.process_time() < 30: pass"
    with subprocess.Popen([sys.executable, "-c", busy]) as child:
        try:
            while (family_cpu_s(child.pid) or 0.0) < 0.3:
                assert child.poll() is None
                time.sleep(0.05)
        finally:
            child.kill()
    assert family_cpu_s(child.pid) is None
    assert (family_cpu_s() or 0.0) >= sum(os.times()[:2]) - 0.1


def waits_in(text: str) -> bool:
    """Whether a function waits for a GPU while it is in the call that is ``text``."""
    found: list[bool] = []

    def note(*_: object, **__: object) -> int:
        found.append(waits_for_gpu(sys._getframe(1)))
        return 1

    loss = SimpleNamespace(item=note, read=note)
    scope: dict[str, Any] = {"loss": loss, "float": note, "f": note}
    exec(compile(f"def step():\n    return [{text}]", "train.py", "exec"), scope)
    scope["step"]()
    [waits] = found
    return waits


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("loss.item()", True),
        ("1 + loss.item()", True),
        ("loss.item(device=1)", True),
        ("float(True)", True),
        ("loss.read()", False),
        ("f()", False),
    ],
)
def test_a_call_that_waits_for_a_gpu_is_known_by_its_name(text: str, wanted: bool) -> None:
    assert waits_in(text) is wanted


def test_torchs_own_synchronize_waits_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def note() -> None:
        frame = sys._getframe(1)
        seen.append((frame.f_code.co_filename.endswith("cuda/__init__.py"), waits_for_gpu(frame)))

    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_synchronize", note, raising=False)
    torch.cuda.synchronize(-1)  # of no device
    assert seen == [(True, True)]


def test_an_event_waits_for_a_gpu() -> None:
    """torch.cuda.Event.synchronize has a frame of its own, which calls that of its base in C."""
    seen = []

    class Base:
        def synchronize(self) -> None:
            seen.append(waits_for_gpu(sys._getframe(1)))

    class Event(Base):
        def synchronize(self) -> None:
            super().synchronize()

    Event().synchronize()
    assert seen == [True]
