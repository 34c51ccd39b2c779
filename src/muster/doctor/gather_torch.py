"""torch as it is installed, read from its files without importing it, and as it answers."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from muster.base.codec import decode
from muster.doctor.child import run_probe
from muster.doctor.facts import Run, TorchFacts

#: Names in torch/version.py, and ours.
_NAMES = {
    "__version__": "version",
    "cuda": "cuda_build",
    "hip": "hip_build",
    "xpu": "xpu_build",
}


def installed_torch() -> TorchFacts:
    """Version and builds from ``torch/version.py``; everything None where torch is missing."""
    try:
        found = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin is None:
        return TorchFacts(run=Run(error="torch is not installed"))
    return read_version_file(Path(found.origin).parent / "version.py")


def read_version_file(file: Path) -> TorchFacts:
    """The constants that torch's build wrote into ``file``."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        return TorchFacts(run=Run(error=f"torch's own version file cannot be read: {error}"))
    values: dict[str, Any] = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if (
            isinstance(target, ast.Name)
            and target.id in _NAMES
            and isinstance(value, ast.Constant)
            and isinstance(value.value, str)
        ):
            values[_NAMES[target.id]] = value.value
    return TorchFacts(run=Run(error="not started"), **values)


def running_torch(installed: TorchFacts, *, limit_s: float) -> TorchFacts:
    """``installed`` with what torch answers in a child process; never raises or hangs."""
    outcome = run_probe("torch_facts", [], limit_s=limit_s)
    record = {key: value for key, value in outcome.value.items() if value is not None}
    answered = decode(TorchFacts, record, ignore_unknown=True)
    given = {f.name: getattr(answered, f.name) for f in fields(answered) if f.name in record}
    return replace(installed, run=outcome.run, **given)
