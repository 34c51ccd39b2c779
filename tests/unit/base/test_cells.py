"""What the cells of a notebook define, as modules for other processes, or why that cannot be."""

from __future__ import annotations

import ast
import io
import itertools
import linecache
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from muster.base.cell_snapshot import snapshot
from muster.base.code import code_of
from muster.base.errors import TargetError
from muster.base.target import load, ref_of

Run = Callable[..., dict[str, Any]]
_numbers = itertools.count()


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs texts one after another as a notebook runs its cells."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    names: list[str] = []

    def run(*texts: str, **given: Any) -> dict[str, Any]:
        vars(main).update(given)
        for text in texts:
            names.append(f"/tmp/kernel/{next(_numbers)}.py")
            lines = text.splitlines(keepends=True)
            linecache.cache[names[-1]] = (len(text), None, lines, names[-1])
            exec(compile(text, names[-1], "exec"), vars(main))
        return vars(main)

    yield run
    for name in names:
        linecache.cache.pop(name, None)


def made(name: str) -> dict[str, Any]:
    """The module of ``name``, run as a worker does, with nothing of the session."""
    module = types.ModuleType("elsewhere")
    sys.modules["elsewhere"] = module
    try:
        exec(compile(snapshot(name), "elsewhere.py", "exec", dont_inherit=True), vars(module))
    finally:
        del sys.modules["elsewhere"]
    return vars(module)


def refusal(name: str) -> str:
    with pytest.raises(TargetError) as told:
        snapshot(name)
    return str(told.value)


def test_a_function_brings_what_it_refers_to(cells: Run) -> None:
    cells(
        "import math\nimport numpy as np\nfrom functools import lru_cache as cached\n",
        "SCALE = 2.5\nimport threading\nUNUSED = threading.Lock()\n",
        "@cached(maxsize=None)\ndef half(x):\n    return x / 2  # a comment\n",
        "double = lambda x: 2 * x\n",
        "def area(x: int, exponent=SCALE):\n"
        "    return float(np.float64(math.pow(half(double(x)), exponent)))\n",
    )
    module = made("area")
    assert module["area"](3) == 3**2.5
    assert "UNUSED" not in module and "a comment" in snapshot("area")


def test_classes_bring_their_bases_fields_and_types(cells: Run) -> None:
    cells(
        "from dataclasses import dataclass, field\nfrom enum import Enum\n"
        "from collections import namedtuple\nfrom typing import TypeVar, Optional\n",
        "class Colour(Enum):\n    RED = 1\n",
        "Point = namedtuple('Point', 'x y')\nT = TypeVar('T')\n",
        "@dataclass\nclass Config:\n    lr: float = 0.1\n    sizes: tuple = (1, 2)\n",
        "BEST = Config(lr=0.5)\nPAINT = {'first': Colour.RED}\n",
        "class Base:\n    def both(self, t: Optional[T] = None):\n"
        "        return Point(BEST.lr, PAINT)\n",
        "@dataclass\nclass Task(Base):\n    config: Config = field(default_factory=Config)\n",
    )
    module = made("Task")
    point = module["Task"]().both()
    assert point.x == 0.5 and point.y["first"] is module["Colour"].RED
    assert module["Task"]().config.sizes == (1, 2)


def test_functions_that_call_each_other_and_what_runs_first(cells: Run) -> None:
    cells(
        "def even(n):\n    return True if n == 0 else odd(n - 1)\n",
        "def odd(n, start=even(0)):\n    return start if n == -1 else (n != 0 and even(n - 1))\n",
    )
    assert made("even")["even"](4) is True and made("odd")["odd"](3) is True


def test_imports_of_parts_and_other_names(cells: Run) -> None:
    cells(
        "import xml.etree.ElementTree\nimport os.path as p\nfrom math import pi\n"
        "from os.path import join as j\nfrom pathlib import Path\nHOME = Path('/data')\n",
        "def name(text):\n"
        "    tag = xml.etree.ElementTree.fromstring(text).tag\n"
        "    return tag + p.basename(j('a', str(HOME))) + str(pi)\n",
    )
    assert made("name")["name"]("<a/>").startswith("adata3.14")


