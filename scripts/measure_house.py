"""Count how much a reader of Muster has to hold, from the source alone.

    python scripts/measure_house.py                   # this tree
    python scripts/measure_house.py --ref ef43f7d     # this tree beside another commit
    python scripts/measure_house.py --json

Each measure is defined by the docstring of the function that counts it. None of them is a limit:
they show in which direction the house goes. Only the count of flags runs the code that is measured.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = {"sweep", "map", "train", "agent", "run"}
#: The places of the tree from which a value begins its trip.
WORKLOAD, TRAINING = "run_workload", "run_training"
#: What every package stands on; a call of it hands nothing over (docs/decisions/0032).
GROUND = ("base", "run")

Function = ast.FunctionDef | ast.AsyncFunctionDef


class House:
    """The parsed modules of one tree: ``package.module`` → its syntax tree."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.source = root / "src"
        self.texts = {
            _module(path, self.source): path.read_text(encoding="utf-8")
            for path in sorted((self.source / "muster").rglob("*.py"))
        }
        self.trees = {name: ast.parse(text) for name, text in self.texts.items()}

    @cached_property
    def imported(self) -> dict[str, dict[str, str]]:
        """Module → local name → ``module.attribute`` of muster that it stands for."""
        return {name: dict(_imports(tree)) for name, tree in self.trees.items()}

    @cached_property
    def definitions(self) -> dict[str, ast.stmt]:
        """``module.name`` → the function or class."""
        return {
            f"{module}.{node.name}": node
            for module, tree in self.trees.items()
            for node in tree.body
            if isinstance(node, Function | ast.ClassDef)
        }

    def target(self, module: str, name: str) -> str:
        return self.imported[module].get(name, f"{module}.{name}")

    @cached_property
    def callables(self) -> set[str]:
        """``module.Name`` of what stands for a kind of function: ``Show = Callable[…]``."""
        return {
            f"{module}.{target.id}"
            for module, tree in self.trees.items()
            for node in tree.body
            if isinstance(node, ast.Assign) and _mentions(node.value, {"Callable"})
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    def functions(self) -> Iterator[tuple[str, Function]]:
        for module, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, Function):
                    yield module, node

    @cached_property
    def height(self) -> dict[str, int]:
        """Package → its layer, counted from the bottom."""
        settings = tomllib.loads((self.root / "pyproject.toml").read_text(encoding="utf-8"))
        contracts = settings["tool"]["importlinter"]["contracts"]
        layers = next(c["layers"] for c in contracts if c["type"] == "layers")
        return {
            package.strip(" ()"): height
            for height, layer in enumerate(reversed(layers))
            for package in layer.split("|")
        }


def _module(path: Path, source: Path) -> str:
    return ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("muster"):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def module_lines(house: House) -> list[int]:
    """The lines of each module of muster with more than three of them."""
    return sorted(n for text in house.texts.values() if (n := text.count("\n")) > 3)


def num_lines(package: str) -> Callable[[House], int]:
    def count(house: House) -> int:
        files = (house.source / package).rglob("*.py")
        return sum(path.read_text(encoding="utf-8").count("\n") for path in files)

    count.__doc__ = f"Lines of the Python files of {package}."
    return count


def num_classes(house: House) -> int:
    """Classes of muster, also those within functions and classes."""
    trees = house.trees.values()
    return sum(isinstance(node, ast.ClassDef) for tree in trees for node in ast.walk(tree))


def option_classes(house: House) -> list[str]:
    """Dataclasses that say options: three fields or more, two thirds of them flags of a command,
    and the class is parsed by the command line or named as what it is (Options, Flags, …).
    """
    flags = house_flags(house)[1]
    found = []
    for name, node in house.definitions.items():
        if not isinstance(node, ast.ClassDef) or not node.decorator_list:  # a dataclass has one
            continue
        fields = [s.target.id for s in node.body if _is_field(s)]  # type: ignore[union-attr]
        words = {field.lstrip("_").removesuffix("_s").replace("_", "-") for field in fields}
        ends = re.search(
            r"(Options|Flags|Settings|Config|Request|Launch|Answers|Pace|Output|Fault|Space"
            r"|Portion|Place|Earlier|Run|Args)$",
            node.name,
        )
        if ends and len(words) >= 3 and len(words & flags) >= 2 / 3 * len(words):
            found.append(name)
    return found


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def openings(house: House) -> list[str]:
    """Functions that take the lock of a run: each opens a run in its own way."""
    found = {
        f"{module}:{function.name}"
        for module, function in house.functions()
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "hold"
        and house.target(module, "hold").endswith((".lock.hold", ".session.hold"))
    }
    return sorted(found)


