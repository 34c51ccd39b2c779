"""What is asked of SLURM for a job, by flags and by the site file, checked before it is sent.

The site file is what one cluster asks of every job, written down once by its user:
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

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

from muster.base.errors import MusterError, SetupError, UnknownNameError, UsageError
from muster.base.flags import Flag, check_least, parse_memory_mib
from muster.base.settings import Settings

#: Cores that are asked for with each GPU where nobody has said how many.
CORES_PER_GPU = 4
_TIME = re.compile(r"(?:\d+-\d{1,2}(?::\d{1,2}){0,2}|\d+(?::\d{1,2}){0,2})")
_MEMORY = re.compile(r"\d+[KMGT]?")
#: An option of sbatch; people write it with its dashes and without.
_OPTION = re.compile(r"(?:--)?(?P<name>[A-Za-z][A-Za-z0-9-]*)(?:=(?P<value>.*))?", re.DOTALL)
#: Options that muster sets itself, with the flag to use instead; a second one would contradict it.
_OURS = {
    "array": "", "output": "--run-dir", "error": "--run-dir", "signal": "", "requeue": "",
    "no-requeue": "", "job-name": "", "open-mode": "", "wrap": "", "chdir": "", "dependency": "",
    "parsable": "", "wait": "", "export": "", "nodes": "--nodes", "ntasks": "--nodes",
    "ntasks-per-node": "--gpus", "partition": "--partition", "account": "--account",
    "time": "--time", "mem": "--mem", "cpus-per-task": "--cpus-per-node or --cpus-per-worker",
}  # fmt: skip


_SLURM = ("slurm",)


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What every job asks of SLURM. What is not given comes from the site file, then from SLURM.

    ``setup_lines``: bash before the work, such as ``module load cuda``; from the site file and from
    ``--setup``.
    """

    partition: Annotated[str | None, Flag(metavar="NAME", engines=_SLURM)] = None
    """SLURM: where to run."""
    account: Annotated[str | None, Flag(metavar="NAME", engines=_SLURM)] = None
    """SLURM: whom to charge."""
    time_limit: Annotated[str | None, Flag(name="time", metavar="H:MM:SS", engines=_SLURM)] = None
    """SLURM: how long the job may run, such as 4:00:00."""
    memory: Annotated[str | None, Flag(name="mem", metavar="SIZE", engines=_SLURM)] = None
    """SLURM: memory of each worker or node, such as 16G."""
    slurm_args: Annotated[
        tuple[str, ...], Flag(name="slurm-arg", metavar="NAME=VALUE", engines=_SLURM)
    ] = ()
    """SLURM: one more option of sbatch. May be given several times."""
    setup_lines: Annotated[tuple[str, ...], Flag(is_hidden=True)] = ()

    @property
    def memory_parts(self) -> list[str]:
        """What asks for memory per core or GPU, which SLURM does not take beside ``--mem``."""
        return [one for one in self.slurm_args if further_option(one)[0].startswith("mem-per-")]


def setup_of_job(lines: Sequence[str]) -> tuple[str, ...]:
    """Lines of ``--setup`` as bash: where one of them fails, the job says so and ends. The lines of
    the site file stay as they are, because together they may be a condition or a loop.

    >>> setup_of_job(["module load x"])[0].partition(" || ")[0]
    "eval 'module load x'"
    """
    said = [shlex.quote(f"muster: --setup has failed: {line}") for line in lines]
    return tuple(
        f"eval {shlex.quote(line)} || {{ echo {text} >&2; exit 97; }}"
        for line, text in zip(lines, said, strict=True)
    )


