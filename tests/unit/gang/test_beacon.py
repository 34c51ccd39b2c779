"""What a rank says of itself: whether it compiles, and how much processor time it has used."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import FrameType

import pytest

from muster.gang.beacon import family_cpu_s, is_compiling


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
