"""The questions of ``muster launch`` as a table: pure functions of what is known so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from muster.base.errors import UsageError
from muster.cli.launcher.answers import KINDS, Answers, num_ranks, used_by
from muster.rl.config import PpoConfig
from muster.train.batches import learning_rate, plan_batches
from muster.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """``number`` as in cuda:N; ``busy``: why it is not free, None for a free one."""

    number: int
    name: str
    memory_total_mib: int | None
    memory_free_mib: int | None
    busy: str | None = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What there is. ``tasks`` and ``agents``: recipes to train, with their default settings;
    ``maps``: recipes for a data set, and whether they read one of their own."""

    gpus: tuple[Gpu, ...]
    why_no_gpu: str
    num_cores: int
    tasks: Mapping[str, Mapping[str, Any]]
    sweeps: tuple[str, ...]
    agents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    maps: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    value: str
    title: str
    help: str = ""


@dataclass(frozen=True, kw_only=True)
class Question:
    """``form``: pick one of the choices, pick several, or type. ``check``: what is wrong with a
    typed answer, None for nothing. ``parse``: from the text to the answer."""

    name: str
    text: str
    help: str
    form: Literal["one", "many", "text", "path"] = "text"
    choices: tuple[Choice, ...] = ()
    default: str = ""
    check: Callable[[str], str | None] = lambda text: None
    parse: Callable[[str], Any] = str


#: What takes less than a minute on a laptop comes first.
_QUICK = ("digits", "har")

Maker = Callable[[Machine, Answers], Question | None]


def questions(machine: Machine, answers: Answers) -> Sequence[Question]:
    """What is still to be asked, in order; each one may depend on those before it."""
    found = (make(machine, answers) for name, make in _TABLE if getattr(answers, name) is None)
    return [question for question in found if question is not None]


def check_given(machine: Machine, answers: Answers) -> None:
    """UsageError for an answer, given as a flag, that this kind of work has no use for or that
    would not be taken if it were typed. Devices are left to the command itself."""
    if answers.kind is None:
        return
    makers = dict(_TABLE)
    for name, value in answers.given().items():
        flag = f"--{name.replace('_', '-')}"
        if name not in used_by(answers.kind):
            raise UsageError(
                f"{flag} means nothing to --kind {answers.kind}.", hint="leave it out."
            )
        if name in ("devices", "gpu_ids", "args", "run_dir") or name not in makers:
            continue
        question = makers[name](machine, replace(answers, **{name: None}))
        if question is not None:
            answered(answers, question, " ".join(value) if name == "grid" else f"{value}")


def answered(answers: Answers, question: Question, text: str) -> Answers:
    """``answers`` with ``text`` for ``question``; UsageError for a text that cannot be meant."""
    problem = question.check(text)
    if problem is not None:
        flag = question.name.replace("_", "-")
        raise UsageError(f"--{flag} {text!r}: {problem}.", hint=question.help)
    return replace(answers, **{question.name: question.parse(text)})


def _kind(machine: Machine, answers: Answers) -> Question:
    choices = tuple(Choice(name, name, text) for name, text in KINDS.items())
    return Question(
        name="kind",
        text="What kind of work is it?",
        help="train: a model or an agent. run: a script that works under torchrun. sweep: many "
        "experiments. map: a data set.",
        form="one",
        choices=choices,
        default="train",
        check=lambda text: None if text in KINDS else f"one of {', '.join(KINDS)}",
    )


def _target(machine: Machine, answers: Answers) -> Question | None:
    if answers.kind == "train":
        names = (*machine.tasks, *machine.agents)
        quick = [name for name in _QUICK if name in names]
        return Question(
            name="target",
            text="Which task?",
            help=f"a recipe ({', '.join(names)}) or a class of yours, file.py:Class",
            default=next(iter([*quick, *names]), ""),
            check=lambda text: _check_target(text, names),
        )
    if answers.kind == "map":
        return Question(
            name="target",
            text="Through which stages?",
            help=f"file.py:function of one record, or a recipe ({', '.join(machine.maps)})",
            check=lambda text: _check_target(text, tuple(machine.maps)),
        )
    if answers.kind == "run":
        return Question(
            name="target",
            text="Which script?",
            help="a Python file that works under torchrun",
            form="path",
            check=lambda text: None if Path(text).is_file() else "there is no such file",
        )
    return Question(
        name="target",
        text="Which function?",
        help=f"file.py:function, called once per setting, or one of {', '.join(machine.sweeps)}",
        check=lambda text: _check_target(text, machine.sweeps),
    )


def _input(machine: Machine, answers: Answers) -> Question | None:
    if answers.kind != "map" or machine.maps.get(answers.target or "", False):
        return None
    return Question(
        name="input",
        text="Which data?",
        help="a file, folder or pattern of JSONL, CSV or Parquet",
        form="path",
        check=lambda text: None if text.strip() else "the name of a file",
    )


