"""What a task draws from a global generator follows from its key, whatever its worker has done."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Two tasks of a worker: the first of those named on the command line imports within a task.
PROGRAM = """
import os, sys
from muster.farm.worker.perform import Performer
from muster.farm.worker.seeding import Generators
assert not {"random", "numpy", "torch"} & sys.modules.keys(), "a worker brings none of them"
generators = Generators()
generators.watch_imports()

def random():
    import random
    return random.random()

def numpy():
    import numpy
    return float(numpy.random.rand())

def without_numpy():
    sys.modules["numpy"] = None
    return 0

def children():
    for _ in range(2):
        if os.fork() == 0:
            print(random(), numpy(), flush=True)
            os._exit(0)
        os.wait()
    return random()

for word in sys.argv[1:]:
    name, key = word.split("=")
    generators.fix(key)
    print(globals()[name](), flush=True)
"""
A, B = "0123456789abcdef" * 2, "fedcba9876543210" * 2


def drawn(*words: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=True
    )
    return [float(line) for line in done.stdout.split()]


@pytest.mark.parametrize("name", ["random", "numpy"])
def test_a_task_draws_the_same_whether_it_imports_the_generator_or_finds_it(name: str) -> None:
    first, second, again = drawn(f"{name}={A}", f"{name}={B}", f"{name}={A}")
    assert first == again != second
    assert drawn(f"{name}={B}") == [second]


def test_the_numbers_are_those_of_a_seed_from_the_key() -> None:
    import random

    assert drawn(f"random={A}") == [random.Random(int(A[:8], 16)).random()]


def test_children_of_a_task_that_import_a_generator_do_not_draw_the_same() -> None:
    *of_children, own = drawn(f"children={A}")
    assert len({*of_children, own}) == 5
    assert drawn(f"random={A}") == [own]


def test_tasks_go_on_where_one_has_seen_to_it_that_nobody_imports_numpy() -> None:
    assert drawn(f"without_numpy={A}", f"random={B}")[1:] == drawn(f"random={B}")