def test_constants_are_as_they_are_now(cells: Run) -> None:
    space = cells(
        "import re\nWORD = re.compile('a+', re.I)\nINF = float('inf')\nTABLE = [[1], {2: {'x'}}]\n"
        "def f():\n    return WORD.flags, INF, TABLE, A.tolist(), str(A.dtype), S, B\n",
        A=numpy.arange(6, dtype="int16").reshape(2, 3),
        S=numpy.float32(0.1),
        B=numpy.zeros((0, 3)),
    )
    space["TABLE"].append(b"\x00")
    flags, inf, table, *rest = made("f")["f"]()
    assert flags == re.compile("", re.I).flags
    assert (inf, table) == (float("inf"), [[1], {2: {"x"}}, b"\x00"])
    assert rest[:2] == [[[0, 1, 2], [3, 4, 5]], "int16"]
    assert rest[2] == numpy.float32(0.1) and rest[3].shape == (0, 3)


def test_small_tensors_and_their_types(cells: Run) -> None:
    torch = pytest.importorskip("torch")
    cells(
        "import torch\nW = torch.tensor([[0.1, 2.0]], dtype=torch.bfloat16)\n"
        "PLACE = torch.device('cuda:1')\nKIND = torch.float16\n"
        "def f():\n    return W, PLACE, KIND\n"
    )
    found, place, kind = made("f")["f"]()
    assert found.dtype is torch.bfloat16 and place.index == 1 and kind is torch.float16
    assert torch.equal(found, torch.tensor([[0.1, 2.0]], dtype=torch.bfloat16))


