"""Which function a run computes: naming it, finding its source, and importing it.

``path/to/file.py:function`` or ``package.module:function``. Workers import the target by name,
so it must be reachable by name; the coordinator reads its source and never imports it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from muster.base import cells, target_files
from muster.base.errors import TargetError, how_to_install, nearest
from muster.base.modules import (
    CLASS,
    FUNCTION,
    Finder,
    Found,
    environment_with,
    is_installed,
    is_plain_file,
    names_at_top,
    names_in,
    read_source,
)  # fmt: skip
from muster.base.settings import variable
from muster.base.target_files import PRIVATE_PREFIX, load_file

#: Whether nothing of the user's is to run, as somebody has only pressed Tab.
ONLY_READS: ContextVar[bool] = ContextVar("only_reads", default=False)
_FORMS = "write path/to/file.py:FUNCTION or package.module:FUNCTION."


@dataclass(frozen=True)
class TargetRef:
    """A function by name.

    ``location`` is a dotted module, or a file: relative to the folder where the run was started
    (with ``/``) when it lies below it, else absolute.
    """

    kind: Literal["file", "module"]
    location: str
    attribute: str

    @property
    def name(self) -> str:
        """The name in the identity of tasks: the same wherever the project's folder lies.

        A file outside the starting folder is named by its last part alone.
        """
        if self.kind == "file" and os.path.isabs(self.location):
            return f"{Path(self.location).name}:{self.attribute}"
        return f"{self.location}:{self.attribute}"

    def __str__(self) -> str:
        return f"{self.location}:{self.attribute}"


def parse_target(text: str, base_folder: Path | None = None, *, kind: str = FUNCTION) -> TargetRef:
    """The target that ``text`` names; files are looked up from ``base_folder`` (default: cwd).

    A file must exist; a module is looked up when it is read or loaded. ``kind``: what messages
    call it and propose, ``"function"`` or ``"class"``.
    """
    base = Path.cwd() if base_folder is None else base_folder
    location, colon, attribute = text.rpartition(":")
    if not colon or attribute.endswith(".py") or "/" in attribute or "\\" in attribute:
        raise _no_name(text, base, kind)
    if not attribute or not all(part.isidentifier() for part in attribute.split(".")):
        raise TargetError(
            f"Cannot read the target {text!r}: {attribute!r} is not a {kind} name.", hint=_FORMS
        )
    if location.endswith(".py") or "/" in location or os.sep in location:
        return TargetRef("file", _file_location(location, base), attribute)
    if not location or not all(part.isidentifier() for part in location.split(".")):
        raise TargetError(
            f"Cannot read the target {text!r}: {location!r} is neither a .py file nor a module.",
            hint=_FORMS,
        )
    return TargetRef("module", location, attribute)


def ref_of(function: Callable[..., Any], base_folder: Path | None = None) -> TargetRef:
    """The name by which workers can import ``function``; TargetError when there is none."""
    base = Path.cwd() if base_folder is None else base_folder
    module_name, qualname = _names_of(function)
    module = sys.modules.get(module_name)
    found: object = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if found is not function:
        raise TargetError(
            f"Cannot use {qualname}: {module_name}.{qualname} is not this function but "
            f"{'missing' if found is None else 'another object'}, and workers import by name.",
            hint="give it a name of its own at the top level of its file.",
        )
    file = getattr(module, "__file__", None)
    spec = getattr(module, "__spec__", None)
    if module_name == "__main__" and spec is not None:
        return TargetRef("module", spec.name, qualname)
    if module_name == "__main__" and (file is None or _typed_by_hand(function)):
        return TargetRef("file", cells.stage(qualname.partition(".")[0]), qualname)
    if file is not None and (
        module_name == "__main__"
        or module_name.startswith(PRIVATE_PREFIX)
        or ("." not in module_name and is_plain_file(file))
    ):
        return TargetRef("file", _file_location(file, base), qualname)
    return TargetRef("module", module_name, qualname)


def find_source(ref: TargetRef, base_folder: Path | None = None) -> Path | None:
    """The source file of ``ref``, found without importing anything, not even parent packages.

    None for a module that is not written in Python. TargetError when there is no such module.
    """
    base = Path.cwd() if base_folder is None else base_folder
    if ref.kind == "file":
        return base / ref.location
    finder, name, found = Finder([str(base)]), "", Found()
    folders: Sequence[str] = finder.folders
    for part in ref.location.split("."):
        name = f"{name}.{part}" if name else part
        below = finder.find(name)
        if below is None:
            raise _no_module(ref, part, folders)
        found, folders = below, below.folders or ()
    return found.path if found.path is not None and found.path.suffix == ".py" else None


class ReentryError(TargetError):
    """A file that starts a run when it is imported."""


#: The targets that this process is importing now.
_importing: list[TargetRef] = []


def refuse_while_imported(call: str) -> None:
    """ReentryError where ``call`` is made by a file that is being imported, by a worker for its
    target or by multiprocessing for the main program: every worker would start another run.
    """
    file = _importing[-1].location if _importing else _file_of_child()
    if file is not None:
        raise ReentryError(
            f"{file} calls {call} when it is imported, and workers import it to reach what they "
            "run: each of them would start another run.",
            hint='put the call under `if __name__ == "__main__":`.',
        )


def _file_of_child() -> str | None:
    """The program's or a target's file, where a child of multiprocessing is importing it."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if frame.f_code.co_name == "<module>" and name.startswith(("__mp_main__", PRIVATE_PREFIX)):
            return frame.f_code.co_filename
        frame = frame.f_back
    return None