@dataclass(frozen=True, kw_only=True)
class JobRequest(SlurmOptions):
    """What a job asks of SLURM.

    Of a gang's job these are amounts per node, of an array amounts per element.
    ``warn_before_s``: how long before the time limit SLURM sends its signal.
    """

    num_nodes: Annotated[int, Flag(is_hidden=True)] = 1
    gpus_per_node: Annotated[int, Flag(is_hidden=True)] = 0
    cpus_per_node: Annotated[int | None, Flag(engines=_SLURM)] = None
    """SLURM: CPU cores of each node."""
    warn_before_s: Annotated[int, Flag(is_hidden=True)] = 60

    def __post_init__(self) -> None:
        if self.num_nodes < 1:
            raise UsageError(f"--nodes {self.num_nodes} is too small.", hint="write 1 or more.")
        check_least(self, cpus_per_node=1)
        if self.time_limit is not None:
            check_time(self.time_limit)
        if self.memory is not None:
            check_memory(self.memory)
        _ = self.further  # raises for an option that muster sets itself
        if self.memory is not None and self.memory_parts:
            raise UsageError(
                f"--mem {self.memory} and {self.memory_parts[0]} exclude each other on SLURM.",
                hint="leave one of them out.",
            )

    def with_site(self, site: JobRequest) -> JobRequest:
        """This request, with what it leaves open from the site file."""
        asks_memory = self.memory is not None or self.memory_parts
        parts = site.memory_parts if asks_memory else ()
        return dataclasses.replace(
            self,
            partition=self.partition or site.partition,
            account=self.account or site.account,
            time_limit=self.time_limit or site.time_limit,
            memory=self.memory if asks_memory else site.memory,
            slurm_args=(*(one for one in site.slurm_args if one not in parts), *self.slurm_args),
            setup_lines=(*site.setup_lines, *self.setup_lines),
        )

    @cached_property
    def further(self) -> dict[str, str]:
        """The options in ``slurm_args`` by name; the last of a name wins, as with sbatch itself."""
        return dict(further_option(text) for text in self.slurm_args)

    @property
    def gpus_of_a_kind(self) -> int:
        """How many GPUs sbatch's own options ask for, such as ``gres=gpu:a100:4``.

        >>> JobRequest(slurm_args=("gres=gpu:a100:4",)).gpus_of_a_kind
        4
        >>> [JobRequest(slurm_args=(text,)).gpus_of_a_kind for text in ("gpus=2", "nice=9")]
        [2, 0]
        """
        for name in ("gpus-per-node", "gres", "gpus"):
            value = self.further.get(name, "")
            pattern = r"gpu(?:\S*?)(?::(\d+))?(?:,|$)" if name == "gres" else r"(\d+)$"
            if found := re.search(pattern, value):
                return int(found[1] or 1)
        return 0

    @property
    def num_gpus(self) -> int:
        return self.gpus_of_a_kind or self.gpus_per_node

    @property
    def num_cores(self) -> int | None:
        """The cores of each node or worker: as many as were asked for, else some for each GPU, as
        ranks and data loaders would otherwise share a single core. None leaves it to SLURM."""
        if self.cpus_per_node is not None or "cpus-per-gpu" in self.further:
            return self.cpus_per_node
        return CORES_PER_GPU * self.num_gpus or None

    def options(self) -> dict[str, str]:
        """As long options of sbatch, without dashes; an empty value is a switch."""
        cores, memory = self.num_cores, self.memory
        asked = {
            "gpus-per-node": None if self.gpus_of_a_kind else self.gpus_per_node or None,
            "cpus-per-task": cores,
            "mem": None if memory is None else check_memory(memory),
            "time": self.time_limit,
            "partition": self.partition,
            "account": self.account,
        }
        return {k: str(value) for k, value in asked.items() if value is not None} | self.further


def check_time(text: str, flag: str = "--time") -> str:
    """``text`` when it is a time limit as SLURM reads it; UsageError otherwise.

    >>> check_time("4:00:00"), check_time("2-12"), check_time("90")
    ('4:00:00', '2-12', '90')
    """
    if not _TIME.fullmatch(text) or not re.search(r"[1-9]", text):
        raise UsageError(
            f"{flag} {text}: SLURM cannot read this as a time limit.",
            hint="write 90 (minutes), 4:00:00 (hours:minutes:seconds) or 2-12:00:00 (days-…).",
        )
    return text


def time_limit_s(text: str) -> int:
    """Seconds in a time limit that ``check_time`` has let pass.

    >>> time_limit_s("90"), time_limit_s("1:30"), time_limit_s("1-2"), time_limit_s("0:0:5")
    (5400, 90, 93600, 5)
    """
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 1:  # minutes
        hours, minutes, seconds = 0, parts[0], 0
    else:  # [hours:]minutes:seconds
        hours, minutes, seconds = ([0, *parts])[-3:]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def check_memory(text: str, flag: str = "--mem") -> str:
    """``text`` when it is an amount of memory as SLURM reads it; UsageError otherwise.

    >>> check_memory("16G"), check_memory("16GB"), check_memory("500")
    ('16G', '16G', '500')
    """
    short = text.upper().removesuffix("IB").removesuffix("B")
    if not _MEMORY.fullmatch(short):
        raise UsageError(
            f"{flag} {text}: SLURM cannot read this as an amount of memory.",
            hint="write 16G, or a whole number of megabytes: 16000. 0 asks for all of the node's.",
        )
    return short


def memory_mib(text: str) -> float:
    """MiB in what ``check_memory`` has let pass; SLURM takes a bare number for megabytes.

    >>> memory_mib("2G"), memory_mib("500"), memory_mib("0")
    (2048.0, 500.0, 0.0)
    """
    short = check_memory(text)
    return parse_memory_mib(short if short[-1].isalpha() else f"{short}M", "--mem")


def further_option(text: str, flag: str = "--slurm-arg") -> tuple[str, str]:
    """``NAME=VALUE`` or ``NAME`` (a switch) as an option; UsageError for one that muster sets.

    >>> further_option("--constraint=a100&nvlink")
    ('constraint', 'a100&nvlink')
    """
    found = _OPTION.fullmatch(text.strip())
    if found is None:
        raise UsageError(
            f"{flag} {text}: write a long option of sbatch as NAME=VALUE, or NAME for a switch.",
            hint=f"for example {flag} constraint=a100 {flag} exclusive.",
        )
    name, value = found["name"], found["value"] or ""
    if name in _OURS:
        other = f"use {_OURS[name]}." if _OURS[name] else "leave it out."
        raise UsageError(f"{flag} {name}: muster sets this option itself.", hint=other)
    check_one_line(f"{flag} {name}", value)
    return name, value


def check_one_line(flag: str, value: str) -> None:
    """Raise UsageError for a line break or another control character in ``value``."""
    if any(ord(character) < 32 for character in value):
        raise UsageError(f"{flag} {value!r}: the value of an option of sbatch is one line.")


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
    import tomllib  # nobody else needs it, and every command imports this module

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
        raise SetupError(f"options.{name} cannot be false: leave it out instead.")
    if not isinstance(value, str | int):
        raise SetupError(f"options.{name} must be a string, a whole number or true, not {value!r}.")
    text = name if value is True else f"{name}={value}"
    further_option(text, "options")
    return text
