"""Every flag that a help shows is read below; one that nobody reads would promise in vain.

A flag is a field of a dataclass. The source is read, without running it, for uses of that field on
a value of that class: a parameter or attribute with its annotation, what a call returns or makes,
and names that these are assigned to. What checks a value (``__post_init__``, ``check…``) is no use
of it, and neither is what the command line says of an option of a lower layer. Uses that cannot be
seen in this way are in ``PROOFS``, with the words of the source that show them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path

import pytest

from muster.cli import help_page
from muster.cli.main import COMMANDS, main
from muster.cli.options import Option
from muster.cli.recipes import AGENTS, MAPS, RECIPES, TASKS

SOURCE = Path(__file__).parents[2] / "src"
PAGES = [
    *(command for command in COMMANDS if command != "slurm-script"),
    *(f"train {name}" for name in (*TASKS, *AGENTS)),
    *(f"sweep {name}" for name in RECIPES),
    *(f"map {name}" for name in MAPS),
]
#: It reads the whole source.
pytestmark = pytest.mark.thorough
#: Groups of a command line, which are attributes of what it was parsed to.
GROUPS = {
    "shown": "muster.cli.gang.GangShownFlags", "space": "muster.cli.flags.SpaceFlags",
    "sharing": "muster.cli.commands.sweep.SharingFlags",
    "own": "muster.cli.train_flags.TrainFlags",
    "places": "muster.cli.map_flags.MapPlaces", "again": "muster.cli.commands.resume._RetryFlags",
    "adding": "muster.cli.commands.add._AddFlags",
    "job": "muster.cli.commands.resume._JobFlags", "start": "muster.cli.commands.start._Start",
}  # fmt: skip
#: A protocol, and whose fields it asks for.
PROTOCOLS = {"muster.api.start.placing.DeviceChoice": "muster.api.start.options.DeviceOptions"}
#: Owner and field → a module and the words in it that use the field.
PROOFS: dict[tuple[str, str], tuple[str, str]] = {
    ("muster.api.start.options.GangOptions", "executor"): (
        "muster.cli.gang", 'options.get("executor", "local")',
    ),
    ("muster.cli.commands.sweep.TargetPlace", "target"): (
        "muster.cli.commands.sweep", "target, words = split_target(",
    ),
    ("muster.cli.flags.SpaceFlags", "from_wandb"): (
        "muster.cli.wandb_file", 'word.partition("=")[0] == _FLAG',
    ),
    ("muster.cli.map_flags.StagesPlace", "pipeline"): (
        "muster.cli.map_flags", "name, words = pipeline_in(",
    ),
    ("muster.cli.train_flags.TaskPlace", "task"): (
        "muster.cli.train_flags", "name, words = task_in(",
    ),
    ("muster.train.config.TrainConfig", "model_seed"): (
        "muster.rank.state", "if config.model_seed is None",
    ),
    ("muster.rl.config.PpoConfig", "model_seed"): (
        "muster.rank.state", "if config.model_seed is None",
    ),
    ("muster.cli.questions.LaunchFlags", "kind"): (
        "muster.cli.questions", 'answers["kind"]',
    ),
    ("muster.cli.questions.LaunchFlags", "target"): (
        "muster.cli.questions", 'answers["target"]',
    ),
    ("muster.cli.questions.LaunchFlags", "args"): (
        "muster.cli.questions", 'answers.get("args")',
    ),
}  # fmt: skip

#: An owner whose fields are read by names in a list: the module with the list, and its words that
#: read them.
COPIES = {
    "muster_recipes.ssvae.config.SsvaeTrainConfig": (
        "muster_recipes.ssvae.config", "CHOSEN = (",
    ),
    "muster_recipes.ssvae.config.SsvaeConfig": (
        "muster_recipes.ssvae.plan", "{name: getattr(config, name) for name in _SHARED}",
    ),
    "muster_recipes.ssm.config.SsmConfig": (
        "muster_recipes.ssm.plan", '{name: getattr(config, f"gd_{name}") for name in names}',
    ),
    "muster_recipes.embed.recipe.EmbedConfig": (
        "muster_recipes.embed.recipe", "Embed(**{**vars(config),",
    ),
    "muster_recipes.reasoning.config.ReasoningConfig": (
        "muster_recipes.reasoning.config", "{name: getattr(self, name) for name in _ONLY_FOR}",
    ),
}  # fmt: skip


class Reads:
    """Which fields of which classes the source reads."""

    def __init__(self) -> None:
        self.trees = {
            ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(
                ".__init__"
            ): ast.parse(path.read_text(encoding="utf-8"))
            for package in ("muster", "muster_recipes")
            for path in sorted((SOURCE / package).rglob("*.py"))
        }
        self.names = {module: dict(_names(module, tree)) for module, tree in self.trees.items()}
        defined = [
            (f"{module}.{node.name}", module, node)
            for module, tree in self.trees.items()
            for node in tree.body
            if isinstance(node, ast.ClassDef | ast.FunctionDef)
        ]
        self.classes = {q: (m, n) for q, m, n in defined if isinstance(n, ast.ClassDef)}
        self.functions = {q: (m, n) for q, m, n in defined if isinstance(n, ast.FunctionDef)}
        self._attributes: dict[tuple[str, str], set[str]] = {}
        self._scopes: dict[ast.AST, dict[str, set[str]]] = {}

    def family(self, name: str) -> list[str]:
        """A class and those it is made from."""
        if name not in self.classes:
            return []
        module, node = self.classes[name]
        bases = [self.names[module].get(b.id, "") for b in node.bases if isinstance(b, ast.Name)]
        return [name, *(one for base in bases for one in self.family(base))]

    @cached_property
    def uses(self) -> dict[str, list[tuple[str, str, ast.AST, ast.expr]]]:
        """By the name of an attribute: module, class and scope in which it is read, and of what."""
        found: dict[str, list[tuple[str, str, ast.AST, ast.expr]]] = {}
        for module, tree in self.trees.items():
            for owner, scope in _scopes(tree):
                if isinstance(scope, ast.FunctionDef) and _only_checks(scope.name):
                    continue
                for node in _inside(scope):
                    value, name = _attribute(node)
                    if value is not None:
                        where = f"{module}.{owner}" if owner else ""
                        found.setdefault(name, []).append((module, where, scope, value))
        return found

    def env(self, module: str, owner: str, scope: ast.AST) -> dict[str, set[str]]:
        """What the names in a scope stand for, whatever the order of its statements."""
        if scope in self._scopes:
            return self._scopes[scope]
        env: dict[str, set[str]] = {"self": {owner}} if owner else {}
        self._scopes[scope] = env
        for node in _inside(scope):
            if isinstance(node, ast.arg) and node.annotation is not None:
                env.setdefault(node.arg, set()).update(self.annotated(module, node.annotation))
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                env.setdefault(node.target.id, set()).update(
                    self.annotated(module, node.annotation)
                )
        for _ in range(2):
            for node in _inside(scope):
                for target, value in _assigned(node):
                    kinds = self.kinds(module, env, value)
                    for one in ast.walk(target):
                        if isinstance(one, ast.Name) and kinds:
                            env.setdefault(one.id, set()).update(kinds)
        return env

    def kinds(self, module: str, env: dict[str, set[str]], node: ast.AST) -> set[str]:
        """The classes that a value may be of; empty: not known."""
        if isinstance(node, ast.Name):
            return env.get(node.id, set())
        value, name = _attribute(node)
        if value is not None:
            of = self.kinds(module, env, value)
            found = {one for kind in of for one in self.attribute(kind, name)}
            return found or ({GROUPS[name]} if name in GROUPS else set())
        if isinstance(node, ast.Call):
            return self._made(module, env, node)
        if isinstance(node, ast.IfExp):
            return self.kinds(module, env, node.body) | self.kinds(module, env, node.orelse)
        if isinstance(node, ast.BoolOp):
            return {kind for one in node.values for kind in self.kinds(module, env, one)}
        if isinstance(node, ast.Subscript | ast.NamedExpr):
            return self.kinds(module, env, node.value)
        return set()

    def _made(self, module: str, env: dict[str, set[str]], call: ast.Call) -> set[str]:
        if isinstance(call.func, ast.Name):
            name = self.names[module].get(call.func.id, "")
            if name in self.classes:
                return {name}
            if name == "muster.cli.parse.parse":  # which returns what its first argument is
                return {self.names[module].get(getattr(call.args[0], "id", ""), "")}
            if name in self.functions:
                where, function = self.functions[name]
                return self.annotated(where, function.returns)
            return self.kinds(module, env, call.args[0]) if call.func.id == "replace" else set()
        if not isinstance(call.func, ast.Attribute):
            return set()
        if call.func.attr == "replace" and call.args:
            return self.kinds(module, env, call.args[0])
        of = self.kinds(module, env, call.func.value)
        if isinstance(call.func.value, ast.Name):
            name = self.names[module].get(call.func.value.id, "")
            of = of | ({name} & self.classes.keys())
        return {one for kind in of for one in self.attribute(kind, call.func.attr)}

    def attribute(self, kind: str, name: str) -> set[str]:
        """The classes of a field or property, or of what a method returns."""
        if (kind, name) in self._attributes:
            return self._attributes[kind, name]
        found = self._attributes[kind, name] = set()
        for one in self.family(kind):
            module, node = self.classes[one]
            for part in node.body:
                if isinstance(part, ast.AnnAssign) and _is_name(part.target, name):
                    found |= self.annotated(module, part.annotation)
                if isinstance(part, ast.FunctionDef) and part.name == name:
                    found |= self.annotated(module, part.returns)
                if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                    for target, value in (p for n in ast.walk(part) for p in _assigned(n)):
                        if isinstance(target, ast.Attribute) and target.attr == name:
                            found |= self.kinds(module, self.env(module, one, part), value)
        return found

    def annotated(self, module: str, node: ast.expr | None) -> set[str]:
        """The classes that an annotation names."""
        if node is None:
            return set()
        found: set[str] = set()
        for one in ast.walk(node):
            if isinstance(one, ast.Constant) and isinstance(one.value, str):
                try:
                    found |= self.annotated(module, ast.parse(one.value, mode="eval").body)
                except SyntaxError:
                    continue
            if isinstance(one, ast.Name):
                found |= {self.names[module].get(one.id, "")} & self.classes.keys()
        return found


def _names(module: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("muster"):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name, f"{module}.{node.name}"


def _scopes(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Functions with the class they are in, and what stands outside of them."""
    yield "", tree
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield "", node
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef):
                    yield node.name, part


