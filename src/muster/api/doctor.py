"""Examining a machine: gather the facts or read them, check them, keep them, write the repairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from muster.base.atomic_files import write_atomic
from muster.base.codec import to_json
from muster.base.errors import SetupError
from muster.doctor.checks.table import run_checks
from muster.doctor.facts import Facts, load_facts
from muster.doctor.findings import Finding, env_script, sorted_by_severity
from muster.doctor.gather import DoctorOptions, gather


@dataclass(frozen=True, kw_only=True)
class Examination:
    """``findings``: in the order of the checks, good ones included."""

    facts: Facts
    findings: tuple[Finding, ...]


def examine(options: DoctorOptions, say: Callable[[str], None] = lambda _: None) -> Examination:
    """Look at this machine; ``say`` hears what is being done.

    Raises UsageError for devices that do not exist.
    """
    return _checked(gather(options, say))


def examine_recorded(path: Path) -> Examination:
    """Look at the machine recorded in ``path``; UsageError when that is not a facts file."""
    return _checked(load_facts(path))


def _checked(facts: Facts) -> Examination:
    return Examination(facts=facts, findings=tuple(run_checks(facts)))


def keep_facts(path: Path, facts: Facts) -> None:
    """Write ``facts`` to ``path``; SetupError where that fails."""
    _write("the facts", path, to_json(facts))


def write_fixes(path: Path, examination: Examination) -> None:
    """Write to ``path`` what the findings would set; SetupError where that fails."""
    findings = sorted_by_severity(examination.findings)
    script = env_script(findings, examination.facts.host.name, path.name)
    _write("the settings", path, script.encode())


def _write(what: str, path: Path, data: bytes) -> None:
    try:
        write_atomic(path, data)
    except OSError as error:
        raise SetupError(
            f"Cannot write {what} to {path}: {error.strerror or error}.",
            hint="name a file in a folder that exists and that you may write to.",
        ) from None
