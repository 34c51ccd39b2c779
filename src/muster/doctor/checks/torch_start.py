"""Whether torch is there, and starts."""

from __future__ import annotations

from collections.abc import Iterator

from muster.base.errors import how_to_install
from muster.doctor.checks.speed import probe_trouble
from muster.doctor.facts import NO_TORCH, Facts
from muster.doctor.findings import Finding, error, note, warning, working_gpus

#: Seconds after which an import of torch that was cut off is worth a warning.
_LONG_IMPORT_S = 5.0


def torch_start(facts: Facts) -> Iterator[Finding]:
    """What keeps it from starting, or from being seen to; nothing where it starts."""
    torch, run = facts.torch, facts.torch.run
    name = f"torch {torch.version}" if torch.version else "torch"
    is_import = run.at in (None, "importing torch")
    if torch.version is None and run.status != "hung" and run.error in (None, NO_TORCH):
        yield (warning if working_gpus(facts) else note)(
            what="torch is not installed.",
            why="Sweeps and maps of what needs no torch run; trainings, `muster run` and most "
            "recipes do not.",
            fix=f"{how_to_install('torch')}, or name the Python that has torch: muster sweep "
            "--python PATH …",
        )
        return
    was_cut = run.status in ("hung", "skipped") and run.seconds > 0
    if torch.version is None and not was_cut:
        yield error(
            what=f"torch cannot be used: {run.error}.",
            why="No PyTorch program runs.",
            fix="Reinstall torch.",
        )
        return
    if run.status in ("failed", "hung"):
        how = (
            f"does not start: {run.reason}"
            if run.status == "failed"
            else f"was still {run.at or 'starting'} after {run.seconds:.0f} s."
        )
        yield error(
            what=f"{name} {how}",
            why="No PyTorch program runs.",
            fix="Reinstall torch; a library that LD_LIBRARY_PATH puts before torch's own is the "
            "most frequent cause. From a slow disk, a first import may just need --time-limit 3m."
            if is_import
            else "The import went well, so look at the driver: dmesg | grep -e Xid -e NVRM, then "
            "reset the GPU or reboot.",
        )
        return
    if run.status == "skipped" and is_import and run.seconds >= _LONG_IMPORT_S:
        yield warning(
            what=f"The start of {name} was not examined: {run.error}.",
            why="An import takes a second or two, and longer from a slow disk. One that never ends "
            "would keep every PyTorch program from starting.",
            fix="Give more time: --time-limit 60 tells whether it hangs.",
        )
    elif not facts.is_quick:
        yield from probe_trouble(run, "The start of torch")
