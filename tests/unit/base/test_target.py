from __future__ import annotations

import functools
import importlib
import os
import pickle
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from muster.base import errors
from muster.base.code import code_of
from muster.base.errors import TargetError
from muster.base.modules import read_source
from muster.base.target import (
    TargetRef,
    find_source,
    load,
    parse_target,
    ref_of,
)
from muster.farm.look import inspect_file, inspect_source, static_signature
from muster.farm.parameters import signature_of

#: Subprocesses start in other folders, where a relative PYTHONPATH would not find the package.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(errors.__file__).parents[2])}


@pytest.fixture(autouse=True)
def clean_imports() -> Iterator[None]:
    path, modules = sys.path.copy(), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(folder: Path, name: str, source: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))
    return path


def error_of(action: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(TargetError) as caught:
        action(*arguments)
    return str(caught.value)


def test_file_targets_are_named_from_the_starting_folder(tmp_path: Path) -> None:
    write(tmp_path, "exp/train.py", "def run(): ...")
    expected = TargetRef("file", "exp/train.py", "run")
    for text in ("exp/train.py:run", "./exp/../exp/train.py:run", f"{tmp_path}/exp/train.py:run"):
        assert parse_target(text, tmp_path) == expected
    assert expected.name == str(expected) == "exp/train.py:run"


def test_a_link_to_the_starting_folder_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, "real/train.py", "def run(): ...")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    for folder in (link, tmp_path / "real"):
        assert parse_target(f"{link}/train.py:run", folder).name == "train.py:run"


def test_a_file_elsewhere_has_a_name_without_its_place(tmp_path: Path) -> None:
    names = set()
    for place in ("a", "b"):
        path = write(tmp_path, f"{place}/train.py", "def run(): ...")
        base = tmp_path / "here"
        base.mkdir(exist_ok=True)
        ref = parse_target(f"../{place}/train.py:run", base)
        assert ref.location == path.as_posix()
        names.add(ref.name)
    assert names == {"train.py:run"}


def test_module_targets() -> None:
    ref = parse_target("package.module:Class.method")
    assert ref == TargetRef("module", "package.module", "Class.method")
    assert ref.name == "package.module:Class.method"


FORMS = "Hint: write path/to/file.py:FUNCTION or package.module:FUNCTION."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train", f"The target 'train' names no function.\n{FORMS}"),
        (
            "train.py",
            "The target 'train.py' names no function.\n"
            "Hint: write train.py:train; functions there: evaluate, train.",
        ),
        (
            "trian.py:train",
            "There is no file trian.py.\n"
            "Hint: did you mean 'train.py'? Python files in that folder: other.py, train.py.",
        ),
        ("exp:", f"Cannot read the target 'exp:': '' is not a function name.\n{FORMS}"),
        (
            "train.py:1x",
            f"Cannot read the target 'train.py:1x': '1x' is not a function name.\n{FORMS}",
        ),
        (
            "a b:f",
            f"Cannot read the target 'a b:f': 'a b' is neither a .py file nor a module.\n{FORMS}",
        ),
        ("./folder:f", f"The target ./folder is a folder, not a .py file.\n{FORMS}"),
    ],
)
def test_targets_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path, "train.py", "def train(): ...\ndef evaluate(): ...\ndef _private(): ...")
    write(tmp_path, "other.py", "")
    (tmp_path / "folder").mkdir()
    assert error_of(parse_target, text, tmp_path) == message


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="permissions of POSIX")
def test_a_file_in_a_folder_that_may_not_be_entered_cannot_be_read(tmp_path: Path) -> None:
    """Nor may it be looked at whether it is a zip file."""
    closed = tmp_path / "closed"
    (closed / "in").mkdir(parents=True)
    closed.chmod(0)
    own = os.geteuid()
    if own == 0:  # whom no mode keeps out
        os.seteuid(65534)
    try:
        with pytest.raises(TargetError, match="Cannot read"):
            read_source(closed / "in" / "f.py")
    finally:
        os.seteuid(own)
        closed.chmod(0o700)