def guesses(house: House) -> list[str]:
    """Places outside ``run`` that branch on the kind of a run, by its record or by its words."""
    found = []
    for module, tree in house.trees.items():
        if module.startswith("muster.run."):
            continue
        for node in ast.walk(tree):
            compared = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            if isinstance(node, ast.Match):
                patterns = [n for case in node.cases for n in ast.walk(case.pattern)]
                values = [n.value for n in patterns if isinstance(n, ast.MatchValue)]
                compared = [node.subject, *values]
            texts = {n.value for c in compared for n in ast.walk(c) if isinstance(n, ast.Constant)}
            if texts & KINDS and any(_says_kind(c) for c in compared):
                found.append(f"{module}:{node.lineno}")
    return found


def _says_kind(node: ast.expr) -> bool:
    """``run.stored.kind``, ``record["kind"]``, ``argv[1]``; other things have kinds as well."""
    text = ast.unparse(node)
    return bool(re.search(r"(stored|record|workload|run)(\.kind|\[.kind.\])$", text)) or (
        text.endswith(("argv[0]", "argv[1]", "words[0]"))
    )


def edits(house: House) -> list[str]:
    """Functions that look at words of a command line one by one: ``word.startswith("-")``,
    ``word == "--"``, ``"--" in words``.
    """
    found = []
    for module, function in house.functions():
        own = [n for n in ast.walk(function) if isinstance(n, ast.Compare | ast.Call)]
        if any(map(_looks_at_word, own)):
            found.append(f"{module}:{function.name}")
    return found


def _looks_at_word(node: ast.Compare | ast.Call) -> bool:
    if isinstance(node, ast.Compare):
        return any(
            isinstance(n, ast.Constant) and n.value == "--" for n in [node.left, *node.comparators]
        )
    return (
        isinstance(node.func, ast.Attribute)
        and node.func.attr in ("startswith", "index", "removeprefix")
        and any(isinstance(a, ast.Constant) and a.value in ("-", "--") for a in node.args)
    )