def check_may_run(ref: TargetRef) -> None:
    """TargetError where nothing of the user's may be imported."""
    if ONLY_READS.get():
        raise TargetError(f"{ref} is not imported to complete a command.")


def load_target(text: str) -> Callable[..., Any]:
    """The function that ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION`` names; raises TargetError."""
    return load(parse_target(text))


def load(
    ref: TargetRef, base_folder: Path | None = None, *, kind: str = FUNCTION
) -> Callable[..., Any]:
    """The function or class that the target names; TargetError when it cannot be called."""
    module, found = _find(ref, base_folder, kind)
    if not callable(found):
        raise TargetError(
            f"The target {ref} is not a {kind} but a value of type {type(found).__name__}.",
            hint=_known(names_in(module, kind), kind),
        )
    result: Callable[..., Any] = found
    return result


def load_value(ref: TargetRef, base_folder: Path | None = None, *, kind: str = FUNCTION) -> Any:
    """Whatever the target names, such as a list of functions; ``kind`` is what is looked for."""
    return _find(ref, base_folder, kind)[1]


def _find(ref: TargetRef, base_folder: Path | None, kind: str) -> tuple[types.ModuleType, Any]:
    """Import the target, as ``python file.py`` or ``python -m module`` would find its imports.

    A file is imported once per content, as `target_files` says. Its folder (for a module:
    ``base_folder``) is put first on ``sys.path``.
    """
    check_may_run(ref)
    base = Path.cwd() if base_folder is None else base_folder
    _importing.append(ref)
    try:
        module = _load_file(ref, base) if ref.kind == "file" else _load_module(ref, base)
    finally:
        _importing.pop()
    found: Any = module
    for part in ref.attribute.split("."):
        if not hasattr(found, part):
            raise _no_attribute(ref, part, found, kind)
        found = getattr(found, part)
    return module, found


def _load_file(ref: TargetRef, base: Path) -> types.ModuleType:
    path = Path(os.path.abspath(base / ref.location))
    source = read_source(path)
    for folder in [str(base)] * cells.is_snapshot(str(path)) + [str(path.parent)]:
        _put_first(folder)
    try:
        return load_file(str(path), source)
    except (KeyboardInterrupt, ReentryError):
        raise
    except BaseException as error:
        raise _import_failed(ref, error, f"python {ref.location}") from error


def _load_module(ref: TargetRef, base: Path) -> types.ModuleType:
    _put_first(str(base))
    importlib.invalidate_caches()
    try:
        return importlib.import_module(ref.location)
    except ModuleNotFoundError as error:
        # The parents were found or are the missing ones; anything else is missing inside.
        if error.name and (ref.location + ".").startswith(error.name + "."):
            find_source(ref, base)
        raise _import_failed(ref, error, f'python -c "import {ref.location}"') from error
    except (KeyboardInterrupt, ReentryError):
        raise
    except BaseException as error:
        raise _import_failed(ref, error, f'python -c "import {ref.location}"') from error


def see_working_folder() -> None:
    """Let targets import from the working folder, as ``python -m`` would, in a process that was
    begun with ``-P``: what is Muster's own has been imported by then, and no ``types.py`` or
    ``muster`` of the user's has come before it.
    """
    if not variable("PYTHONSAFEPATH"):
        sys.path.insert(0, str(Path.cwd()))


