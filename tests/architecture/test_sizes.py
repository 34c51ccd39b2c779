from __future__ import annotations

from pathlib import Path
from statistics import median

SOURCE = Path(__file__).parents[2] / "src"


def lengths() -> dict[str, int]:
    return {
        path.relative_to(SOURCE).as_posix(): len(path.read_text().splitlines())
        for path in SOURCE.rglob("*.py")
        if path.name != "__init__.py"
    }


def test_modules_are_small() -> None:
    sizes = lengths()
    # Not less: fewer modules are wanted too, and what folds two into one moves the middle up.
    assert median(sizes.values()) <= 250
    over = {name: size for name, size in sizes.items() if size > 400}
    assert len(over) <= len(sizes) / 10, over
    assert max(sizes.values()) <= 600, over


def test_names_say_something() -> None:
    empty = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert [name for name in lengths() if Path(name).stem in empty] == []