def _output(machine: Machine, answers: Answers) -> Question | None:
    if answers.kind != "map":
        return None
    return Question(
        name="output",
        text="Where shall the result be written?",
        help="a .jsonl, .csv or .parquet file",
        form="path",
        default="output.jsonl",
        check=lambda text: None if text.strip() else "the name of a file",
    )


def _args(machine: Machine, answers: Answers) -> Question | None:
    if answers.kind != "run":
        return None
    return Question(
        name="args",
        text="Arguments of the script?",
        help="what you would type after its name, such as --lr 1e-3; empty for none",
    )


def _devices(machine: Machine, answers: Answers) -> Question | None:
    if answers.gpu_ids is not None or machine.gpus:
        return None
    return Question(
        name="devices",
        text=f"No GPU ({machine.why_no_gpu.rstrip('.')}). How many CPU ranks?",
        help=f"one process per rank; this machine has {machine.num_cores} cores",
        default=str(min(2, machine.num_cores)),
        check=lambda text: None if text.isdigit() and int(text) > 0 else "a number from 1 on",
        parse=lambda text: f"cpu:{text}",
    )


def _gpu_ids(machine: Machine, answers: Answers) -> Question | None:
    if answers.devices is not None or not machine.gpus:
        return None
    free = [str(gpu.number) for gpu in machine.gpus if gpu.busy is None]
    return Question(
        name="gpu_ids",
        text="Which GPUs?",
        help="space marks a GPU, enter goes on; free ones are marked",
        form="many",
        choices=tuple(Choice(str(gpu.number), _title(gpu), gpu.busy or "") for gpu in machine.gpus),
        default=",".join(free or [str(machine.gpus[0].number)]),
        check=lambda text: None if text else "mark at least one",
    )


def _strategy(machine: Machine, answers: Answers) -> Question | None:
    if not _is_task(machine, answers) or _ranks(machine, answers) == 1:
        return None
    choices = (
        Choice("auto", "auto", "ddp on several devices"),
        Choice("ddp", "ddp", "every device has the whole model; gradients are added"),
        Choice("fsdp", "fsdp", "the model is spread over the devices: for what does not fit one"),
        Choice("dp", "dp", "one process for all devices: only to compare"),
    )
    return Question(
        name="strategy",
        text="How shall the devices share the model?",
        help="ddp unless the model does not fit",
        form="one",
        choices=choices,
        default="auto",
        check=_one_of(choices),
    )


def _batch_size(machine: Machine, answers: Answers) -> Question | None:
    if not _is_task(machine, answers):
        return None
    ranks = _ranks(machine, answers)
    default = _defaults(machine, answers).get("batch_size") or 32
    return Question(
        name="batch_size",
        text=f"Samples per device and step? ({ranks} x {default} = {ranks * default} in all)",
        help="what one device gets in one forward; the global batch is that times the devices",
        default=str(default),
        check=lambda text: None if text.isdigit() and int(text) > 0 else "a number from 1 on",
        parse=int,
    )


def _lr_scaling(machine: Machine, answers: Answers) -> Question | None:
    # A rate of the recipe's own is never scaled: there is nothing to choose then.
    if not _is_task(machine, answers) or answers.lr is not None or _ranks(machine, answers) == 1:
        return None
    if _defaults(machine, answers).get("lr") is not None:
        return None
    choices = tuple(
        Choice(rule, f"{rule}: {_lr_words(machine, answers, rule)}", help)
        for rule, help in (
            ("none", "the rate of one device, whatever the global batch is"),
            ("linear", "times the number of devices (Goyal et al. 2017)"),
            ("sqrt", "times its square root (Krizhevsky 2014)"),
        )
    )
    return Question(
        name="lr_scaling",
        text="How does the learning rate follow the global batch?",
        help="an explicit --lr is taken as it is",
        form="one",
        choices=choices,
        default=str(_defaults(machine, answers).get("lr_scaling", "none")),
        check=_one_of(choices),
    )


def _lr(machine: Machine, answers: Answers) -> Question | None:
    if answers.kind != "train" or answers.lr_scaling is not None:
        return None
    return Question(
        name="lr",
        text="Learning rate?",
        help="a number such as 3e-4",
        default=f"{_base_lr(machine, answers):g}",
        check=lambda text: None if _positive(text) else "a number greater than 0",
        parse=float,
    )


