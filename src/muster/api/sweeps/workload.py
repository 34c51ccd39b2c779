"""What a sweep runs, in one form: a function over a space, a command over a space, a recipe."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from muster.api.recipe import Recipe
from muster.api.start.options import SweepOptions
from muster.base.cells import placed
from muster.base.code import Code, code_id, code_of, code_of_command
from muster.base.codec import to_json
from muster.base.errors import UsageError
from muster.base.flags import kind_of_word
from muster.base.target import TargetRef, parse_target
from muster.farm.canonical import encode_canonical, key_of_payload, payload_and_key
from muster.farm.executors.base import check_executor
from muster.farm.look import look
from muster.farm.parameters import Signature, convert_space
from muster.farm.space import Space
from muster.farm.space_difference import describe_difference
from muster.farm.task import TargetSpec, TaskState
from muster.farm.template import OWN_PROGRAM, check_places, names_in, shell_line
from muster.run.folder import RunFolder

if TYPE_CHECKING:
    from muster.base.clock import Clock
    from muster.farm.decisions import RetryPolicy
    from muster.farm.plan import Ending, Numbers
    from muster.farm.steering import Driver
    from muster.farm.task import NewTask
    from muster.search.spec import SearchSpec

#: This many tasks of a recipe are checked before the start, in a tenth of a second; the others as
#: they are listed.
_LOOKED_AT = 50_000
#: Tasks of a space, so that most of their making is not done one by one.
_MADE_AT_ONCE = 500


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return describe_difference(_sections(old), _sections(new))


def _sections(fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The fixed part in the two-level shape that ``describe_difference`` reads."""
    flat: dict[str, Any] = {}
    for name, value in fixed.items():
        if name == "space":
            flat.update(value)
        else:
            flat[name] = value
    return flat


@dataclass(frozen=True, kw_only=True)
class Workload:
    """``feed`` makes the tasks lazily; ``spec`` says in JSON what they are.

    ``fixed`` is the part of ``spec`` that names the run folder; the rest (seeds, and what a recipe
    calls extendable) only adds tasks. ``space``: that of the tasks, if it may grow during the run;
    None where ``fixed`` may not change at all.
    """

    name: str
    targets: tuple[TargetSpec, ...]
    code: Code
    spec: Mapping[str, Any]
    fixed: Mapping[str, Any]
    total: int
    feed: Callable[[Numbers], Iterator[NewTask]]
    parameters: tuple[str, ...]
    space: Space | None = None
    recipe: Recipe | None = None
    config: Any = None
    warnings: tuple[str, ...] = field(default=())
    retry: RetryPolicy | None = None  # instead of the one that the options mean
    kind: Literal["sweep", "map"] = "sweep"
    #: From an earlier fixed part and the one of now to their differences, a line for each.
    difference: Callable[[Mapping[str, Any], Mapping[str, Any]], list[str]] = _difference
    #: Raises PlanMismatchError for a folder whose ledger shows that it holds something else.
    check: Callable[[RunFolder], None] = lambda folder: None
    #: Called in the session, which holds the run's lock: before the work, and after it, where the
    #: table of the run is not all that is made of it.
    begin: Callable[[RunFolder], None] = lambda folder: None
    finish: Callable[[RunFolder, Ending], None] | None = None
    rehearse: Callable[[RunFolder], bool] | None = None  # see `Rehearsal.call`
    reopens: tuple[TaskState, ...] = ()  # tasks in these states are tried again at this start
    #: Makes what chooses further tasks during the run, for a folder and a number of GPUs per task.
    drive: Callable[[RunFolder, Numbers, Clock, float], Driver] | None = None
    search: SearchSpec | None = None  # what the driver chooses by
    #: With --python: the code as this interpreter finds it, which is what 0.1.0 recorded at first.
    code_before: Code | None = None

    @property
    def is_map(self) -> bool:
        return self.kind == "map"

    @property
    def digest(self) -> str:
        """A hash of ``fixed``, for the name of the run folder."""
        return hashlib.blake2b(to_json(dict(self.fixed)), digest_size=16).hexdigest()

    @property
    def code_id(self) -> str:
        return code_id(self.code)

    @property
    def plan_id(self) -> str:
        """A hash of ``spec``, which is equal for equal sets of tasks."""
        return plan_id_of(self.spec)


def in_folder(workload: Workload, folder: RunFolder) -> Workload:
    """The workload with what was written in a notebook where workers find it."""
    targets = (
        dataclasses.replace(spec, location=placed(spec.location, folder.path))
        for spec in workload.targets
    )
    return dataclasses.replace(workload, targets=tuple(targets))