class Trip:
    """Where the first argument of a function goes.

    Followed is every call in the order of the source, and into its body, whose arguments mention
    the value: under its own name, or a name that was assigned from an expression that mentions it.
    A method is followed where its object was made in the same function. Each function is entered
    once.

    modules: those that are entered. upward: how often the trip goes from one module to the next
    that lies in a higher layer, by a call or back from one, as the layers of pyproject.toml say.
    handed: each function that is given to a lower layer on the way, which will call it from there.

    itself: follow it only while it is the value, a part of it or something that holds it. What a
    parameter takes as a text, a number or a path is none of these (docs/decisions/0042).
    """

    def __init__(self, house: House, start: str, *, itself: bool = False) -> None:
        self.house = house
        self.visited: list[str] = []
        self.handed: list[str] = []
        self._itself = itself
        self._seen: set[str] = set()
        found = [name for name in house.definitions if name.endswith(f".{start}")]
        for name in found[:1]:
            node = house.definitions[name]
            assert isinstance(node, Function)
            self._enter(name, node, {node.args.args[0].arg})

    @property
    def modules(self) -> list[str]:
        return list(dict.fromkeys(self.visited))

    @property
    def upward(self) -> int:
        return self._upward(self.visited)

    @property
    def above_ground(self) -> tuple[int, int]:
        """Both of the same trip where modules of GROUND are passed over."""
        modules = [name for name in self.modules if name.split(".")[1] not in GROUND]
        return len(modules), self._upward([name for name in self.visited if name in modules])

    def _upward(self, visited: Sequence[str]) -> int:
        heights = [self._height(name) for name in visited]
        return sum(b > a for a, b in itertools.pairwise(heights))

    def _height(self, name: str) -> int:
        return self.house.height.get(name.split(".")[1], 0)

    def _enter(self, name: str, function: Function, value: set[str]) -> None:
        if name in self._seen:
            return
        self._seen.add(name)
        module = name.rpartition(".")[0]
        if module not in self.house.trees:  # of a class
            module = module.rpartition(".")[0]
        self.visited.append(module)
        known, made = set(value), dict[str, str]()
        for node in _in_order(function):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.withitem):
                self._assign(module, node, known, made)
            if isinstance(node, ast.Call):
                self._call(module, node, known, made)
                if self.visited[-1] != module:
                    self.visited.append(module)  # and back

    def _assign(
        self,
        module: str,
        node: ast.Assign | ast.AnnAssign | ast.withitem,
        known: set[str],
        made: dict[str, str],
    ) -> None:
        if isinstance(node, ast.withitem):
            source, targets = node.context_expr, [node.optional_vars] if node.optional_vars else []
        elif isinstance(node, ast.Assign):
            source, targets = node.value, node.targets
        else:
            source, targets = node.value, [node.target]
        names = {n.id for t in targets if t for n in ast.walk(t) if isinstance(n, ast.Name)}
        if source is not None and _mentions(source, known):
            known |= names
        if isinstance(source, ast.Call) and isinstance(source.func, ast.Name):
            made.update(dict.fromkeys(names, self.house.target(module, source.func.id)))

    def _call(self, module: str, node: ast.Call, known: set[str], made: dict[str, str]) -> None:
        name, skip = "", 0
        if isinstance(node.func, ast.Name):
            name = self.house.target(module, node.func.id)
        elif isinstance(node.func, ast.Attribute):
            of = node.func.value
            owner = ""
            if isinstance(of, ast.Call) and isinstance(of.func, ast.Name):
                owner = self.house.target(module, of.func.id)
            elif isinstance(of, ast.Name):
                owner = made.get(of.id, "")
            name, skip = f"{owner}.{node.func.attr}", 1
        self._hand_down(module, name, skip, node)
        found = self._function(name)
        if found is None:
            return
        is_method = skip == 1
        kinds = _parameters(found)
        names = list(kinds)[skip:]
        given = {name for name, a in zip(names, node.args, strict=False) if _mentions(a, known)}
        given |= {k.arg for k in node.keywords if k.arg and _mentions(k.value, known)}
        if self._itself:
            given = {name for name in given if not _is_plain(kinds.get(name))}
        holder = node.func.value if isinstance(node.func, ast.Attribute) else None
        if is_method and holder is not None and _mentions(holder, known):
            given.add("self")
        if given:
            self._enter(name, found, given)

    def _hand_down(self, module: str, name: str, skip: int, node: ast.Call) -> None:
        """Note which functions a call gives to one, or to a class, in a lower layer."""
        owner = self.house.definitions.get(name)
        if isinstance(owner, ast.ClassDef):
            init = self._function(f"{name}.__init__")
            fields = [s for s in owner.body if _is_field(s)]
            kinds = {s.target.id: s.annotation for s in fields}  # type: ignore[union-attr]
            if init is not None:
                kinds, skip = _parameters(init), 1
        elif (found := self._function(name)) is not None:
            kinds = _parameters(found)
        else:
            return
        home = name.rpartition(".")[0]
        home = home if home in self.house.trees else home.rpartition(".")[0]
        if self._height(home) >= self._height(module):
            return
        given = [name for name, _ in zip(list(kinds)[skip:], node.args, strict=False)]
        given += [k.arg for k in node.keywords if k.arg]
        for parameter in given:
            kind = kinds.get(parameter)
            words = {n.id for n in ast.walk(kind) if isinstance(n, ast.Name)} if kind else set()
            is_function = "Callable" in words or any(
                self.house.target(home, word) in self.house.callables for word in words
            )
            if is_function and (what := f"{name}({parameter})") not in self.handed:
                self.handed.append(what)

    def _function(self, name: str) -> Function | None:
        node = self.house.definitions.get(name)
        if isinstance(node, Function):
            return node
        owner = self.house.definitions.get(name.rpartition(".")[0])
        if isinstance(owner, ast.ClassDef):
            for method in owner.body:
                if isinstance(method, Function) and method.name == name.rpartition(".")[2]:
                    return method
        return None


def _in_order(function: Function) -> list[ast.AST]:
    nodes = [n for statement in function.body for n in ast.walk(statement)]
    placed = [n for n in nodes if not isinstance(n, ast.withitem)]
    items = [n for n in nodes if isinstance(n, ast.withitem)]
    return sorted(
        [*[n for n in placed if hasattr(n, "lineno")], *items],
        key=lambda n: (
            n.context_expr.lineno if isinstance(n, ast.withitem) else n.lineno,  # type: ignore[attr-defined]
        ),
    )


def _parameters(function: Function) -> dict[str, ast.expr | None]:
    """Each with its annotation, those that are given by position first."""
    known = function.args
    return {a.arg: a.annotation for a in (*known.posonlyargs, *known.args, *known.kwonlyargs)}


_PLAIN = {"str", "int", "float", "bool", "bytes", "Path"}
_OF_PLAIN = {"tuple", "list", "set", "dict", "Sequence", "Mapping", "Iterable", "Collection"}


def _is_plain(kind: ast.expr | None) -> bool:
    """Whether an annotation means texts, numbers or paths, or several of them."""
    match kind:
        case ast.Constant(value=None) | ast.Constant(value=builtins.Ellipsis):
            return True
        case ast.Name(id=name):
            return name in _PLAIN
        case ast.BinOp(left=left, right=right):
            return _is_plain(left) and _is_plain(right)
        case ast.Tuple(elts=kinds):
            return all(map(_is_plain, kinds))
        case ast.Subscript(value=ast.Name(id=name), slice=inner):
            return name == "Literal" or (name in _OF_PLAIN and _is_plain(inner))
    return False