def _put_first(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _file_location(location: str, base: Path) -> str:
    path = Path(os.path.abspath(base / location))
    if not path.is_file():
        raise _no_file(location, path)
    if cells.is_snapshot(str(path)):
        return path.as_posix()
    # Twice, because either side may be reached through a symbolic link.
    for file, folder in ((path, Path(os.path.abspath(base))), (path.resolve(), base.resolve())):
        if file.is_relative_to(folder):
            return file.relative_to(folder).as_posix()
    return path.as_posix()


def _names_of(function: Callable[..., Any]) -> tuple[str, str]:
    """(module, qualified name) of a function that workers can import."""
    why = "workers import the function by name"
    if isinstance(function, functools.partial):
        raise TargetError(
            f"Cannot use a functools.partial: {why}, and a partial has none.",
            hint="give the fixed arguments as parameters: grid={'name': [value]}.",
        )
    if not callable(function):
        raise TargetError(
            f"The target is a value of type {type(function).__name__}, not a function.",
            hint="pass the function itself, without calling it.",
        )
    qualname = getattr(function, "__qualname__", None)
    module = getattr(function, "__module__", None)
    owner = getattr(function, "__self__", None)
    if not isinstance(qualname, str) or not isinstance(module, str) or inspect.ismethod(function):
        what = "a method of" if owner is not None else "an"
        kind = type(function if owner is None else owner).__name__
        raise TargetError(
            f"Cannot use {what} object of type {kind}: {why}, and objects are not sent.",
            hint="write a function at the top level of a file that makes the object and calls it.",
        )
    if "<lambda>" in qualname:
        raise TargetError(
            f"Cannot use a lambda: {why}, and a lambda has none.",
            hint="write it as def, at the top level of a file or in a cell.",
        )
    if "<locals>" in qualname:
        outer, _, inner = qualname.rpartition(".<locals>.")
        raise TargetError(
            f"Cannot use {inner}: it is defined inside {outer}, and {why}.",
            hint="move it to the top level of its file and pass what it needs as parameters.",
        )
    return module, qualname


def _typed_by_hand(function: Callable[..., Any]) -> bool:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and code.co_filename.startswith("<")


def _near(name: str, known: Iterable[str]) -> str:
    close = nearest(name, known)
    return f"did you mean {close!r}? " if close else ""


def _known(names: Iterable[str], kind: str) -> str:
    listing, many = ", ".join(sorted(names)), "classes" if kind == CLASS else f"{kind}s"
    return f"{many} there: {listing}." if listing else f"there are no {many} in it."


def _no_attribute(ref: TargetRef, part: str, owner: object, kind: str) -> TargetError:
    names = names_in(owner, kind) if hasattr(owner, "__dict__") else []
    hint = f"{_near(part, names)}{_known(names, kind)}"
    return TargetError(f"{ref.location} has no {kind} {part!r}.", hint=hint)


def _no_file(location: str, path: Path) -> TargetError:
    if path.is_dir():
        return TargetError(f"The target {location} is a folder, not a .py file.", hint=_FORMS)
    if not path.parent.is_dir():
        return TargetError(
            f"There is no folder {path.parent}, so no target {location}.",
            hint="check the path; it starts in the current folder.",
        )
    names = sorted(entry.name for entry in path.parent.glob("*.py"))
    listing = ", ".join(names[:10]) or "none"
    near = _near(path.name, names)
    return TargetError(
        f"There is no file {location}.", hint=f"{near}Python files in that folder: {listing}."
    )


def _no_name(text: str, base: Path, kind: str) -> TargetError:
    message = f"The target {text!r} names no {kind}."
    path = base / text
    if not text.endswith(".py") or not path.is_file():
        return TargetError(message, hint=_FORMS.replace("FUNCTION", kind.upper()))
    try:
        names = names_at_top(read_source(path), kind)
    except (SyntaxError, ValueError):
        names = []
    example = f"{text}:{names[0]}" if names else f"{text}:{kind.upper()}"
    return TargetError(message, hint=f"write {example}; {_known(names, kind)}")


def _no_module(ref: TargetRef, part: str, folders: Sequence[str]) -> TargetError:
    names = {
        entry.stem
        for folder in folders[:2]
        if Path(folder or ".").is_dir()
        for entry in Path(folder or ".").iterdir()
        if entry.suffix == ".py" or (entry.is_dir() and entry.name.isidentifier())
    }
    where = f" ({part!r} is missing)" if part != ref.location else ""
    return TargetError(
        f"There is no module {ref.location}{where}.",
        hint=f"{_near(part, names)}modules are looked up in the current folder and in the "
        "installed packages; a file is written with its path: path/to/file.py:FUNCTION.",
    )


def _import_failed(ref: TargetRef, error: BaseException, command: str) -> TargetError:
    import traceback  # here: few targets cannot be imported

    last = traceback.format_exception_only(error)[-1].strip()
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        where = f" ({error.filename}, line {error.lineno})"
    if isinstance(error, SystemExit):
        hint = (
            "the file runs its program when imported; put that part under "
            'if __name__ == "__main__":.'
        )
    elif isinstance(error, ImportError) and "relative import" in str(error):
        hint = "a file inside a package is given as package.module:FUNCTION."
    elif isinstance(error, ModuleNotFoundError) and error.name == "torch":
        there = environment_with("torch") or "PATH"
        hint = f"{how_to_install('torch')}, or name the Python that has torch: --python {there}."
    else:
        hint = f"{command} shows the whole traceback."
    return TargetError(f"Importing {ref.location} failed: {last}{where}.", hint=hint)


def _is_users(filename: str) -> bool:
    return (
        not filename.startswith("<")
        and filename not in (__file__, target_files.__file__)
        and not is_installed(Path(os.path.abspath(filename)))
    )
