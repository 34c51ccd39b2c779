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
from typing import Any

from muster.base.errors import MusterError, SetupError, UnknownNameError
from muster.base.settings import Settings
from muster.slurm.request import JobRequest, check_memory, check_time, further_option

_KEYS = {
    "partition": str,
    "account": str,
    "time": str,
    "mem": str,
    "modules": list,
    "setup": list,
    "options": dict,
}
_KINDS = {str: "a string", list: "a list of strings", dict: "a table"}


def with_defaults(request: JobRequest, settings: Settings) -> JobRequest:
    """The request, with what it leaves open from this user's site file."""
    return request.with_site(read_site(settings))


def read_site(settings: Settings) -> JobRequest:
    """What the site file of this user says; nothing where there is none.

    Raises SetupError, with the file's name, where it cannot be read or says something unknown, and
    where a path was set and nothing is there.
    """
    path, is_set = settings.slurm_site, settings.slurm_site != Settings.slurm_site.expanduser()
    if not is_set and not path.exists():
        return JobRequest()
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
        return _parse(values)
    except MusterError as error:
        raise SetupError(f"The site file {path}: {error}") from None


def _parse(values: Mapping[str, Any]) -> JobRequest:
    """The defaults in these keys; a MusterError for one that is unknown or has a wrong value."""
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
    return JobRequest(
        partition=values.get("partition"),
        account=values.get("account"),
        time_limit=check_time(values["time"], "time") if "time" in values else None,
        memory=check_memory(values["mem"], "mem") if "mem" in values else None,
        setup_lines=(*loading, *values.get("setup", [])),
        slurm_args=tuple(_option(*item) for item in values.get("options", {}).items()),
    )


def _option(name: str, value: object) -> str:
    if value is False:
        raise SetupError(f"options.{name} must be left out to be off.")
    if not isinstance(value, str | int):
        raise SetupError(f"options.{name} must be a string, a whole number or true, not {value!r}.")
    text = name if value is True else f"{name}={value}"
    further_option(text, "options")
    return text
