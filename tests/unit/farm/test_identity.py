from __future__ import annotations

import pytest

from muster.farm.canonical import payload_and_key
from muster.run.folder import name_with_hash


def key_of(target: str, params: dict[str, object]) -> bytes:
    return payload_and_key(target)(params)[1]


def test_the_key_is_pinned() -> None:
    """Changing it would orphan every result in every existing run folder."""
    key = key_of("train.py:train", {"lr": 0.001, "seed": 3})
    assert key.hex() == "1f2f71f2392e589b61c3fdb2be988428"


def test_the_key_ignores_the_order_of_the_mapping() -> None:
    key = key_of("a:f", {"x": 1, "y": 2})
    assert key == key_of("a:f", {"y": 2, "x": 1})


def test_the_key_depends_on_everything_else() -> None:
    tasks: list[tuple[str, dict[str, object]]] = [
        ("a:f", {}),
        ("a:g", {}),
        ("a:f", {"x": 1}),
        ("a:f", {"x": 1.0}),
        ("a:f", {"x": True}),
        ("a:f", {"x": "1"}),
        ("a:f", {"x": None}),
        ("a:f", {"x": float("nan")}),
        ("a:f", {"x": 1, "seed": 0}),
    ]
    assert len({key_of(*task) for task in tasks}) == len(tasks)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("ssm", "ssm-abcdef"),
        ("path/to/train.py:main", "path-to-train.py-main-abcdef"),
        ("../..", "run-abcdef"),
        ("", "run-abcdef"),
        ("a b\nc", "a-b-c-abcdef"),
        (".hidden", "hidden-abcdef"),
        ("größe", "gr-e-abcdef"),
        ("x" * 300, "x" * 80 + "-abcdef"),
    ],
)
def test_folder_names_are_safe(name: str, folder: str) -> None:
    assert name_with_hash(name, "abcdef0123") == folder