@pytest.mark.parametrize("harm", ["a password", "other bytes"])
def test_a_zip_file_that_cannot_be_read_is_named(tmp_path: Path, harm: str) -> None:
    place = tmp_path / "lib.zip"
    with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m.py", "x = 1\n" * 500)
    data = bytearray(place.read_bytes())
    assert read_source(place / "m.py") == b"x = 1\n" * 500
    if harm == "a password":
        data[6] |= 1  # the flag of the entry, and that of the directory
        data[data.index(b"PK\1\2") + 8] |= 1
    else:
        data[40:43] = (byte ^ 0xFF for byte in data[40:43])  # which nothing can be unpacked from
    place.write_bytes(data)
    with pytest.raises(TargetError, match=r"Cannot read .*lib\.zip"):
        read_source(place / "m.py")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert error_of(parse_target, "no/train.py:f", tmp_path) == (
        f"There is no folder {tmp_path}/no, so no target no/train.py.\n"
        "Hint: check the path; it starts in the current folder."
    )


def test_a_file_is_loaded_as_a_library(tmp_path: Path) -> None:
    write(tmp_path, "exp/helper.py", "FACTOR = 3")
    write(
        tmp_path,
        "exp/train.py",
        """
        from __future__ import annotations
        from dataclasses import dataclass
        import helper

        @dataclass
        class Metrics:
            loss: float

        def run(x: int) -> Metrics:
            return Metrics(x * helper.FACTOR)

        if __name__ == "__main__":
            raise SystemExit("must not run")
        """,
    )
    ref = parse_target("exp/train.py:run", tmp_path)
    run = load(ref, tmp_path)
    result = run(2)
    assert result.loss == 6
    assert pickle.loads(pickle.dumps(result)) == result
    assert load(ref, tmp_path) is run
    assert ref_of(run, tmp_path) == ref


def test_an_edited_file_is_loaded_anew(tmp_path: Path) -> None:
    write(tmp_path, "t.py", "def f(): return 1")
    ref = parse_target("t.py:f", tmp_path)
    first = load(ref, tmp_path)
    write(tmp_path, "t.py", "def f(): return 2")
    assert (first(), load(ref, tmp_path)()) == (1, 2)


def test_a_module_is_loaded_from_the_starting_folder(tmp_path: Path) -> None:
    write(tmp_path, "mypkg_a/__init__.py", "")
    write(tmp_path, "mypkg_a/mod.py", "class C:\n    @staticmethod\n    def f(): return 5")
    ref = parse_target("mypkg_a.mod:C.f")
    function = load(ref, tmp_path)
    assert function() == 5
    assert ref_of(function, tmp_path) == ref


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "def train(): ...\ndef evaluate(): ...",
            "t.py has no function 'trian'.\n"
            "Hint: did you mean 'train'? functions there: evaluate, train.",
        ),
        ("", "t.py has no function 'trian'.\nHint: there are no functions in it."),
        (
            "trian = 3\ndef f(): ...",
            "The target t.py:trian is not a function but a value of type int.\n"
            "Hint: functions there: f.",
        ),
        (
            "def g():\n    raise ValueError('bad\\nthing')\ng()",
            "Importing t.py failed: ValueError: bad\nthing ({path}, line 2).\n"
            "Hint: python t.py shows the whole traceback.",
        ),
        (
            "x = 1\ndef f(:\n",
            "Importing t.py failed: SyntaxError: invalid syntax ({path}, line 2).\n"
            "Hint: python t.py shows the whole traceback.",
        ),
        (
            "import sys\nsys.exit(2)",
            "Importing t.py failed: SystemExit: 2 ({path}, line 2).\n"
            "Hint: the file runs its program when imported; put that part under "
            'if __name__ == "__main__":.',
        ),
        (
            "from .other import x",
            "Importing t.py failed: ImportError: attempted relative import with no known parent "
            "package ({path}, line 1).\n"
            "Hint: a file inside a package is given as package.module:FUNCTION.",
        ),
    ],
)
def test_files_that_cannot_be_loaded(tmp_path: Path, source: str, message: str) -> None:
    path = write(tmp_path, "t.py", source)
    ref = parse_target("t.py:trian", tmp_path)
    before = set(sys.modules)
    assert error_of(load, ref, tmp_path) == message.format(path=path)
    if "Importing" in message:
        assert not {name for name in set(sys.modules) - before if name.startswith("_muster")}


