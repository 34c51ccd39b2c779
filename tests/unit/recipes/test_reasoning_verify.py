"""Final answers against reference answers, with the real comparer in its own process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.processes import command_line

from muster_recipes.reasoning import referee
from muster_recipes.reasoning.referee import Referee
from muster_recipes.reasoning.verify import (
    as_number,
    read_choices,
    tidy,
    verify,
    with_choices,
)


@pytest.fixture(scope="module")
def judge() -> Iterator[Referee]:
    """Its comparer begins here, and not in a test, which it would outlive."""
    judge = Referee()
    assert judge.compare("1/2", "0.5") is True
    yield judge
    judge.close()


def _never(answer: str, reference: str) -> bool | None:
    raise AssertionError(f"asked about {answer!r} and {reference!r}")


def test_words_that_change_a_number_are_no_units() -> None:
    for text in (
        "3 percent",
        "3 halves",
        "3 or 4",
        "2 mod 5",
        "3xy",
        "3 x",
    ):
        assert as_number(text) is None, text


@pytest.mark.parametrize(
    ("answer", "reference", "verdict"),
    [
        ("72", "72", "correct"),
        ("72 dollars", "72", "correct"),
        ("$1,234.50", "1234.5", "correct"),
        (r"\$18", "18", "correct"),
        (r"12 \text{ cm}^2", "12", "correct"),
        ("18 apples.", "18", "correct"),
        ("12cm^2", "12 square centimetres", "correct"),
        ("60 km/h", "60", "correct"),
        ("-5", "5", "wrong"),
        ("71", "72", "wrong"),
        (r"\text{Friday}", "friday", "correct"),
        (r"$\dfrac{1}{2}$", r"\frac{1}{2}", "correct"),
        (None, "72", "unparsed"),
        ("  ", "72", "unparsed"),
        ("72", None, "no_reference"),
        ("72", " ", "no_reference"),
        (None, None, "no_reference"),
    ],
)
def test_rules_decide_plain_answers(
    answer: str | None, reference: str | None, verdict: str
) -> None:
    assert verify(answer, reference, "", _never) == verdict


def test_the_library_decides_the_rest(judge: Referee) -> None:
    cases = [
        ("0.5", r"\frac{1}{2}", "correct"),
        (r"50\%", "0.5", "correct"),
        ("x=12", "12", "correct"),
        ("(x+1)^2", "x^2+2x+1", "correct"),
        (r"2\sqrt{2}", r"\sqrt{8}", "correct"),
        (r"\{2,1\}", r"\{1,2\}", "correct"),
        (r"12\pi \text{ cm}", r"12 \pi", "correct"),
        ("(2,1)", "(1,2)", "wrong"),
        ("0.3333", r"\frac{1}{3}", "wrong"),
        ("3x", "3", "wrong"),
        (r"\frac{", "7", "unparsed"),
        ("3xy", "3", "wrong"),
        (r"2 \pi", "2", "wrong"),
        ("2 sin x", "2", "wrong"),
        ("9" * 3000, "7 x", "unparsed"),
    ]
    found = [verify(answer, reference, "", judge.compare) for answer, reference, _ in cases]
    assert found == [verdict for _, _, verdict in cases]


def test_choices_are_told_by_letter_or_by_value(judge: Referee) -> None:
    problem = with_choices("How much?", {"A": "21", "B": r"\frac{1}{2}", "C": "none of these"})
    assert read_choices(problem) == {"A": "21", "B": r"\frac{1}{2}", "C": "none of these"}
    for answer in ("B", "(b)", "B)", r"\text{B}", "B) 0.5", "0.5", r"$\frac{2}{4}$"):
        assert verify(answer, "B", problem, judge.compare) == "correct", answer
    for answer in ("A", "(c)", "21", "none of these"):
        assert verify(answer, "B", problem, judge.compare) == "wrong", answer
    assert verify("Option B", "B", problem, judge.compare) == "correct"
    assert verify("a = 21", "A", problem, judge.compare) == "correct", "no letter but a value"
    assert verify("b = 21", "B", problem, judge.compare) == "wrong"
    assert verify("None of these", "C", problem, judge.compare) == "correct"
    assert verify("A", "A", "A is a set. Which one?", judge.compare) == "correct"


@given(
    st.integers(-(10**9), 10**9),
    st.sampled_from(["", " cm", " apples", r" \text{ km/h}", ".", "%d"]),
)
def test_a_number_is_the_same_however_it_is_written(value: int, behind: str) -> None:
    written = f"{value:,}" + behind.replace("%d", "")
    assert as_number(tidy(written)) == value
    assert verify(written, str(value), "", _never) == "correct"
    assert verify(written, str(value + 1), "", _never) == "wrong"


def test_a_question_that_takes_too_long_has_no_answer() -> None:
    judge = Referee(timeout_s=1.0)
    try:
        assert judge.compare("9^{9^{9^{9}}}", "9") is None
        assert judge.compare("1/2", "0.5") is True
    finally:
        judge.close()


def comparers() -> list[psutil.Process]:
    """Those of this process; other tests may have left it helpers of their own."""
    return [p for p in psutil.Process().children() if "referee_process.py" in command_line(p)]


def test_a_comparer_that_was_killed_is_started_again() -> None:
    before, judge = comparers(), Referee()
    try:
        assert judge.compare("1/2", "0.5") is True
        [process] = set(comparers()) - set(before)
        os.kill(process.pid, signal.SIGKILL)
        psutil.wait_procs([process])
        assert judge.compare("1/2", "0.25") is False
    finally:
        judge.close()


def test_the_comparer_ends_with_a_worker_that_was_killed() -> None:
    code = (
        "import time, psutil; from muster_recipes.reasoning.referee import Referee\n"
        "judge = Referee(); judge.compare('1/2', '0.5')\n"
        "print(psutil.Process().children()[0].pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        process = psutil.Process(int(worker.stdout.readline()))
        worker.kill()
    _, alive = psutil.wait_procs([process], timeout=300)
    assert not alive


def test_threads_get_their_own_answers(judge: Referee) -> None:
    def ask(number: int) -> bool | None:
        return judge.compare(f"{number}/7", f"{number + number % 2}/7")

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(1, 41)))
    assert found == [number % 2 == 0 for number in range(1, 41)]


def test_stages_share_one_comparer() -> None:
    before = comparers()
    first, second = referee.borrow(), referee.borrow()
    assert first is second
    assert first.compare("1/2", "0.5") is True
    referee.give_back()
    assert len(comparers()) == len(before) + 1
    referee.give_back()
    assert comparers() == before
