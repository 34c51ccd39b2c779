"""The data sets of the recipe by short name: where they are, what is in them, who may use them.

Counts and licences are those that the data sets' own pages state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from muster import UnknownNameError

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