def _inside(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope: of a module without its functions and classes."""
    if not isinstance(scope, ast.Module):
        yield from ast.walk(scope)
        return
    for node in scope.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from ast.walk(node)


def _only_checks(name: str) -> bool:
    return name == "__post_init__" or name.lstrip("_").startswith("check_")


def _attribute(node: ast.AST) -> tuple[ast.expr | None, str]:
    """``x.name`` or ``getattr(x, "name")``."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        return node.value, node.attr
    if isinstance(node, ast.Call) and _is_name(node.func, "getattr") and len(node.args) > 1:
        name = node.args[1]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            return node.args[0], name.value
    return None, ""


def _assigned(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
        for target, value in list(pairs):
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=False))
        return pairs
    if isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        return [(node.target, node.value)]
    if isinstance(node, ast.For | ast.comprehension):
        return [(node.target, node.iter)]
    if isinstance(node, ast.withitem) and node.optional_vars is not None:
        return [(node.optional_vars, node.context_expr)]
    return []


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


@cache
def reads() -> Reads:
    return Reads()


def is_copied(owner: str, field: str) -> bool:
    if owner not in COPIES:
        return False
    module, words = COPIES[owner]
    text = source_of(module)
    assert words in text, f"{module} no longer says {words}"
    names = {field, field.partition("_")[2]}
    return "dataclasses.fields" in words or any(f'"{name}"' in text for name in names)