WRAPPER = (
    "from functools import wraps\ndef timed(g):\n    @wraps(g)\n    def timed_one():\n"
    "        return 10 * g()\n    return timed_one\n"
)
#: The file that ``g`` was read from has been edited since.
STALE = (
    "import linecache\n"
    "_, _, lines, file = linecache.cache[g.__code__.co_filename]\n"
    "lines[1] = '    return 2\\n'\n"
)


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (["log = open('/dev/null')", "def f():\n    log\n"], "log, which is an open file"),
        (["import threading\nlock = threading.Lock()", "def f():\n    return lock\n"],
         "lock, which is a live object of type _thread.lock"),
        (["f = [1]\ndef g(): ...\nfree = (n for n in f)", "def f():\n    return free\n"],
         "free, which is a generator"),
        (["import torch\nnet = torch.nn.Linear(2, 2)", "def f():\n    return net\n"],
         "net, which is a live model, a Linear"),
        (["import torch\nbig = torch.zeros(20000)", "def f():\n    return big\n"],
         "big, which is a large tensor: 20,000 numbers"),
        (["import torch\ngpu = torch.zeros(2, device='meta')", "def f():\n    return gpu\n"],
         "gpu, which is a tensor on meta, in the memory of this process alone"),
        (["import numpy\nbig = numpy.zeros(20000)", "def f():\n    return big\n"],
         "big, which is a large array: 20,000 numbers"),
        (["text = 'x' * 2_000_000", "def f():\n    return text\n"], "text, which is large"),
        (["log = open('/dev/null')", "def g():\n    log\n", "def f():\n    g()\n"],
         "log (by way of g), which is an open file"),
        (["square = eval('lambda x: x')", "def f():\n    square(1)\n"],
         "square, which has no source here: it was compiled from <string>"),
        (["exec('def f(): ...')"], "Cannot use f of this session: it has no source here"),
        (["n = 0", "def f():\n    global n\n    n += 1\n"],
         "it assigns the global n, and each worker would have its own"),
        (["def get_ipython(): ...", "def f():\n    get_ipython().system('ls')\n"],
         "it has a %magic, a !command or a call of get_ipython"),
        (["def make():\n    k = 1\n    def inner(): return k\n    return inner\nh = make()",
          "def f():\n    return h()\n"], "h, which was made inside of another function"),
        (["def g():\n    return 1\n", "h = g", "def g():\n    return 2\n", "def f():\n    h()\n"],
         "h, which is an earlier g: that name means something else now"),
        (["class C:\n    rate = 1\n    def m(self): ...\n", "C.rate = 2", "def f():\n    C\n"],
         "C, which has another rate now than in its cell"),
        (["class C:\n    def m(self): ...\n", "def m(self):\n    return 2\nC.m = m",
          "def f():\n    C\n"], "C, which has a method that has been replaced since its cell ran"),
        (["def g():\n    return 1\n", STALE, "def f():\n    g()\n"],
         "g, which is not what its source says now"),
        (["class C:\n    x = list('a')\n", "class C:\n    x = list('b')\n", "def f():\n    C\n"],
         "C, which is defined differently in several cells"),
        (["class C:\n    device = None\n", "C.device = 'cuda'", "def f():\n    C\n"],
         "C, which has another device now than in its cell"),
        (["N = 2\nclass C:\n    n = 2 * N\n", "C.n = 5", "def f():\n    C\n"],
         "C, which has another n now than in its cell"),
        (["class C: ...\n", "C.pi = 3", "def f():\n    C\n"],
         "C, which has an attribute pi that its cell does not give it"),
        ([WRAPPER, "def g():\n    return 1\n", "g = timed(g)", "def f():\n    g()\n"],
         "g, which has been wrapped since it was defined"),
        ([WRAPPER, "@timed\ndef g():\n    return 1\n", "g = timed(g)", "def f():\n    g()\n"],
         "g, which has been wrapped since it was defined"),
        ([WRAPPER, "def g():\n    return 1\n", "h = timed(g)", "def f():\n    h()\n"],
         "h, which is g inside of a wrapper"),
        (["from functools import singledispatch\n@singledispatch\ndef g(x):\n    return 1\n",
          "@g.register(int)\ndef _(x):\n    return 2\n", "def f():\n    g(1)\n"],
         "g, which has been given more cases since"),
        (["N = 1\ndef f(x, *, n=N): ...\n", "N = 2"], "it has another default of n"),
        (["N = 1\nclass C:\n    def m(self, n=N): ...\n", "N = 2", "def f():\n    C\n"],
         "C, which has another default of n"),
        (["class A:\n    x = 1\n", "class B(A): ...\n", "class A:\n    x = 2\n",
          "def f():\n    B\n"], "B, which has a base A, and that name means something else now"),
        (["class A:\n    x = 1\n", "class A(A): ...\n", "def f():\n    A\n"],
         "A, which has a base A, and that name means something else now"),
        (["class A:\n    x = 1\n", "Old = A\n", "class A:\n    x = 2\n", "def f():\n    Old\n"],
         "Old, which is an earlier A: that name means something else now"),
        (["import numpy\nM = numpy.ma.array([1, 2], mask=[0, 1])", "def f():\n    return M\n"],
         "M, which is a live object of type numpy.ma"),
        (["HF_TOKEN = 'abcdefgh'", "def f():\n    HF_TOKEN\n"],
         "HF_TOKEN, which looks like a secret, and would be written into the run folder"),
        (["HEADER = {'with': 'Bearer hidden-away'}", "def f():\n    HEADER\n"],
         "HEADER, which looks like a secret"),
    ],
)  # fmt: skip
def test_what_cannot_be_sent_is_refused_by_name(
    cells: Run, texts: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THEIR_API_KEY", "hidden-away")
    if "torch" in texts[0]:
        pytest.importorskip("torch")
    space = cells(*texts)
    assert told in refusal("f")
    for value in space.values():
        if isinstance(value, io.IOBase):
            value.close()


def test_what_is_run_again_unchanged_or_edited_is_taken_as_it_is(cells: Run) -> None:
    base = "class A:\n    def m(self):\n        return 1\n"
    config = "from dataclasses import dataclass\n@dataclass\nclass Config:\n    lr: float = 0.1\n"
    cells(
        WRAPPER, "N = 0.5\n", base, "def helper(x, n=N):\n    return n\n", config,
        "from typing import NamedTuple\nclass P(NamedTuple):\n    x: int = 0\n",
        "class B(A):\n    a, b = 1, 2\n    n = N\n    def m(self, helper=helper, memory={}):\n"
        "        memory[1] = 1\n        return super().m() + helper(0)\n",
        "@timed\ndef f():\n    return Config().lr, B().m(), B.b, P().x\n",
        base, "N = 0.5\n", "def helper(x, n=N):\n    return n\n",
        config.replace("0.1", "0.2"), "B().m()\n",
    )  # fmt: skip
    space = cells("@timed\ndef f():\n    return (Config().lr, B().m(), B.b, P().x)\n")
    assert made("f")["f"]() == space["f"]() == 10 * (0.2, 1.5, 2, 0)


def test_a_decorator_has_what_it_calls_in_turn(cells: Run) -> None:
    cells(
        "def zone():\n    return 2\n",
        "def marked(g):\n    g.zone = zone()\n    return g\n",
        "@marked\ndef f():\n    return f.zone\n",
    )
    assert made("f")["f"]() == 2


def test_an_imported_setting_is_as_the_session_left_it(
    cells: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_config.py").write_text(
        "OPT = {'lr': 0.1}\nSIZES = [1]\nKEY_TOKEN = 'abcdefgh'\ndef lr():\n    return OPT['lr']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    try:
        cells(
            "from own_config import lr, OPT, SIZES, KEY_TOKEN\nOPT['lr'] = 1\nSIZES.append(2)\n",
            "def f():\n    return lr(), OPT, SIZES, KEY_TOKEN\n",
        )
        text = snapshot("f")
        del sys.modules["own_config"]
        assert "abcdefgh" not in text
        space: dict[str, Any] = {}
        exec(compile(text, "elsewhere.py", "exec", dont_inherit=True), space)
        assert space["f"]() == (1, {"lr": 1}, [1, 2], "abcdefgh")
    finally:
        sys.modules.pop("own_config", None)


def test_what_a_notebook_has_instead_of_pythons_own_is_pythons_own(cells: Run) -> None:
    def replaced(*words: Any) -> None: ...

    replaced.__module__ = "_io"
    cells("def f(path):\n    with open(path) as file:\n        return file.read()\n", open=replaced)
    assert made("f")["f"](__file__).startswith('"""What the cells')


def test_flags_and_long_numbers_are_written(cells: Run) -> None:
    cells("import re\nHOW = re.I | re.M\nLONG = 3**20_000\ndef f():\n    return HOW, LONG\n")
    assert made("f")["f"]() == (re.I | re.M, 3**20_000)


def test_a_module_that_an_own_finder_finds_is_imported(
    cells: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of an editable install, which is not on sys.path."""
    module = types.ModuleType("found_otherwise")
    module.__file__ = str(tmp_path / "found_otherwise.py")
    monkeypatch.setitem(sys.modules, "found_otherwise", module)
    cells("import found_otherwise\ndef f():\n    return found_otherwise\n")
    assert "import found_otherwise\n" in snapshot("f")


def test_a_module_that_only_this_session_finds_is_refused(
    cells: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("X = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    cells("import only_here\ndef f():\n    return only_here.X\n")
    try:
        assert f"only_here, which is from {tmp_path}" in refusal("f")
        monkeypatch.chdir(tmp_path)
        assert made("f")["f"]() == 1
    finally:
        sys.modules.pop("only_here", None)


def test_a_cell_is_a_file_with_a_name_that_stays(cells: Run) -> None:
    text = "def f(x):\n    return x + ONE\n"
    space = cells("ONE = 1", text)
    ref = ref_of(space["f"])
    assert ref.name == "notebook_cell.py:f"
    assert load(ref)(2) == 3
    before = code_of([ref])
    assert list(before) == ["cells/f/notebook_cell.py"]
    space = cells(text)  # run again, unchanged
    assert code_of([ref_of(space["f"])]) == before
    space = cells("ONE = 2")  # what it refers to
    again = code_of([ref_of(space["f"])])
    assert list(again) == list(before) and again != before


def test_the_order_of_names_and_sets_does_not_change_the_source(cells: Run) -> None:
    cells("NAMES = {'a', 'b', 'c'}\nB = 1\nA = 2\ndef f():\n    return A, B, NAMES\n")
    first = snapshot("f")
    cells("NAMES = {'c', 'b', 'a'}\nA = 2\nB = 1\n")
    assert snapshot("f") == first
    ast.parse(first)