def test_modules_that_cannot_be_loaded(tmp_path: Path) -> None:
    write(tmp_path, "mypkg_b/__init__.py", "")
    write(tmp_path, "mypkg_b/broken.py", "import not_there_at_all")
    message = error_of(load, parse_target("mypkg_b.brokn:f"), tmp_path)
    assert message.startswith(
        "There is no module mypkg_b.brokn ('brokn' is missing).\nHint: did you mean 'broken'? "
    )
    message = error_of(load, parse_target("mypkg_b.broken:f"), tmp_path)
    assert message == (
        "Importing mypkg_b.broken failed: ModuleNotFoundError: No module named "
        f"'not_there_at_all' ({tmp_path}/mypkg_b/broken.py, line 1).\n"
        'Hint: python -c "import mypkg_b.broken" shows the whole traceback.'
    )


def test_sources_are_found_without_importing_parents(tmp_path: Path) -> None:
    path = write(tmp_path, "mypkg_c/space/mod.py", "def f(x: int): ...")
    write(tmp_path, "mypkg_c/__init__.py", "raise RuntimeError('imported')")
    ref = parse_target("mypkg_c.space.mod:f")
    assert find_source(ref, tmp_path) == path
    signature = static_signature(ref, tmp_path)
    assert signature is not None and signature.names == ("x",)
    assert "mypkg_c" not in sys.modules
    assert list(code_of([ref], tmp_path)) == ["mypkg_c/__init__.py", "mypkg_c/space/mod.py"]


def test_a_module_without_python_source_has_no_hash() -> None:
    ref = parse_target("math:sqrt")
    assert find_source(ref) is None
    assert code_of([ref]) == {}
    assert static_signature(ref) is None


