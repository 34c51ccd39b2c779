"""The site file: what one cluster asks of every job, written down once by its user.

``~/.config/muster/slurm.toml`` (or where MUSTER_SLURM_SITE points)::

    partition = "gpu"
    account = "physics"
    time = "8:00:00"
    modules = ["cuda/12.6", "python/3.12"]
    setup = ["source ~/venvs/muster/bin/activate"]
    options = { constraint = "a100", exclusive = true }

All keys may be left out, and so may the file. A flag on the command line wins over the file.
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.base.errors import MusterError, SetupError, UnknownNameError
from muster.base.settings import Settings
from muster.slurm.sbatch import check_memory, check_time, further_option

_KEYS = {
    "partition": str,
    "account": str,
    "time": str,
    "mem": str,
    "modules": list,
    "setup": list,
    "options": dict,
}
_KINDS = {str: "a text", list: "a list of texts", dict: "a table"}


@dataclass(frozen=True, kw_only=True)
class SlurmSite:
    """Defaults for every job.

    Attributes
        setup_lines: bash before the work: the site's modules, then its own lines.
        options: further options of sbatch, ``(name, value)``; an empty value is a switch.
        path: the file, None where there is none.
    """

    partition: str | None = None
    account: str | None = None
    time_limit: str | None = None
    memory: str | None = None
    setup_lines: tuple[str, ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    path: Path | None = None


def read_site(settings: Settings) -> SlurmSite:
    """The site file of this user; an empty site where there is none.

    Raises SetupError, with the file's name, where it cannot be read or says something unknown, and
    where a path was set and nothing is there.
    """
    path, is_set = settings.slurm_site, settings.slurm_site != Settings.slurm_site.expanduser()
    if not is_set and not path.exists():
        return SlurmSite()
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SetupError(
            f"The site file {path} cannot be read: {error.strerror}.",
            hint="MUSTER_SLURM_SITE names it; unset it to go without.",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SetupError(f"The site file {path} is not TOML: {error}.") from None
    try:
        return parse_site(values, path)
    except MusterError as error:
        raise SetupError(f"The site file {path}: {error}") from None


def parse_site(values: Mapping[str, Any], path: Path | None = None) -> SlurmSite:
    """The site that these keys describe; UsageError for one that is unknown or of a wrong kind."""
    for key, value in values.items():
        if key not in _KEYS:
            raise UnknownNameError("key", key, _KEYS)
        kind = _KEYS[key]
        is_right = isinstance(value, kind) and (
            kind is not list or all(isinstance(item, str) for item in value)
        )
        if not is_right:
            raise SetupError(f"{key} must be {_KINDS[kind]}, not {value!r}.")
    modules: list[str] = values.get("modules", [])
    loading = [f"module load {shlex.join(modules)}"] if modules else []
    return SlurmSite(
        partition=values.get("partition"),
        account=values.get("account"),
        time_limit=check_time(values["time"], "time") if "time" in values else None,
        memory=check_memory(values["mem"], "mem") if "mem" in values else None,
        setup_lines=(*loading, *values.get("setup", [])),
        options=tuple(_option(*item) for item in values.get("options", {}).items()),
        path=path,
    )


def _option(name: str, value: object) -> tuple[str, str]:
    if isinstance(value, bool):
        if not value:
            raise SetupError(f"options.{name} must be left out to be off.")
        return further_option(name, "options")
    if not isinstance(value, str | int):
        raise SetupError(f"options.{name} must be a text, a whole number or true, not {value!r}.")
    return further_option(f"{name}={value}", "options")
