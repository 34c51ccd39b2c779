"""Steps about the machine itself: what the driver says, copies, the sampler's kernel, watching."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from typing import Any

from acceptance.here import Here

_MIB = 1 << 20


def machine(here: Here) -> None:
    """What is here; that Muster sees what the driver sees; how fast copies are."""
    import torch

    here.note("torch", torch.__version__)
    here.note("python", sys.version.split()[0])
    seen = json.loads(_json_in(here.muster("devices", "--json").stdout))
    if here.device == "cuda":
        import triton

        here.note("triton", triton.__version__)
        here.note("card", torch.cuda.get_device_name(0))
        query = ["nvidia-smi", "--query-gpu=uuid,driver_version", "--format=csv,noheader"]
        uuids = {line.split(", ")[0]: line for line in here.run(query).stdout.splitlines()}
        here.note("driver", next(iter(uuids.values())).split(", ")[1])
        found = [gpu["uuid"] for gpu in seen["gpus"]]
        here.expect("GPUs of muster", found, set(found) == set(uuids), f"{sorted(uuids)}")
        idle = seen["gpus"][0]["memory_used_mib"]
        here.expect("idle MiB used", idle, idle < 50, "below 50")
        program = "import torch; torch.zeros(1, device='cuda'); print('used', *torch.cuda."
        program += "mem_get_info())"
        words = here.run([sys.executable, "-c", program]).stdout.split()
        free, total = map(int, words[words.index("used") + 1 :][:2])
        here.note("MiB of one context, the driver's share included", (total - free) // _MIB)
    num_bytes = here.size(1 << 30, 1 << 22)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=here.device)
    target = torch.zeros_like(source)
    seconds = here.seconds(lambda: target.copy_(source))
    here.fast("device to device TB/s", 2 * num_bytes / seconds / 1e12, at_least=2.5)
    pinned = here.device == "cuda"
    host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned)
    for name, work in (
        ("host to device GB/s", lambda: source.copy_(host, non_blocking=True)),
        ("device to host GB/s", lambda: host.copy_(source, non_blocking=True)),
    ):
        rate = num_bytes / here.seconds(work) / 1e9
        here.fast(name, rate, at_least=45)


def sampler_tests(here: Here) -> None:
    """The kernel draws what plain torch draws, and what the compiler made of it."""
    here.pytest("test_ssm_sampler_gpu.py")
    if here.device == "cpu":
        return
    import torch

    from muster_recipes.ssm import sampler_cuda, sampler_triton

    sampler_cuda.fused_grid(*drawn(4, 150, 1 << 20, "cuda"))
    kernel: Any = sampler_triton.sample_kernel
    try:
        made = list(kernel.device_caches[torch.cuda.current_device()][0].values())[-1]
    except (AttributeError, LookupError) as error:  # of another Triton
        here.note("registers per thread", f"not told: {error}")
        return
    here.expect("registers per thread", made.n_regs, made.n_regs <= 64, "at most 64")
    here.expect("spilled registers", made.n_spills, made.n_spills == 0, "0")
    here.note("shared memory, bytes", made.metadata.shared)


def sampler_speed(here: Here) -> None:
    """Entries per second beside what only draws: into memory, and in registers."""
    import torch

    from muster_recipes.ssm import sampler_cuda

    buffer = torch.empty(here.size(256 * _MIB // 4, 1 << 16), device=here.device)
    into_memory = buffer.numel() / here.seconds(lambda: buffer.normal_())
    here.note("normal_() into memory, G entries/s", into_memory / 1e9)
    students = here.size(1 << 26, 1 << 10)
    draw = sampler_cuda.fused_grid if here.device == "cuda" else sampler_cuda.plain_grid
    for dim in (16, 150, 1000) if not here.rehearse else (16,):
        for lags in (4, 8):
            arguments = drawn(lags, dim, students, here.device)
            rate = dim * students / here.seconds(lambda: draw(*arguments))  # noqa: B023
            here.note(f"d {dim}, {lags} lags, G entries/s", rate / 1e9)
            here.fast(f"d {dim}, {lags} lags, share of normal_()", rate / into_memory, at_least=0.5)
            if here.device == "cuda" and lags == 4:
                only = dim * students / here.seconds(_draw_only(dim, students))
                here.note(f"d {dim}, share of drawing alone", rate / only)
                here.goal("sampler, share of a kernel that only draws", rate / only)


def drawn(lags: int, dim: int, students: int, device: str) -> tuple[Any, ...]:
    """What one launch of the sampler is given: a part of a block, and its numbers on the device."""
    import torch

    from muster_recipes.ssm.sampler import Block
    from muster_recipes.ssm.sampler_cuda import Part, staged

    h = [0.5**m for m in range(1, lags + 1)]
    block = Block(h=h, w=[h], dim=dim, num_samples=students, seed=3, eps=1e-3)
    grid = [Part(block, 0, students)]
    return grid, next(staged([grid], torch.device(device)))


def _draw_only(dim: int, students: int) -> Any:
    """A kernel that sums as many normal numbers and does nothing else."""
    import torch

    from acceptance.programs.draw_kernel import draw_kernel

    out = torch.empty(students // 256, device="cuda")
    return lambda: draw_kernel[(students // 256,)](out, dim, BLOCK=256, num_warps=4)


def monitor_and_doctor(here: Here) -> None:
    """The monitor beside a busy card, and the doctor's own products of matrices."""
    # The doctor first: it measures GPUs that nobody holds.
    flags = ["--quick"] if here.rehearse else ["--time-limit", "40"]
    done = here.muster("doctor", "--json", *flags, "--run-dir", str(here.folder), code=None)
    here.expect("doctor's exit code", done.returncode, done.returncode == 0 or here.rehearse, "0")
    findings = json.loads(_json_in(done.stdout))
    wrong = [each["what"] for each in findings["findings"] if each["severity"] == "error"]
    here.expect("errors that the doctor finds", wrong, not wrong or here.rehearse, "none")
    speeds = re.findall(r"bf16[^\"]{0,40}?([\d.,]+) TFLOP/s", done.stdout)
    here.note("doctor's bf16 TFLOP/s", speeds)

    import torch

    log = here.folder / "usage.csv"
    words = [sys.executable, "-m", "muster", "monitor", "--interval", "1", "--output", str(log)]
    words += ["--duration", str(here.size(8, 2)), "--json"]
    watching = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, cwd=here.folder,
        env=here.environment(),
    )  # fmt: skip
    size = here.size(8192, 64)
    kind = torch.bfloat16 if here.device == "cuda" else torch.float32
    left = torch.randn(size, size, device=here.device, dtype=kind)
    while watching.poll() is None:
        for _ in range(20):
            left @ left
        here.synchronize()
        if here.rehearse:
            time.sleep(0.05)
    summary = watching.communicate()[0]
    print(summary)
    here.expect("monitor's exit code", watching.returncode, watching.returncode == 0, "0")
    here.note("monitor", json.loads(_json_in(summary)))


def _json_in(text: str) -> str:
    """The JSON object in what a program has printed, warnings before it or not."""
    return text[text.index("{") : text.rindex("}") + 1]