def _precision(machine: Machine, answers: Answers) -> Question | None:
    if not _is_task(machine, answers):
        return None
    on_gpu = bool(machine.gpus) and not (answers.devices or "").startswith("cpu")
    every = (
        Choice("auto", "auto", "bf16 where the GPU has it, else fp16; fp32 on a CPU"),
        Choice("fp32", "fp32", "exact, and slow on a GPU"),
        Choice("bf16", "bf16", "half the memory, no loss scaling"),
        Choice("tf32", "tf32", "fp32 with products rounded to 10 bits; Ampere and later"),
        Choice("fp16", "fp16", "half the memory, with loss scaling"),
    )
    choices = every if on_gpu else every[:3]
    return Question(
        name="precision",
        text="In which precision?",
        help="auto, unless you know better",
        form="one",
        choices=choices,
        default="auto",
        check=_one_of(choices),
    )


def _grid(machine: Machine, answers: Answers) -> Question | None:
    if answers.kind != "sweep" or answers.target in machine.sweeps:
        return None
    return Question(
        name="grid",
        text="Which settings?",
        help="NAME=V1,V2 words; all combinations are run, as in lr=1e-3,1e-2 width=64,128",
        check=_check_grid,
        parse=lambda text: tuple(text.split()),
    )


def _seeds(machine: Machine, answers: Answers) -> Question | None:
    if answers.kind != "sweep" or answers.target in machine.sweeps:
        return None
    return Question(
        name="seeds",
        text="How many seeds for each setting?",
        help="a number (3), some (3,5,8) or from:to (10:20)",
        default="1",
    )


def _run_dir(machine: Machine, answers: Answers) -> Question:
    stem = Path((answers.target or "run").partition(":")[0]).stem
    return Question(
        name="run_dir",
        text="Where shall everything be kept?",
        help="a folder; the same command on the same folder goes on where it stopped",
        form="path",
        default=f"runs/{stem}",
        check=lambda text: None if text.strip() else "the name of a folder",
    )


_TABLE: tuple[tuple[str, Maker], ...] = (
    ("kind", _kind),
    ("target", _target),
    ("input", _input),
    ("output", _output),
    ("args", _args),
    ("grid", _grid),
    ("seeds", _seeds),
    ("devices", _devices),
    ("gpu_ids", _gpu_ids),
    ("strategy", _strategy),
    ("batch_size", _batch_size),
    ("lr_scaling", _lr_scaling),
    ("lr", _lr),
    ("precision", _precision),
    ("run_dir", _run_dir),
)


def _ranks(machine: Machine, answers: Answers) -> int:
    return num_ranks(answers, len(machine.gpus), machine.num_cores)


def _defaults(machine: Machine, answers: Answers) -> Mapping[str, Any]:
    target = answers.target or ""
    return machine.tasks.get(target) or machine.agents.get(target) or {}


def _is_task(machine: Machine, answers: Answers) -> bool:
    """Whether samples are learnt from; an agent has other settings."""
    return answers.kind == "train" and answers.target not in machine.agents


def _base_lr(machine: Machine, answers: Answers) -> float:
    defaults = _defaults(machine, answers)
    is_agent = answers.target in machine.agents
    default = PpoConfig().lr if is_agent else TrainConfig().base_lr
    return float(defaults.get("lr") or defaults.get("base_lr") or default)


def _lr_words(machine: Machine, answers: Answers, rule: str) -> str:
    """The rate that a rule gives, as the training itself will compute and print it."""
    config = TrainConfig.of(
        {},
        base_lr=_base_lr(machine, answers),
        lr_scaling=rule,
        batch_size=answers.batch_size or 32,
    )
    _, words = learning_rate(config, plan_batches(config, _ranks(machine, answers)))
    return words


def _title(gpu: Gpu) -> str:
    free = "" if gpu.memory_free_mib is None else f", {gpu.memory_free_mib:,} MiB free"
    total = "" if gpu.memory_total_mib is None else f" of {gpu.memory_total_mib:,}"
    return f"cuda:{gpu.number} {gpu.name}{free}{total}" + (f" ({gpu.busy})" if gpu.busy else "")


def _check_target(text: str, known: Sequence[str]) -> str | None:
    file, colon, attribute = text.partition(":")
    if text in known:
        return None
    if not colon or not attribute:
        return f"neither {', '.join(known)} nor file.py:NAME"
    is_module = "/" not in file and not file.endswith(".py")
    return None if is_module or Path(file).is_file() else f"there is no file {file}"


def _check_grid(text: str) -> str | None:
    wrong = [word for word in text.split() if "=" not in word.strip("=")]
    if wrong:
        return f"{wrong[0]} is not NAME=V1,V2"
    return None if text.split() else "at least one NAME=V1,V2"


def _one_of(choices: Sequence[Choice]) -> Callable[[str], str | None]:
    values = [choice.value for choice in choices]
    return lambda text: None if text in values else f"one of {', '.join(values)}"


def _positive(text: str) -> bool:
    try:
        value = float(text)
    except ValueError:
        return False
    return value > 0 and math.isfinite(value)