def source_of(module: str) -> str:
    return (SOURCE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")


def is_read(owner: str, field: str) -> bool:
    layer = owner.split(".")[1]
    package = ".".join(owner.split(".")[:2])
    for module, within, scope, value in reads().uses.get(field, []):
        if module.startswith("muster.cli") and layer != "cli":
            continue
        kinds = reads().kinds(module, reads().env(module, within, scope), value)
        # The functions of a recipe are lambdas and callbacks: what they get is not annotated.
        if not kinds and owner.startswith("muster_recipes.") and module.startswith(package):
            return True
        if any(owner in reads().family(PROTOCOLS.get(kind, kind)) for kind in kinds):
            return True
    return False


@pytest.mark.parametrize("page", PAGES)
def test_a_shown_flag_is_read(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Option] = []
    monkeypatch.setattr(help_page, "show", lambda command, text, options, *_: shown.extend(options))
    with pytest.raises(SystemExit):
        main([*page.split(), "--help-all"])
    assert shown
    unread = []
    for option in shown:
        owner, field = f"{option.owner.__module__}.{option.owner.__qualname__}", option.path[-1]
        if (owner, field) in PROOFS:
            module, words = PROOFS[owner, field]
            assert words in source_of(module), f"{module} no longer says {words}"
        elif not is_read(owner, field) and not is_copied(owner, field):
            unread.append(f"--{option.name} ({owner}.{field})")
    assert not unread, f"nobody reads {', '.join(unread)}"


def test_a_field_that_nobody_reads_would_be_seen() -> None:
    assert is_read("muster.api.start.options.SweepOptions", "retries")
    assert not is_read("muster.api.start.options.SweepOptions", "retires")
    assert not is_read("muster.train.config.TrainConfig", "retries"), "it is another class's"