def for_python(workload: Workload, python: Path | None) -> Workload:
    """The workload of a sweep with its code as ``--python`` finds it, which has packages of its
    own: a project's are often installed there alone, and editable."""
    if python is None or workload.is_map:
        return workload
    from muster.farm.executors.worker_process import worker_python  # few give --python

    specs = [spec for spec in workload.targets if spec.kind == "function"]
    found: dict[str, str] = {}
    for spec in specs:
        base = Path(spec.base_folder or Path.cwd())
        found |= code_of([ref_of_spec(spec)], base, worker_python(python).modules)
    return dataclasses.replace(workload, code=found, code_before=workload.code)


def ref_of_spec(spec: TargetSpec) -> TargetRef:
    is_file = spec.location.endswith(".py")
    return TargetRef("file" if is_file else "module", spec.location, spec.attribute)


def plan_id_of(spec: Mapping[str, Any]) -> str:
    return hashlib.blake2b(to_json(dict(spec)), digest_size=16).hexdigest()


def of_function(ref: TargetRef, space: Space, signature: Signature | None = None) -> Workload:
    """Tasks that call a function once per parameter set.

    Raises TargetError where the function cannot be found or loaded, and UsageError for a parameter
    that it does not take.
    """
    known = signature or look(ref)
    typed = convert_space(space, known)
    batch = known.batch
    spec = TargetSpec(
        name=ref.name,
        location=ref.location,
        attribute=ref.attribute,
        base_folder=str(Path.cwd()),
        max_batch=batch.max_batch if batch else 0,
        max_batch_on_cpu=batch.max_batch_on_cpu if batch else None,
        static=batch.static if batch else (),
    )
    name = ref.attribute.rpartition(".")[2]
    workload = over_space(name, spec, typed, code_of([ref]))
    if known.note:
        workload = dataclasses.replace(workload, warnings=(f"{name}: {known.note}",))
    return workload


def of_target_text(text: str, space: Space) -> Workload:
    return of_function(parse_target(text), space)


def of_command(argv: list[str], space: Space, *, shell: bool, metrics_from: str = "") -> Workload:
    """Tasks that run a command once per parameter set, with the values filled in as arguments.

    ``metrics_from``: where its numbers over time are, see `muster.farm.metrics`. Raises
    UsageError where there is no such program, or a place in the command has no parameter.
    """
    if metrics_from:
        from muster.farm.metrics import parse_source

        parse_source(metrics_from)
    check_places(argv, space.names)
    if not shell and " " in argv[0] and shutil.which(argv[0]) is None:
        raise UsageError(
            f"Cannot run {argv[0]!r}: it is one word, the name of a program with spaces in it.",
            hint=f"take the quotes away: -- {' '.join(argv)}   or hand it to a shell with --shell.",
        )
    is_known = shell or argv[0] == OWN_PROGRAM or names_in(argv[0])
    if not is_known and shutil.which(argv[0]) is None:
        raise UsageError(
            f"Cannot run {argv[0]!r}: no such program on the PATH.",
            hint="check the spelling, or give its path (./train.sh). Shell syntax needs --shell.",
        )
    line = (shell_line(argv),) if shell else tuple(argv)
    # The name is part of the run folder's: `nice -19 ./train.sh` and `perl -0777` stay as they are.
    words = [Path(part).stem for part in argv[:2] if kind_of_word(part, is_ours=False) == "value"]
    name = words[-1] if words else "command"
    shown = ("sh -c: " if shell else "") + " ".join(argv)
    spec = TargetSpec(name=shown, kind="command", argv=line, shell=shell, metrics_from=metrics_from)
    return over_space(name, spec, as_texts(space), code_of_command(argv))


def of_recipe(recipe: Recipe, config: Any) -> Workload:
    """The tasks a recipe plans for a config; TargetError where its hooks fail."""
    targets = []
    refs = [parse_target(text) for text in recipe.targets.values()]
    for ref in refs:
        known = look(ref)
        targets.append(
            TargetSpec(
                name=ref.name,
                location=ref.location,
                attribute=ref.attribute,
                base_folder=str(Path.cwd()),
                max_batch=known.batch.max_batch if known.batch else 0,
                max_batch_on_cpu=known.batch.max_batch_on_cpu if known.batch else None,
                static=known.batch.static if known.batch else (),
            )
        )
    by_word = dict(zip(recipe.targets, targets, strict=True))
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    fixed = {k: v for k, v in values.items() if k not in recipe.extendable}

    def feed(numbers: Numbers) -> Iterator[NewTask]:
        from muster.farm.task import NewTask  # here: a dry run has no ledger

        makers = {
            word: (spec, numbers[spec.name], payload_and_key(spec.name))
            for word, spec in by_word.items()
        }
        for task in recipe.planned(config):
            spec, number, make = makers[task.target]
            params = dict(task.params)
            payload, key = make(params)
            yield NewTask(key, number, payload, _group(spec, params), task.priority)

    for _ in islice(recipe.planned(config), _LOOKED_AT):
        pass  # a wrong plan is told before there is a run
    return Workload(
        name=recipe.name,
        targets=tuple(targets),
        code=code_of(refs),
        spec={"recipe": recipe.name, "config": values},
        fixed={"recipe": recipe.name, "config": fixed},
        total=recipe.count(config),
        feed=feed,
        parameters=(),
        recipe=recipe,
        config=config,
        warnings=tuple(recipe.forecast(config)),
    )


