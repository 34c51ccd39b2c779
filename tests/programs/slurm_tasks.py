import os
import time
from pathlib import Path


def square(x: int, seed: int = 0):
    return {"y": x * x + seed, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", "")}


def long(x: int, folder: str):
    with open(Path(folder) / f"began-{x}", "a") as file:
        file.write("x")
    while not (Path(folder) / "go").exists():
        time.sleep(0.05)
    return {"x": x}


def counting(to: int, folder: str, ctx):
    state = ctx.restore() or {"n": 0, "starts": 0}
    n, starts = state["n"], state["starts"] + 1
    while n < to:
        n += 1
        time.sleep(0.05)
        ctx.checkpoint({"n": n, "starts": starts})
        Path(folder, "counting").touch()
        if n == 20 and starts == 1:
            while True:  # until it is told to make room
                time.sleep(0.05)
                ctx.checkpoint({"n": n, "starts": starts})
    return {"n": n, "starts": starts}
