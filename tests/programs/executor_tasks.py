import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import muster


def echo(x: int):
    print(f"task {x} speaks")
    return {"x": x}


def logs(x: int, ctx):
    for step in range(9):
        ctx.log(step, loss=x)


def steps_until_told(x: int, ctx):
    """Saves every step; ends by itself only after a minute."""
    for step in range((ctx.restore() or {"step": 0})["step"], 6000):
        ctx.report(0.0, f"step {step}")
        ctx.checkpoint({"step": step + 1})
        time.sleep(0.01)


def boom(x: int):
    raise ValueError(f"no {x}")


def rude(x: int):
    class Rude(Exception):
        def __str__(self):
            raise RuntimeError("not even this")

    raise Rude


def surrogate(x: int):
    raise ValueError("\udcff" + "\x00" * 20_000)


def strange(x: int):
    return {"nan": math.nan, "up": math.inf, "down": -math.inf, "list": [1.5, math.nan]}


def slow(x: int):
    time.sleep(0.3)
    return {"x": x}


def endless(x: int):
    time.sleep(600 * x)
    return {"x": x}


def telling(x: int, ctx):
    ctx.report(0.5, "half way \udcff")
    return {"x": x}


@muster.batched(max_batch=8)
def joint(items):
    return [{"n": len(items), "x": item["x"]} for item in items]


@muster.batched(max_batch=8)
def joint_boom(items):
    if any(item["x"] == 2 for item in items):
        raise ValueError("two")
    return [{"n": len(items)} for item in items]


@muster.batched(max_batch=8)
def joint_mixed(items):
    calls.append(len(items))

    def of(x):
        if x == 2:
            return ValueError("two has no result")
        result = {"n": len(items), "calls": len(calls)}
        return muster.TargetError("three is wrong") if x == 3 else result

    return [of(item["x"]) for item in items]


calls = []


def leave(x: int):
    print("last words", flush=True)
    os._exit(7)


def killed(x: int):
    os.kill(os.getpid(), signal.SIGKILL)


def segfault(x: int):
    ctypes.string_at(0)


def stubborn(x: int):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(os.environ["PIDS"]).write_text(str(os.getpid()))
    time.sleep(60)


def family(x: int):
    pids = []
    pids.append(subprocess.Popen(["sleep", "60"]).pid)
    pids.append(subprocess.Popen(["sleep", "60"], start_new_session=True).pid)
    pids.append(subprocess.Popen(["sh", "-c", "trap '' TERM; while :; do sleep 1; done"]).pid)
    script = "import os, time\nos.setsid()\nif pid := os.fork():\n    print(pid, flush=True)\n"
    script += "    os._exit(0)\ntime.sleep(60)"
    middle = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    pids.append(int(middle.stdout.readline()))
    middle.wait()
    Path(os.environ["PIDS"]).write_text(" ".join(map(str, [os.getpid(), *pids])))
    if x == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if x == 2:
        time.sleep(60)
    return {}


def forked(x: int):
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    Path(os.environ["PIDS"]).write_text(str(pid))
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)


def orphans(x: int):
    subprocess.run(["sh", "-c", "sleep 0.05 &"])
    return {}


def lingering(x: int):
    threading.Thread(target=time.sleep, args=(60,)).start()
    return {}