def over_space(name: str, spec: TargetSpec, space: Space, code: Code) -> Workload:
    described = space.to_spec()
    fixed = {key: value for key, value in described.items() if key != "seeds"}
    if spec.static:
        _check_static(spec, space.names)

    def feed(numbers: Numbers) -> Iterator[NewTask]:
        from muster.farm.task import NewTask  # here: a dry run has no ledger

        number, make = numbers[spec.name], payload_and_key(spec.name)
        if not spec.is_batched:
            key_of = key_of_payload(spec.name)
            payloads, priorities = space.payloads(), space.priorities()
            while some := list(islice(payloads, _MADE_AT_ONCE)):
                keys = map(key_of, some)
                yield from map(
                    NewTask._make, zip(keys, repeat(number), some, repeat(0), priorities)
                )
            return
        for params, priority in zip(space, space.priorities(), strict=False):
            payload, key = make(params)
            yield NewTask(key, number, payload, _group(spec, params), priority)

    return Workload(
        name=name,
        targets=(spec,),
        code=code,
        spec={"target": spec.name, "space": described},
        fixed={"target": spec.name, "space": fixed},
        total=len(space),
        feed=feed,
        parameters=space.names,
        space=space,
    )


def _group(spec: TargetSpec, params: Mapping[str, Any]) -> int:
    """Equal for tasks that may share a call: a number from the values of the static names."""
    if not spec.static:
        return 0
    values = encode_canonical([params.get(name) for name in spec.static])
    return int.from_bytes(hashlib.blake2b(values, digest_size=7).digest(), "big")


def _check_static(spec: TargetSpec, names: Iterable[str]) -> None:
    unknown = [name for name in spec.static if name not in set(names)]
    if unknown and len(unknown) == len(spec.static):
        raise UsageError(
            f"{spec.name} is batched by {', '.join(spec.static)}; the sweep sets none of them.",
            hint="name in static=(…) only parameters that every task has.",
        )


def as_texts(space: Space) -> Space:
    """The space with a command's values as the user typed them: ``1e-3`` is not ``0.001``."""

    def axes(pairs: tuple[tuple[str, tuple[object, ...]], ...]) -> Any:
        return tuple((name, tuple(map(_plain, values))) for name, values in pairs)

    listed = space.listed and dataclasses.replace(
        space.listed, rows=tuple(tuple(map(_plain, row)) for row in space.listed.rows)
    )
    return dataclasses.replace(
        space, grid=axes(space.grid), zipped=axes(space.zipped), listed=listed
    )


def _plain(value: object) -> object:
    return str(value) if isinstance(value, str) else value


def check_executor_for(workload: Workload, options: SweepOptions) -> None:
    """Raise UsageError where an option of the executor has no effect on this workload."""
    check_executor(options.executor)
    if options.python is not None:
        from muster.farm.executors.worker_process import interpreter, worker_python

        if options.executor != "local":
            raise UsageError(
                f"--python chooses the interpreter of workers on this machine, and has no effect "
                f"with --on {options.executor}.",
                hint="drop one of them; if the run was begun with --python, by typing its command "
                "again without it.",
            )
        if any(spec.kind == "command" for spec in workload.targets):
            raise UsageError(
                "--python chooses the interpreter of functions, and has no effect on a command.",
                hint=f"name it in the command: -- {interpreter(options.python)} train.py …",
            )
        worker_python(options.python)
    search = workload.search
    if search is not None and search.stopping.rule != "none" and options.executor == "inline":
        raise UsageError(
            "--stop has no effect with --on inline: no message is read while a task runs.",
            hint="drop one of them.",
        )
    if search is not None and search.budget.cost is not None and options.per_gpu == "auto":
        raise UsageError(
            "--max-cost needs to know how many workers share a GPU, and --per-gpu auto does not.",
            hint="write a number, such as --per-gpu 3, or limit the search with --search-time 2h.",
        )
    if options.executor == "inline" and any(
        spec.metrics_from.startswith("stdout:") for spec in workload.targets
    ):
        raise UsageError(
            "--metrics-from stdout:REGEX reads the log of a worker, and --on inline has none.",
            hint="drop one of them.",
        )
