"""Back-ends for gangs, and the all-reduce that was really run."""

from __future__ import annotations

from collections.abc import Iterator

from muster.doctor.checks.speed import probe_trouble
from muster.doctor.facts import AllReduce, Facts, ReduceTry
from muster.doctor.findings import Finding, ok
from muster.doctor.machine import health_of_torch_device, nvlink_gb_s, pcie_gb_s

#: Of the slowest link's raw rate. Rings reach 70 to 90 % of it for large messages.
_LEAST_LINK = 0.3
#: Through the host's memory each byte crosses PCIe twice and is copied by a processor.
_LEAST_WITHOUT_PEERS = 0.1
_SLOW_SMALL_S = 500e-6


def backends(facts: Facts) -> Iterator[Finding]:
    """torch has the back-ends that gangs use here."""
    torch = facts.torch
    if torch.run.status != "ok" or torch.backends is None:
        return
    if not torch.is_distributed:
        yield Finding(
            severity="error",
            what="This torch was built without torch.distributed.",
            why="No gang of several ranks can run; sweeps can.",
            fix="Install an official build of torch.",
        )
        return
    has_gpu = bool(torch.is_cuda_available) and torch.accelerator == "cuda"
    if has_gpu and "nccl" not in torch.backends:
        yield Finding(
            severity="error",
            what=f"torch has no NCCL ({', '.join(torch.backends)}).",
            why="GPUs cannot exchange gradients at a useful speed.",
            fix="Install an official build of torch for Linux; on Windows use WSL 2.",
        )
        return
    if "gloo" not in torch.backends:
        yield Finding(
            severity="warning",
            what=f"torch has no gloo ({', '.join(torch.backends) or 'no back-end at all'}).",
            why="Ranks on the CPU cannot communicate, nor can ranks agree beside NCCL.",
            fix="Install an official build of torch.",
        )
        return
    version = f", NCCL {torch.nccl_version}" if torch.nccl_version else ""
    without = "" if "mpi" in torch.backends else "; no MPI, which only builds from source have"
    yield ok(f"Back-ends: {', '.join(torch.backends)}{version}{without}.")


def all_reduce(facts: Facts) -> Iterator[Finding]:
    """The ranks' all-reduce ends, and every value is right."""
    found = facts.all_reduce
    if found is None or not found.tries:
        return
    first, last = found.tries[0], found.tries[-1]
    who = f"The all-reduce over {found.num_ranks} ranks ({found.backend})"
    if _is_good(first):
        yield ok(f"{who} is right.")
        return
    if first.run.status == "skipped":
        yield from probe_trouble(first.run, who)
        return
    worked = last.settings if _is_good(last) else {}
    yield Finding(
        severity="error",
        what=f"{who} {_trouble(first)}.",
        why="A gang would hang, fail or learn from wrong gradients in the same way.",
        fix=_advice(found, worked),
        settings=worked,
    )


def _is_good(attempt: ReduceTry) -> bool:
    return attempt.run.status == "ok" and not any(size.wrong_values for size in attempt.sizes)


def _trouble(attempt: ReduceTry) -> str:
    run = attempt.run
    where = f" at {run.at}" if run.at else ""
    if run.status == "hung":
        return f"hangs{where}; it was cut off after {run.seconds:.0f} s"
    if run.status == "failed":
        return f"fails{where}: {(run.error or 'no reason given').strip().splitlines()[-1]}"
    bad = max(attempt.sizes, key=lambda size: size.wrong_values)
    return f"gives wrong values: {bad.wrong_values} of {bad.num_values}"


def _advice(found: AllReduce, worked: dict[str, str]) -> str:
    if worked:
        words = " ".join(f"{name}={value}" for name, value in worked.items())
        return f"With {words} it was right on this machine; --fix env writes that to a file."
    tried = [" ".join(f"{k}={v}" for k, v in one.settings.items()) for one in found.tries[1:]]
    if not tried:
        return "NCCL_DEBUG=INFO makes NCCL say what it does."
    return f"Tried without success: {', '.join(tried)}. NCCL_DEBUG=INFO says what NCCL does."


def all_reduce_speed(facts: Facts) -> Iterator[Finding]:
    """Large messages go at the speed of the links, small ones without delay."""
    found = facts.all_reduce
    if found is None:
        return
    good = next((one for one in found.tries if _is_good(one) and one.sizes), None)
    if good is None:
        return
    large = max(good.sizes, key=lambda size: size.num_bytes)
    small = min(good.sizes, key=lambda size: size.num_bytes)
    rate_gb_s = bus_gb_s(large.num_bytes, large.seconds, found.num_ranks)
    figures = (
        f"{rate_gb_s:.3g} GB/s for {large.num_bytes >> 20} MiB, {small.seconds * 1e6:.0f} µs for "
        f"{small.num_bytes >> 10} KiB"
    )
    expected = _expected_gb_s(facts, found, good)
    slow = expected is not None and rate_gb_s < expected[0] * expected[1]
    if expected is not None and slow:
        yield Finding(
            severity="warning",
            what=f"All-reduce over {found.num_ranks} GPUs is slow: {figures}; {expected[2]}.",
            why="Every step of a gang exchanges all gradients.",
            fix="NCCL_DEBUG=INFO shows the paths NCCL takes; nvidia-smi topo -m those there are. "
            "In a container, NCCL needs /dev/shm and --ipc=host.",
        )
    if found.kind != "cpu" and small.seconds > _SLOW_SMALL_S:
        yield Finding(
            severity="note",
            what=f"A small all-reduce takes {small.seconds * 1e6:.0f} µs.",
            why="Models of many small layers wait for that; 20 to 60 µs are usual on one host.",
            fix="Pin processes to cores near their GPU, and leave cores free for NCCL's threads.",
        )
    elif not slow:
        yield ok(f"All-reduce: {figures}.")


def bus_gb_s(num_bytes: int, seconds: float, num_ranks: int) -> float:
    """Bandwidth that each link of a ring sees: 2 (n - 1) / n times the bytes (nccl-tests).

    >>> bus_gb_s(10**9, 1.0, 2)
    1.0
    """
    return 2 * (num_ranks - 1) / num_ranks * num_bytes / seconds / 1e9


def _expected_gb_s(
    facts: Facts, found: AllReduce, good: ReduceTry
) -> tuple[float, float, str] | None:
    """Rate of the weakest link, the least share of it, and both in words."""
    gpus = [health_of_torch_device(facts, number) for number in found.devices]
    known = [gpu for gpu in gpus if gpu is not None]
    if found.kind != "cuda" or not known or len(known) < len(gpus):
        return None
    fast = [nvlink_gb_s(gpu) for gpu in known]
    indices = {gpu.index for gpu in known}
    links = [k for k in facts.links if k.first in indices and k.second in indices]
    if (
        not good.settings
        and all(rate is not None for rate in fast)
        and all(link.is_nvlink for link in links)
    ):
        rate = min(rate for rate in fast if rate is not None)
        return rate, _LEAST_LINK, f"NVLink carries {rate:.0f}"
    lanes = [pcie_gb_s(gpu.pcie_generation_max, gpu.pcie_width) for gpu in known]
    slowest = min((rate for rate in lanes if rate is not None), default=None)
    if slowest is None:
        return None
    # A repair may have switched peer access off.
    has_peers = bool(links) and not good.settings and all(link.peer_read == "ok" for link in links)
    share = _LEAST_LINK if has_peers else _LEAST_WITHOUT_PEERS
    return slowest, share, f"the slowest PCIe link carries {slowest:.0f}"
