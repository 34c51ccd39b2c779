"""Where the problems come from: the words of ``--dataset`` turned into something to open.

Data sets have short names here, with what is in them and who may use them: counts and licences are
those that the data sets' own pages state.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from muster import MissingPackageError, SetupError, UnknownNameError, UsageError
from muster.generation import use_cache_if_unreachable
from muster_recipes.arith.config import MAX_DIFFICULTY
from muster_recipes.arith.problems import make
from muster_recipes.reasoning.config import ReasoningConfig
from muster_recipes.refusals import flag_of

ARITH = "arith"


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """``layout`` is a key of ``rows.LAYOUTS``, or empty for columns by name. ``configs``: the first
    is the default unless ``joins_configs``, which reads all of them, in this order. ``splits``: the
    first is the default.
    """

    key: str
    hub: str
    layout: str
    columns: tuple[str, ...]
    configs: tuple[str, ...] = ()
    joins_configs: bool = False
    splits: Mapping[str, int]
    licence: str
    about: str


_SUBJECTS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory",
    "prealgebra", "precalculus",
)  # fmt: skip

_ALL = (
    DataSet(
        key=ARITH,
        hub="",
        layout="",
        columns=("problem", "reference_answer"),
        splits={"test": 0},
        licence="made here",
        about="Multi-step arithmetic with answers, made by the arith generator: any number of "
        "problems of --difficulty operations, without network.",
    ),
    DataSet(
        key="gsm8k",
        hub="openai/gsm8k",
        layout="gsm8k",
        columns=("question", "answer"),
        configs=("main", "socratic"),
        splits={"train": 7473, "test": 1319},
        licence="MIT",
        about="Word problems of grade school; the answer stands after ####.",
    ),
    DataSet(
        key="math_qa",
        hub="regisss/math_qa",
        layout="math_qa",
        columns=("Problem", "Rationale", "options", "correct"),
        splits={"train": 29837, "test": 2985, "validation": 4475},
        licence="Apache-2.0",
        about="Multiple choice from GRE and GMAT. A Parquet copy of allenai/math_qa with the same "
        "rows, which is a script that the datasets library no longer runs.",
    ),
    DataSet(
        key="math",
        hub="EleutherAI/hendrycks_math",
        layout="math",
        columns=("problem", "solution"),
        configs=_SUBJECTS,
        joins_configs=True,
        splits={"train": 7500, "test": 5000},
        licence="MIT",
        about="Competition problems in 7 subjects, all of them unless --dataset-config names one. "
        "A copy of hendrycks/math.",
    ),
    DataSet(
        key="asdiv",
        hub="EleutherAI/asdiv",
        layout="asdiv",
        columns=("body", "question", "answer"),
        splits={"validation": 2305},
        licence="CC-BY-NC-4.0",
        about="Word problems of elementary school.",
    ),
    DataSet(
        key="aqua",
        hub="deepmind/aqua_rat",
        layout="aqua",
        columns=("question", "options", "correct"),
        configs=("raw", "tokenized"),
        splits={"train": 97467, "validation": 254, "test": 254},
        licence="Apache-2.0",
        about="Algebra, multiple choice.",
    ),
    DataSet(
        key="numina_math",
        hub="AI-MO/NuminaMath-1.5",
        layout="numina_math",
        columns=("problem", "answer", "solution"),
        splits={"train": 896215},
        licence="Apache-2.0",
        about="Competition problems from many sources. Proofs have no reference answer.",
    ),
)
DATA_SETS: Mapping[str, DataSet] = MappingProxyType({item.key: item for item in _ALL})


def list_datasets() -> list[dict[str, str]]:
    """Rows for ``--list-datasets``: key, source, splits with sizes, licence, about."""
    return [
        {
            "key": item.key,
            "source": item.hub or "made here",
            "splits": _splits(item),
            "licence": item.licence,
            "about": item.about,
        }
        for item in _ALL
    ]


def dataset_info(key: str) -> dict[str, Any]:
    """All of one data set, for ``--dataset-info``; UnknownNameError lists the keys."""
    if key not in DATA_SETS:
        raise UnknownNameError("data set", key, DATA_SETS)
    item = DATA_SETS[key]
    return {
        "key": item.key,
        "about": item.about,
        "source": f"hf:{item.hub}" if item.hub else "made here by the arith generator",
        "configurations": ", ".join(item.configs) or "one",
        "default": "all of them" if item.joins_configs else (item.configs or ("it",))[0],
        "splits": _splits(item),
        "columns": ", ".join(item.columns),
        "licence": item.licence,
    }


def _splits(item: DataSet) -> str:
    return ", ".join(
        f"{name} {size:,}" if size else f"{name} (any number)" for name, size in item.splits.items()
    )


_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".gz", ".zst")
HUB = "hf:"


@dataclass(frozen=True, kw_only=True)
class Input:
    """Either ``text`` for the door of sources (a path or ``hf:NAME`` with ``config`` and ``split``,
    empty for the data set's own default) or ``records``, which are made while they are read.
    """

    text: str = ""
    config: str = ""
    split: str = ""
    records: Iterator[dict[str, Any]] | None = None


def source_of(config: ReasoningConfig) -> Input:
    """What to read, all of it: which records of it is the reader's business.

    UnknownNameError for a word that is no key, no file and no Hugging Face name; UsageError for
    flags that have no meaning for this data set.
    """
    name = config.dataset
    if name == ARITH:
        return Input(records=_arith(config))
    _refuse(config, ("difficulty", "num_problems"), name, hint="it is for --dataset arith.")
    if name in DATA_SETS:
        return _known(config, DATA_SETS[name])
    if name.startswith(HUB):
        return Input(text=name, config=config.dataset_config, split=config.split or "train")
    if is_path(name):
        _refuse(config, ("dataset_config", "split"), f"the file {name}")
        return Input(text=name)
    if name.count("/") == 1 and not name.startswith((".", "/")):
        return Input(text=HUB + name, config=config.dataset_config, split=config.split or "train")
    raise UnknownNameError("data set", name, DATA_SETS)


def _refuse(
    config: ReasoningConfig, names: Iterable[str], what: str, hint: str | None = None
) -> None:
    """UsageError for a flag that was given and has no meaning for ``what``."""
    for name in names:
        if (value := getattr(config, name)) != getattr(ReasoningConfig, name):
            raise UsageError(f"{flag_of(name)} {value} has no meaning for {what}.", hint=hint)


def is_path(text: str) -> bool:
    """Whether a text names files and not a data set of the hub.

    It does with the ending of a file, a slash at its end, a star, a leading dot, or if it exists.
    """
    return (
        text.lower().endswith(_FILES)
        or text.endswith("/")
        or text.startswith(("./", "../", "/", "~"))
        or any(character in text for character in "*?[")
        or Path(text).exists()
    )


def check_columns(config: ReasoningConfig, columns: Iterable[str]) -> None:
    """Raise UsageError early when a column that will be read is not among ``columns``."""
    known = list(columns)
    item = DATA_SETS.get(config.dataset)
    if item is not None and not config.problem_column and not config.answer_column:
        wanted = dict.fromkeys(item.columns, "")
        wanted.pop("Rationale", None)  # shown as known, and not read
    else:
        wanted = {config.problem_column or "problem": "--problem-column"}
        if config.answer_column:
            wanted[config.answer_column] = "--answer-column"
    for column, flag in wanted.items():
        if column not in known:
            choose = f"; name one of them with {flag}." if flag else "."
            raise UsageError(
                f"{config.dataset} has no column {column!r}.",
                hint=f"its columns are {', '.join(known)}{choose}",
            )


def _known(config: ReasoningConfig, item: DataSet) -> Input:
    if config.dataset_config and config.dataset_config not in item.configs:
        raise UnknownNameError(
            f"configuration of {item.key}", config.dataset_config, item.configs or ["(only one)"]
        )
    if config.split and config.split not in item.splits:
        raise UnknownNameError(f"split of {item.key}", config.split, item.splits)
    split = config.split or next(iter(item.splits))
    if item.joins_configs and not config.dataset_config:
        return Input(records=_joined(item, split))
    chosen = config.dataset_config or (item.configs[0] if item.configs else "")
    return Input(text=HUB + item.hub, config=chosen, split=split)


def _arith(config: ReasoningConfig) -> Iterator[dict[str, Any]]:
    if not 1 <= config.difficulty <= MAX_DIFFICULTY:
        raise UsageError(
            f"--difficulty {config.difficulty} is not a number of operations from 1 to "
            f"{MAX_DIFFICULTY}."
        )
    _refuse(config, ("dataset_config", "split"), "the data set arith")
    return (_arith_record(config.difficulty, index) for index in range(config.num_problems))


def _arith_record(difficulty: int, index: int) -> dict[str, Any]:
    problem = make(0, "test", index, difficulty)
    return {"id": index, "problem": problem.text, "reference_answer": str(problem.answer)}


def _joined(item: DataSet, split: str) -> Iterator[dict[str, Any]]:
    """The rows of all configurations, each one with its name in the column ``subject``."""
    if importlib.util.find_spec("datasets") is None:
        raise MissingPackageError(f"Reading {item.key} from the hub", "datasets", "datasets")
    return _rows(item, split)


def _rows(item: DataSet, split: str) -> Iterator[dict[str, Any]]:
    use_cache_if_unreachable()
    import datasets  # type: ignore[import-untyped]

    for name in item.configs:
        try:
            rows = datasets.load_dataset(item.hub, name, split=split)
        except (OSError, ValueError) as error:
            raise SetupError(
                f"Cannot load {item.hub} ({name}, {split}): {error}",
                hint="check the network, or give a local copy: --dataset FILE --problem-column "
                "problem --answer-column solution.",
            ) from error
        for row in rows:
            yield {"subject": name, **row}
