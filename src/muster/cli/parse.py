"""One call into tyro for all commands: parses, or ends with exit code 2 and a clear message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field, fields, is_dataclass, make_dataclass
from typing import Any, TypeVar

import tyro

from muster.base.errors import UsageError
from muster.cli import output

_T = TypeVar("_T")


def parse(
    kind: type[_T], argv: Sequence[str], command: str, description: str, *, pairs: bool = True
) -> _T:
    """The flags in ``argv`` as a ``kind``. Hyphens and underscores mean the same.

    ``pairs``: plain bools have a ``--no-`` form as well.
    """
    single = () if pairs else (tyro.conf.FlagCreatePairsOff,)
    try:
        return tyro.cli(
            kind,
            prog=f"muster {command}",
            args=list(argv),
            description=description,
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes, *single),
        )
    except SystemExit:
        for line in _other_names(kind, argv):
            output.remark(line)
        raise


#: What other programs call the same, each group with our own name among them.
_SYNONYMS = (
    ("lr", "learning-rate", "learn-rate", "eta"),
    ("epochs", "num-epochs", "n-epochs", "max-epochs", "num-train-epochs"),
    ("global-batch", "batch-size", "bs", "batch", "global-batch-size", "train-batch-size"),
    ("weight-decay", "wd"),
    ("seeds", "num-seeds", "seed", "n-seeds"),
    ("run-dir", "output-dir", "out-dir", "output", "log-dir", "save-dir", "default-root-dir"),
    ("gpus", "nproc-per-node", "num-gpus", "n-gpus", "ngpus", "num-processes"),
    ("nodes", "nnodes", "num-nodes"),
    ("global-accumulation", "accumulate", "grad-accum", "gradient-accumulation-steps"),
    ("precision", "dtype", "mixed-precision"),
)


def _other_names(kind: Any, argv: Sequence[str]) -> list[str]:
    """For flags that we do not know by a name that others use: ours."""
    known = set(_flags_of(kind))
    lines = []
    for word in argv:
        name = word.partition("=")[0].removeprefix("--").replace("_", "-")
        if not word.startswith("--") or name in known:
            continue
        for group in _SYNONYMS:
            ours = [other for other in group if other in known]
            if name in group and ours:
                lines.append(f"Hint: did you mean --{ours[0]}? It is what --{name} is called here.")
    return lines


def _flags_of(kind: Any) -> Iterator[str]:
    for entry in fields(kind):
        inner = entry.type if is_dataclass(entry.type) else entry.default
        if is_dataclass(inner):
            yield from _flags_of(inner)
        else:
            yield entry.name.replace("_", "-")


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before ``--`` and those after it; UsageError where nothing follows it."""
    words = list(argv)
    if "--" not in words:
        return words, []
    cut = words.index("--")
    if cut + 1 == len(words):
        raise UsageError("There is no command after `--`.", hint="write: -- python train.py …")
    return words[:cut], words[cut + 1 :]


def bundle(name: str, groups: dict[str, Any], positional: dict[str, Any] | None = None) -> type:
    """A class with one field per group of flags, so that commands share groups of flags.

    A group is a class with defaults, or a (frozen) value whose fields are the defaults.
    """
    fields: list[Any] = [(key, kind) for key, kind in (positional or {}).items()]
    for key, kind in groups.items():
        if isinstance(kind, type):
            fields.append((key, kind, field(default_factory=kind)))
        else:
            fields.append((key, type(kind), field(default=kind)))
    return make_dataclass(name, fields, frozen=True)