def _mentions(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(node))


def house_flags(house: House) -> tuple[int, set[str], int]:
    """Flags that ``muster train --help`` shows; the distinct ones that all commands' help shows,
    and how many those are.
    """
    if not hasattr(house, "_flags"):
        texts = _help(house)
        train = _shown(texts["train"])
        every = {flag for text in texts.values() for flag in _shown(text)}
        house._flags = (len(train), every, len(every))  # type: ignore[attr-defined]
    return house._flags  # type: ignore[attr-defined,no-any-return]


#: In one process, because each would import for seconds.
_ASK = """
import contextlib, io, json, re, sys
from muster.cli.main import main
def help_of(*words):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return out.getvalue()
commands = re.findall(r"^  ([a-z][a-z-]+)  ", help_of(), re.M)
print(json.dumps({command: help_of(command) for command in commands}))
"""


def _help(house: House) -> dict[str, str]:
    """Command → its help."""
    done = subprocess.run(
        [sys.executable, "-c", _ASK],
        env={**os.environ, "PYTHONPATH": str(house.source), "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
        check=True,
    )
    texts: dict[str, str] = json.loads(done.stdout)
    return texts


def _shown(text: str) -> set[str]:
    """The flags that have a place of their own in a help text, not those in its sentences."""
    heads = re.findall(r"^[│ ]*(-[^│\n]*?)(?:  |│|$)", text, re.M)
    flags = {flag for head in heads for flag in re.findall(r"--([a-z][a-z0-9-]*)", head)}
    return flags - {"help"}


def measured(house: House) -> dict[str, int]:
    workload, training = Trip(house, WORKLOAD), Trip(house, TRAINING)
    itself, trained = (Trip(house, start, itself=True) for start in (WORKLOAD, TRAINING))
    flags, lines = house_flags(house), module_lines(house)
    return {
        "modules above 3 lines": len(lines),
        "  lines of such a module, mean": round(sum(lines) / len(lines)),
        "  % of them below 60 lines": round(100 * sum(n < 60 for n in lines) / len(lines)),
        "  % of them above 400 lines": round(100 * sum(n > 400 for n in lines) / len(lines)),
        "classes": num_classes(house),
        "classes of options": len(option_classes(house)),
        "places that open a run": len(openings(house)),
        "guesses of a run's kind": len(guesses(house)),
        "edits of argv": len(edits(house)),
        "modules the workload enters": len(workload.modules),
        "upward calls with the workload": workload.upward,
        "  modules above base and run": workload.above_ground[0],
        "  upward calls above them": workload.above_ground[1],
        "  modules it enters itself": len(itself.modules),
        "  upward calls with it itself": itself.upward,
        "  functions handed down with it": len(itself.handed),
        "modules the training enters": len(training.modules),
        "upward calls with the training": training.upward,
        "  its modules above base and run": training.above_ground[0],
        "  its upward calls above them": training.above_ground[1],
        "  modules the training itself enters": len(trained.modules),
        "  upward calls with itself": trained.upward,
        "  functions handed down with the training": len(trained.handed),
        "lines of muster": num_lines("muster")(house),
        "lines of recipes": num_lines("muster_recipes")(house),
        "flags shown by train --help": flags[0],
        "distinct flags shown by all": flags[2],
    }


def at_commit(ref: str, folder: Path) -> House:
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", ref, "src", "pyproject.toml"],
        check=True,
        capture_output=True,
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return House(folder)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Count what a reader of Muster has to hold.")
    parser.add_argument("--ref", help="a commit to count as well")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--list", action="store_true", help="name what is counted")
    flags = parser.parse_args(argv)
    house = House(ROOT)
    columns = {"this tree": measured(house)}
    if flags.ref:
        with tempfile.TemporaryDirectory() as folder:
            columns = {flags.ref: measured(at_commit(flags.ref, Path(folder))), **columns}
    if flags.json:
        print(json.dumps(columns, indent=2))
        return 0
    print(f"{'measure':34}" + "".join(f"{name:>12}" for name in columns))
    for name in columns["this tree"]:
        print(f"{name:34}" + "".join(f"{column[name]:>12,}" for column in columns.values()))
    if flags.list:
        for title, found in (
            ("classes of options", option_classes(house)),
            ("places that open a run", openings(house)),
            ("guesses", guesses(house)),
            ("edits of argv", edits(house)),
            ("modules the workload enters", Trip(house, WORKLOAD).modules),
            ("modules the training enters", Trip(house, TRAINING).modules),
            ("functions handed down with the workload", Trip(house, WORKLOAD, itself=True).handed),
            ("functions handed down with the training", Trip(house, TRAINING, itself=True).handed),
        ):
            print(f"\n{title}:\n  " + "\n  ".join(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
