import os
import time
from pathlib import Path

from beside import double


def square(x: int, ctx, seed: int = 0):
    print(f"task {x} of seed {seed} speaks")
    return {
        "y": double(x) * x,
        "devices": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        "kind": ctx.device,
        "run": ctx.run,
    }


def where(x: int, place: str, ctx):
    return {
        "is_first_node": Path(place, "target.py").exists(),  # the other one does not see it
        "devices": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        "kind": ctx.device,
    }


def write(x: int, ctx):
    (ctx.folder / "inner").mkdir()
    (ctx.folder / "inner" / "text").write_text(f"of {x}")
    (ctx.folder / "large").write_bytes(bytes([x]) * 9_000_000)
    os.symlink("large", ctx.folder / "link")
    return {"y": x}


def fail(x: int, ctx):
    (ctx.folder / "trace").write_text("what I saw")
    raise ValueError(f"no {x}")


def hold(x: int, ctx):
    (Path(__file__).parent / f"began-{x}").touch()
    while not (Path(__file__).parent / "go").exists():
        time.sleep(0.1)
    return {"y": x}


def slow(x: int, ctx):
    (Path(__file__).parent / f"began-{x}").touch()
    time.sleep(0.3)
    return {"y": x}
