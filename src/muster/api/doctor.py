"""Examining a machine: gather the facts or read them, check them, keep them, write the repairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from muster.base.errors import SetupError, UsageError
from muster.base.settings import child_environment
from muster.devices.device_request import DeviceRequest, parse_devices
from muster.doctor.checks.table import run_checks
from muster.doctor.facts import Facts, load_facts, save_facts
from muster.doctor.findings import Finding, sorted_by_severity, write_env_script
from muster.doctor.gather import Gathering, gather

_LEAST_BUDGET_S = 5.0


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """``devices``: as ``--devices`` of other commands; ``time_limit_s``: for everything."""

    devices: str | None = None
    run_dir: Path = Path("runs")
    is_quick: bool = False
    time_limit_s: float = 55.0


@dataclass(frozen=True, kw_only=True)
class Examination:
    """``findings``: in the order of the checks, good ones included."""

    facts: Facts
    findings: tuple[Finding, ...]


def examine(options: DoctorOptions, say: Callable[[str], None] = lambda _: None) -> Examination:
    """Look at this machine; ``say`` hears what is being done.

    Raises UsageError for devices that do not exist or a time limit that nothing fits in.
    """
    if options.time_limit_s < _LEAST_BUDGET_S:
        raise UsageError(
            f"--time-limit {options.time_limit_s:g}: nothing can be examined in that time.",
            hint=f"give {_LEAST_BUDGET_S:g} s at least; --quick measures nothing and takes about "
            "a second.",
        )
    facts = gather(
        Gathering(
            environment=child_environment({}),
            run_folder=options.run_dir,
            devices=DeviceRequest(kind="auto", text="--devices auto")
            if options.devices is None
            else parse_devices(options.devices),
            is_quick=options.is_quick,
            budget_s=options.time_limit_s,
        ),
        say,
    )
    return _checked(facts)


def examine_recorded(path: Path) -> Examination:
    """Look at the machine recorded in ``path``; UsageError when that is no facts file."""
    return _checked(load_facts(path))


def _checked(facts: Facts) -> Examination:
    return Examination(facts=facts, findings=tuple(run_checks(facts)))


def keep_facts(path: Path, facts: Facts) -> None:
    """Write ``facts`` to ``path``; SetupError where that fails."""
    try:
        save_facts(path, facts)
    except OSError as error:
        raise _cannot_write("the facts", path, error) from None


def write_fixes(path: Path, examination: Examination) -> None:
    """Write what findings would set to ``path``; SetupError where that fails."""
    findings = sorted_by_severity(examination.findings)
    try:
        write_env_script(path, findings, examination.facts.host.name)
    except OSError as error:
        raise _cannot_write("the settings", path, error) from None


def _cannot_write(what: str, path: Path, error: OSError) -> SetupError:
    return SetupError(
        f"Cannot write {what} to {path}: {error.strerror or error}.",
        hint="name a file in a folder that exists and that you may write to.",
    )