def test_the_static_look_imports_nothing(tmp_path: Path) -> None:
    write(
        tmp_path,
        "t.py",
        """
        import torch
        import numpy
        from muster import batched

        print("imported")

        def f(lr: float, seed: int = 0): ...
        """,
    )
    program = """
        import sys
        from muster.base.code import code_of
        from muster.base.target import parse_target
        from muster.farm.look import static_signature
        ref = parse_target("t.py:f")
        assert static_signature(ref).names == ("lr", "seed")
        code_of([ref])
        print([name for name in ("torch", "numpy") if name in sys.modules])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


HEADER = """
from __future__ import annotations
import collections.abc as abc
import pathlib
import typing
import typing as t
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union
from collections.abc import Sequence
from muster.farm.batched import batched
import muster.farm.batched as mb
"""


@pytest.mark.parametrize(
    "source",
    [
        "def f(): ...",
        "def f(a, b=1, *, c, d=2): ...",
        "def f(a: int, b: float, c: str, d: bool, e: Path, g: pathlib.Path): ...",
        "def f(a: int | None, b: Optional[str], c: Union[int, float, None], d: None | int): ...",
        "def f(a: Literal['x', 1, None, True], b: typing.Literal[-1]): ...",
        "def f(a: list[int], b: tuple[int, str], c: tuple[float, ...], d: t.List[Path]): ...",
        "def f(a: list, b: tuple, c: dict, d: dict[str, int], e: Sequence[int]): ...",
        "def f(a: typing.List, b: t.Tuple, c: t.Dict, d: Sequence, e: abc.Mapping): ...",
        "def f(a: Any, b: object, c: 'int | None', d: Annotated[int, 3]): ...",
        "def f(a: int | (str | None), b: int | int): ...",
        "def f(lr: float, ctx: Unknown, **rest: int): ...",
        "def f(lr, ctx=None, **rest): ...",
        "@batched()\ndef f(tasks): ...",
        "@batched(static=('a', 'b'), max_batch=7)\ndef f(tasks: list[Unknown], ctx): ...",
        "@batched(max_batch=7, max_batch_on_cpu=3)\ndef f(tasks): ...",
        "@mb.batched(static=['a'], params={'a': int, 'b': Path | None})\ndef f(tasks): ...",
        "def other():\n    f = 1\n    return f\ndef f(x: int): ...",
    ],
)
def test_the_static_look_agrees_with_an_import(tmp_path: Path, source: str) -> None:
    path = write(tmp_path, "t.py", HEADER + source)
    signature = inspect_file(path, "f")
    assert signature is not None
    assert signature == signature_of(load(parse_target("t.py:f", tmp_path), tmp_path))


@pytest.mark.parametrize(
    "source",
    [
        "",
        "from other import f",
        "f = print",
        "class f: ...",
        "async def f(): ...",
        "def f(): ...\ndef f(x): ...",
        "def f(): ...\nf = wrap(f)",
        "if True:\n    def f(): ...",
        "def f(): ...\ndel f",
        "@wrap\ndef f(): ...",
        "@wrap()\ndef f(): ...",
        "@batched(**options)\ndef f(tasks): ...",
        "@batched(static=NAMES)\ndef f(tasks): ...",
        "@batched(params=Setting)\ndef f(tasks): ...",
        "@wrap\n@batched()\ndef f(tasks): ...",
        "def f(x: Config): ...",
        "def f(x: list[Config]): ...",
        "def f(x: 'not valid['): ...",
        "Path = str\ndef f(x: Path): ...",
        "class int: ...\ndef f(x: int): ...",
        "def f(x: Literal[Color.RED]): ...",
        "def batched(): ...\n@batched()\ndef f(tasks): ...",
    ],
)
def test_the_static_look_says_when_it_cannot_tell(source: str) -> None:
    assert inspect_source(HEADER + source, "f") is None


def test_the_static_look_refuses_what_tasks_cannot_call() -> None:
    message = "f takes *args, which can only be passed by position"
    with pytest.raises(TargetError, match=message.replace("*", r"\*")):
        inspect_source("def f(*args): ...", "f")


def test_the_static_look_names_the_line_of_a_syntax_error(tmp_path: Path) -> None:
    path = write(tmp_path, "t.py", "x = 1\ndef f(:\n")
    assert error_of(inspect_file, path, "f") == (
        f"Cannot read {path}: invalid syntax in line 2.\nHint: correct that line."
    )


def outer() -> Callable[..., Any]:
    def inner() -> None: ...

    return inner


class Model:
    def fit(self) -> None: ...

    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda: None,
            "Cannot use a lambda: workers import the function by name, and a lambda has none.\n"
            "Hint: write it as def, at the top level of a file or in a cell.",
        ),
        (
            outer(),
            "Cannot use inner: it is defined inside outer, and workers import the function by "
            "name.\nHint: move it to the top level of its file and pass what it needs as "
            "parameters.",
        ),
        (
            functools.partial(print, 1),
            "Cannot use a functools.partial: workers import the function by name, and a partial "
            "has none.\nHint: give the fixed arguments as parameters: grid={'name': [value]}.",
        ),
        (
            3,
            "The target is a value of type int, not a function.\n"
            "Hint: pass the function itself, without calling it.",
        ),
        (
            Model(),
            "Cannot use an object of type Model: workers import the function by name, and "
            "objects are not sent.\nHint: write a function at the top level of a file that makes "
            "the object and calls it.",
        ),
        (
            Model().fit,
            "Cannot use a method of object of type Model: workers import the function by name, "
            "and objects are not sent.\nHint: write a function at the top level of a file that "
            "makes the object and calls it.",
        ),
    ],
)
def test_functions_that_workers_cannot_import(function: Any, message: str) -> None:
    assert error_of(ref_of, function) == message


def test_a_function_whose_name_means_another_object(tmp_path: Path) -> None:
    write(tmp_path, "mymod_d.py", "def f(): ...\ng = f\ndef f(): ...")
    sys.path.insert(0, str(tmp_path))
    module = importlib.import_module("mymod_d")
    assert ref_of(module.f, tmp_path) == TargetRef("file", "mymod_d.py", "f")
    assert error_of(ref_of, module.g, tmp_path) == (
        "Cannot use f: mymod_d.f is not this function but another object, and workers import by "
        "name.\nHint: give it a name of its own at the top level of its file."
    )


def test_functions_of_installed_packages_are_modules() -> None:
    assert ref_of(textwrap.dedent) == TargetRef("module", "textwrap", "dedent")


SCRIPT = """
from muster.base.target import ref_of
def f(): ...
if __name__ == "__main__":
    print(ref_of(f))
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pkg_e/script.py"], "pkg_e/script.py:f"),
        (["-m", "pkg_e.script"], "pkg_e.script:f"),
        (["-c", SCRIPT], "Cannot use f of this session: it has no source here"),
    ],
)
def test_functions_of_the_main_program(tmp_path: Path, arguments: list[str], said: str) -> None:
    write(tmp_path, "pkg_e/script.py", SCRIPT)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said in done.stdout + done.stderr
