import os
import signal
import subprocess
import time
from pathlib import Path

import muster


def note(text):
    handle = os.open(os.environ["NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, f"{text}\n".encode())
    os.close(handle)


def double(x: int):
    note(f"ran {x}")
    return {"y": 2 * x}


def some_fail(x: int):
    note(f"ran {x}")
    if x % 2 and not Path("mended").exists():
        raise ValueError(f"odd {x}")
    return {"y": x}


def slow(x: int):
    note(f"began {x}")
    time.sleep(0.6)
    note(f"ended {x}")
    return {"y": x}


def waits(x: int):
    """It ends once there is a file called go."""
    note(f"began {x}")
    while not Path("go").exists():
        time.sleep(0.02)
    note(f"ended {x}")
    return {"y": x}


def held(x: int):
    """The first one ends, the next one never does by itself."""
    note(f"began {x}")
    while x > 1:
        time.sleep(0.1)
    return {"y": x}


def family(x: int):
    for start_new_session in (False, True):
        child = subprocess.Popen(
            ["sh", "-c", "trap '' TERM HUP INT; while :; do sleep 0.2; done"],
            start_new_session=start_new_session,
        )
        note(f"pid {child.pid}")
    note(f"pid {os.getpid()}")
    note("family complete")
    time.sleep(60)
    return {}


def hang_then_ok(x: int):
    note(f"began {x}")
    if x == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sh", "-c", "trap '' TERM; while :; do sleep 0.2; done"])
        note(f"pid {child.pid}")
        time.sleep(600)
    return {"y": x}


def crash(x: int):
    note(f"began {x}")
    if x == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    return {"y": x}


def steps(x: int, ctx):
    state = ctx.restore() or {"step": 0}
    note(f"attempt at {state['step']}")
    for step in range(state["step"], 6):
        ctx.checkpoint({"step": step + 1, "nan": float("nan")})
        if step == 2 and not Path("killed-once").exists():
            Path("killed-once").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return {"steps": 6}


def files(x: int, ctx):
    (ctx.folder / "out.txt").write_text(str(x))
    if x == 2:
        raise ValueError("after writing")
    return {"y": x}


@muster.batched(max_batch=4)
def together(items):
    if any(item["x"] == 3 for item in items):
        raise ValueError("three is bad")
    return [{"y": item["x"]} for item in items]
