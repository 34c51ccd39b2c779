"""What a run's code is made of: a table over the forms of importing, and what counts as changed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from muster.base.code import changed_files, code_id, code_of, code_of_command
from muster.base.errors import TargetError
from muster.base.target import TargetRef, parse_target


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


#: What it shows, target, files, and those of them that are the code.
FORMS = [
    ("the target alone", "t.py:f", {"t.py": "", "other.py": ""}, "t.py"),
    ("a helper beside it", "t.py:f", {"t.py": "import helper", "helper.py": ""}, "helper.py t.py"),
    (
        "through another file",
        "t.py:f",
        {"t.py": "import a", "a.py": "import b", "b.py": "import c", "c.py": "", "d.py": ""},
        "a.py b.py c.py t.py",
    ),
    (
        "a dotted module runs its packages",
        "t.py:f",
        {"t.py": "import p.q.m as n", "p/__init__.py": "", "p/q/__init__.py": "", "p/q/m.py": "",
         "p/q/z.py": ""},
        "p/__init__.py p/q/__init__.py p/q/m.py t.py",
    ),
    (
        "names that are modules, and names that are not",
        "t.py:f",
        {"t.py": "from p import m, value", "p/__init__.py": "value = 1", "p/m.py": "",
         "p/z.py": ""},
        "p/__init__.py p/m.py t.py",
    ),
    (
        "from . import",
        "p.t:f",
        {"p/__init__.py": "", "p/t.py": "from . import a\nfrom .b import x", "p/a.py": "",
         "p/b.py": "", "p/z.py": ""},
        "p/__init__.py p/a.py p/b.py p/t.py",
    ),
    (
        "from .. import, out of a sub-package",
        "p.q.t:f",
        {"p/__init__.py": "", "p/a.py": "", "p/q/__init__.py": "from ..r import k",
         "p/q/t.py": "from .. import a", "p/r.py": ""},
        "p/__init__.py p/a.py p/q/__init__.py p/q/t.py p/r.py",
    ),
    (
        "more dots than there are packages",
        "t.py:f",
        {"t.py": "from . import a\nfrom ...x import b", "a.py": "", "x.py": ""},
        "t.py",
    ),
    (
        "a namespace package",
        "t.py:f",
        {"t.py": "from space.inner import m", "space/inner/m.py": "import space.n",
         "space/n.py": ""},
        "space/inner/m.py space/n.py t.py",
    ),
    (
        "conditions, functions, try, with, match, classes",
        "t.py:f",
        {"t.py": "import sys\nif sys.argv:\n  import a\nelse:\n  import b\ntry:\n  import c\n"
         "except ImportError:\n  import d\nelse:\n  import e\nfinally:\n  import g\n"
         "def f(x):\n  with open(x):\n    import h\nclass K:\n  import i\n"
         "match 1:\n  case 1:\n    import j\nfor _ in ():\n  import k\nasync def l():\n  import m",
         **{f"{name}.py": "" for name in "abcdeghijkmz"}},
        "a.py b.py c.py d.py e.py g.py h.py i.py j.py k.py m.py t.py",
    ),
    (
        "a cycle",
        "t.py:f",
        {"t.py": "import a", "a.py": "import b", "b.py": "import a, t"},
        "a.py b.py t.py",
    ),
    ("import *", "t.py:f", {"t.py": "from a import *", "a.py": "", "b.py": ""}, "a.py t.py"),
    (
        "import * of a package runs the modules that it lists",
        "t.py:f",
        {"t.py": "from p import *", "p/__init__.py": "__all__ = ['m']\n__all__ += ('n', 'v')",
         "p/m.py": "", "p/n.py": "", "p/z.py": ""},
        "p/__init__.py p/m.py p/n.py t.py",
    ),
    (
        "a helper with the name of a standard module",
        "t.py:f",
        {"t.py": "import queue, json.tool", "queue.py": "import random", "random.py": ""},
        "queue.py random.py t.py",
    ),
    (
        "a target in a folder finds its neighbours and what lies in the starting folder",
        "src/t.py:f",
        {"src/t.py": "import near, far", "src/near.py": "", "far.py": "", "near.py": ""},
        "far.py src/near.py src/t.py",
    ),
    (
        "what is missing or installed is not followed",
        "t.py:f",
        {"t.py": "import nowhere.at_all, numpy.linalg, muster, muster_recipes.digits.task\n"
         "from muster import Task",
         ".venv/lib/site-packages/x.py": ""},
        "t.py",
    ),
    (
        "an environment inside the project is no project",
        "t.py:f",
        {"t.py": "import x", "site-packages/x.py": "", "x/__init__.py": ""},
        "t.py x/__init__.py",
    ),
    (
        "an odd encoding, and escapes that Python would warn of",
        "t.py:f",
        {"t.py": "# -*- coding: latin-1 -*-\nimport a\nx = '\\d'", "a.py": ""},
        "a.py t.py",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("what", "target", "files", "wanted"), FORMS, ids=[f[0] for f in FORMS])
def test_the_code_is_what_the_target_imports_from_the_project(
    what: str, target: str, files: dict[str, str], wanted: str, tmp_path: Path
) -> None:
    write(tmp_path, files)
    before = set(sys.modules)
    code = code_of([parse_target(target, tmp_path)], tmp_path)
    assert list(code) == wanted.split()
    mine = {name.partition("/")[0].removesuffix(".py") for name in files}
    assert not (set(sys.modules) - before) & mine, "something was imported"
    for name in wanted.split():
        path = tmp_path / name
        text = path.read_bytes()
        path.write_bytes(text + b"# edited\n")
        assert changed_files(code, code_of([parse_target(target, tmp_path)], tmp_path)) == [name]
        path.write_bytes(text)


COMMANDS = [
    ("python c.py --out {dir}", {"c.py": "import h", "h.py": "", "z.py": ""}, "c.py h.py"),
    ("python -u sub/c.py", {"sub/c.py": "import h", "sub/h.py": "", "h.py": ""},
     "sub/c.py sub/h.py"),
    ("python -m p.m {x}", {"p/m.py": "from . import n", "p/n.py": ""}, "p/m.py p/n.py"),
    ("python -m p", {"p/__init__.py": "", "p/__main__.py": "import p.n", "p/n.py": ""},
     "p/__init__.py p/__main__.py p/n.py"),
    ("torchrun --nproc 2 c.py --config=c.yaml", {"c.py": "", "c.yaml": ""}, "c.py"),
    ("./go {x}", {"go": "anything"}, "go"),
    ("bash run.sh data.csv", {"run.sh": "echo", "data.csv": "1"}, "run.sh"),
    ("perl tool data", {"tool": "#!/usr/bin/perl", "data": "x"}, "tool"),
    ("env --script=c.py", {"c.py": ""}, "c.py"),
    ("python dir {x}", {"dir/__main__.py": "import q", "dir/q.py": ""}, "dir/__main__.py dir/q.py"),
    ("python new.py", {"new.py": "type X = = int"}, "new.py"),
    ("echo {x}", {"c.py": ""}, ""),
    ("-m", {}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("line", "files", "wanted"), COMMANDS, ids=[c[0] for c in COMMANDS])
def test_the_code_of_a_command_is_its_scripts_and_what_they_import(
    line: str, files: dict[str, str], wanted: str, tmp_path: Path
) -> None:
    write(tmp_path, files)
    assert list(code_of_command(line.split(), tmp_path)) == wanted.split()
    assert list(code_of_command([f"{line} | tee log"], tmp_path))[:1] == wanted.split()[:1]


def test_a_moved_project_is_the_same_code(tmp_path: Path) -> None:
    files = {"t.py": "import p.m", "p/m.py": "x = 1", "pyproject.toml": ""}
    codes = []
    for place in ("one", "somewhere/else"):
        write(tmp_path / place, files)
        codes.append(code_of([parse_target("t.py:f", tmp_path / place)], tmp_path / place))
    assert codes[0] == codes[1]
    assert code_id(codes[0]) == code_id(codes[1])


def test_the_project_is_the_checkout_and_not_only_the_starting_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"lib/net.py": "", "work/t.py": "import net", "other/x.py": ""}
    write(tmp_path, {**files, "pyproject.toml": ""})
    monkeypatch.syspath_prepend(tmp_path / "lib")
    here = tmp_path / "work"
    assert list(code_of([parse_target("t.py:f", here)], here)) == ["lib/net.py", "work/t.py"]
    (tmp_path / "pyproject.toml").unlink()
    assert list(code_of([parse_target("t.py:f", here)], here)) == ["t.py"]


def test_a_target_elsewhere_brings_its_own_project(tmp_path: Path) -> None:
    write(tmp_path, {"away/t.py": "import h", "away/h.py": "", "here/z.py": ""})
    ref = parse_target(f"{tmp_path}/away/t.py:f", tmp_path / "here")
    assert list(code_of([ref], tmp_path / "here")) == ["h.py", "t.py"]


def test_a_link_to_a_helper_elsewhere_is_followed(tmp_path: Path) -> None:
    write(tmp_path, {"away/shared.py": "import deep", "here/t.py": "import shared"})
    (tmp_path / "here/shared.py").symlink_to(tmp_path / "away/shared.py")
    here = tmp_path / "here"
    assert list(code_of([parse_target("t.py:f", here)], here)) == ["shared.py", "t.py"]


def test_only_what_is_imported_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {f"pkg/m{n}.py": f"import pkg.m{n + 1}" for n in range(1500)})
    write(tmp_path, {"t.py": "import pkg.m1490"})
    opened: list[Path] = []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: opened.append(path) or real(path))
    code = code_of([parse_target("t.py:f", tmp_path)], tmp_path)
    assert len(code) == 11
    assert len(opened) == 11


@pytest.mark.parametrize(
    ("name", "data"), [("t.py", b"def (:"), ("h.py", b"x = \x00"), ("h.py", b"\xff\xfe = 1")]
)
def test_what_cannot_be_read_as_python_is_a_clear_error(
    name: str, data: bytes, tmp_path: Path
) -> None:
    write(tmp_path, {"t.py": "import h", "h.py": ""})
    (tmp_path / name).write_bytes(data)
    with pytest.raises(TargetError) as error:
        code_of([parse_target("t.py:f", tmp_path)], tmp_path)
    assert str(tmp_path / name) in str(error.value)


def test_a_file_that_vanished_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="Cannot read"):
        code_of([TargetRef("file", "gone.py", "f")], tmp_path)
    with pytest.raises(TargetError, match="no module"):
        code_of([TargetRef("module", "gone_module", "f")], tmp_path)


def test_a_module_that_is_not_python_has_no_code() -> None:
    assert code_of([TargetRef("module", "math", "sin")]) == {}


def test_a_recipe_is_the_version_of_the_package_and_its_own_files(tmp_path: Path) -> None:
    code = code_of([TargetRef("module", "muster_recipes.ssm.tasks", "gd")], tmp_path)
    assert "muster-gpu" in code
    assert "muster_recipes/ssm/tasks.py" in code
    assert all(name.startswith(("muster_recipes/", "muster-gpu")) for name in code)
    assert not any("digits" in name for name in code)


#: Before, now, what is told.
CHANGES = [
    ({"t.py": "1"}, {"t.py": "1"}, []),
    ({"t.py": "1"}, {"t.py": "2"}, ["t.py"]),
    ({"t.py": "1", "h.py": "1"}, {"t.py": "1"}, []),  # a copy of the same content
    ({"t.py": "1", "h.py": "3"}, {"t.py": "1"}, ["h.py"]),
    ({"t.py": "1"}, {"t.py": "1", "h.py": "2"}, ["h.py"]),
    ({"old/t.py": "1", "old/h.py": "2"}, {"new/t.py": "1", "new/h.py": "2"}, []),
    ({}, {"t.py": "1"}, []),  # nothing is known of a run before there was such a record
    ({"t.py:f": "1"}, {"t.py": "1", "h.py": "2"}, []),  # noted by an older muster
    ({"t.py:f": "1"}, {"t.py": "2", "h.py": "2"}, ["t.py:f"]),
    ({"math:sin": ""}, {}, []),
    ({"muster-gpu": "0.1"}, {"muster-gpu": "0.2"}, ["muster-gpu"]),
]


@pytest.mark.parametrize(("before", "now", "told"), CHANGES)
def test_changes_are_told_by_name(
    before: dict[str, str], now: dict[str, str], told: list[str]
) -> None:
    assert changed_files(before, now) == told


def test_the_short_name_is_of_all_files_and_of_nothing_empty() -> None:
    assert code_id({}) == ""
    assert code_id({"a": "1", "b": "2"}) == code_id({"b": "2", "a": "1"})
    assert code_id({"a": "1"}) != code_id({"a": "2"}) != code_id({"b": "2"})
