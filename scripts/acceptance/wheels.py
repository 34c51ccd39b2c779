"""Packages for a machine that has torch and no network: packed on one machine, used on another.

``pack`` makes a wheel of every installed package that Muster and its GPU tests need and that is
pure Python, from its installed files. Of a compiled one it has the registry's file for the Python
of the other machine fetched by pip. ``use`` unpacks those that a machine lacks beside each other
and puts them last on the path, so what is installed there comes first.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

#: What a machine for deep learning is taken to have.
_THERE = {"torch", "numpy", "triton", "pyarrow", "matplotlib", "transformers"}
_WANTED = (
    "muster-gpu", "pytest", "pytest-timeout", "hypothesis", "pexpect", "gymnasium",
    "accelerate", "lightning",
)  # fmt: skip
_PYTHON = "3.12"
_ROOT = Path(__file__).parents[2]


def pack(folder: Path) -> int:
    """Fill ``folder``; says what could not be packed."""
    folder.mkdir(parents=True, exist_ok=True)
    compiled = []
    for found in _needed():
        name, text = found.metadata["Name"], found.read_text("WHEEL") or ""
        if name.lower() == "muster-gpu":
            continue
        if "Root-Is-Purelib: true" in text and re.search(r"Tag: py3\d*-none-any", text):
            print(f"packed  {_write_wheel(found, folder).name}")
        else:
            compiled.append(f"{name}=={found.version}")
    failed = [each for each in compiled if not _fetch(each, folder)]
    for each in failed:
        print(f"missing {each}: compiled, and pip has no file of it for Python {_PYTHON}")
    return int(bool(failed))


def use(folder: Path) -> None:
    """Put what this machine lacks of ``folder`` on the path of this process and its children."""
    source = [str(_ROOT / part) for part in ("src", "scripts", ".")]
    extra: list[str] = []
    if folder.is_dir():
        place = Path(tempfile.gettempdir()) / f"muster-wheels-{os.getuid()}"
        for wheel in sorted(folder.glob("*.whl")):
            name = wheel.name.split("-")[0].replace("_", "-")
            if not _is_installed(name):
                _unpack(wheel, place)
                extra = [str(place)]
    sys.path[:0] = source
    sys.path += extra
    importlib.invalidate_caches()
    kept = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    new = [part for part in [*source, *extra] if part not in kept]
    # A child looks into PYTHONPATH before what is installed; only what is missing is in `extra`.
    os.environ["PYTHONPATH"] = os.pathsep.join([*new, *kept])


def _needed() -> list[Distribution]:
    """The wanted packages and, over all steps, what they need here."""
    waiting, seen = list(_WANTED), dict[str, Distribution | None]()
    while waiting:
        name = _plain(waiting.pop())
        if name in seen or name in _THERE or name.startswith("nvidia-c"):
            continue
        try:
            seen[name] = found = distribution(name)
        except PackageNotFoundError:
            print(f"missing {name}: it is not installed here")
            seen[name] = None
            continue
        # What only an extra or another system asks for is left out.
        needs = [need for need in found.requires or () if "extra ==" not in need]
        waiting += [re.split(r"[\s<>=!~;(\[]", need, maxsplit=1)[0] for need in needs
                    if "sys_platform" not in need and "python_version" not in need]  # fmt: skip
    return [found for _, found in sorted(seen.items()) if found is not None]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _write_wheel(found: Distribution, folder: Path) -> Path:
    name = re.sub(r"[-_.]+", "_", found.metadata["Name"])
    path = folder / f"{name}-{found.version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file in found.files or ():
            source = Path(str(found.locate_file(file)))
            is_inside = not str(file).startswith("..") and "__pycache__" not in file.parts
            if is_inside and source.is_file():
                wheel.write(source, str(file))
    return path


def _fetch(requirement: str, folder: Path) -> bool:
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
        "--python-version", _PYTHON, "--platform", "manylinux2014_x86_64",
        "--platform", "manylinux_2_17_x86_64", "--platform", "manylinux_2_28_x86_64",
        "--dest", str(folder), requirement,
    ]  # fmt: skip
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    print(f"fetched {requirement}" if done.returncode == 0 else done.stderr.strip()[-300:])
    return done.returncode == 0


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _unpack(wheel: Path, place: Path) -> None:
    done = place / f".{wheel.name}"
    if done.exists():
        return
    place.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(place)
    done.touch()
