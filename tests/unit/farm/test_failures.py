"""When two failures are one, and what a death means."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.farm.decisions import RetryPolicy, death_as_finished, fingerprint
from muster.farm.events import WorkerDied
from muster.farm.outcomes import REASONS, outcome_of_output, signal_name
from muster.farm.task import Finished, Outcome, TaskState

TRACE = 'Traceback:\n  File "a.py", line {line}, in f\n    g({arg})\nValueError: loss {value}\n'


def failure(line: int = 3, value: object = 1, arg: str = "x", **changes: object) -> Finished:
    base = Finished(
        1, 1, Outcome.EXCEPTION, 0.0, 0.0, 0, 0, None,
        message=f"ValueError: loss {value}",
        trace=TRACE.format(line=line, value=value, arg=arg),
    )  # fmt: skip
    return base._replace(**changes)


@given(st.floats(0, 1e9), st.integers(0, 2**48), st.integers(1, 100))
def test_values_addresses_and_tasks_do_not_tell_failures_apart(
    value: float, address: int, task_id: int
) -> None:
    one = failure(value=f"{value:f} of <T object at {address:#x}>", task_id=task_id, seconds=value)
    assert fingerprint(one) == fingerprint(failure(value="0.5 of <T object at 0x1>"))


def test_the_line_the_type_and_the_outcome_do() -> None:
    marks = {
        fingerprint(failure()),
        fingerprint(failure(line=4)),
        fingerprint(failure(arg="y")),
        fingerprint(failure(message="KeyError: loss 1")),
        fingerprint(failure(outcome=Outcome.CRASH)),
    }
    assert len(marks) == 5


@pytest.mark.parametrize(
    ("event", "killing", "outcome"),
    [
        (WorkerDied(1, None, 11, "r"), None, Outcome.CRASH),
        (WorkerDied(1, 3, None, "r"), None, Outcome.CRASH),
        (WorkerDied(1, 0, None, "r"), None, Outcome.CRASH),
        (WorkerDied(1, None, 9, "r", host_oom=True), None, Outcome.HOST_OOM),
        (WorkerDied(1, None, 9, "r"), Outcome.TIMEOUT, Outcome.TIMEOUT),
        (WorkerDied(1, None, 9, "r", host_oom=True), Outcome.TIMEOUT, Outcome.TIMEOUT),
    ],
)
def test_a_death_is_named_by_its_cause(
    event: WorkerDied, killing: Outcome | None, outcome: Outcome
) -> None:
    event = event._replace(trace="end of log", log_start=5, log_end=9)
    found = death_as_finished(event, killing, 2.5)
    assert found.outcome is outcome
    assert (found.signal, found.seconds, found.trace) == (event.signal, 2.5, "end of log")
    assert (found.log_start, found.log_end) == (5, 9)
    assert found.message


def test_signals_have_names() -> None:
    assert signal_name(signal.SIGSEGV) == "SIGSEGV (11)"
    assert signal_name(250) == "signal 250"


def test_every_outcome_has_a_reason_and_a_limit() -> None:
    policy = RetryPolicy()
    for outcome in Outcome:
        assert REASONS[outcome]
        if outcome is not Outcome.OK:
            assert policy.limit(outcome) >= 0
    assert policy.limit(Outcome.EXCEPTION) == 0
    assert policy.limit(Outcome.CRASH) == 1
    assert RetryPolicy(by_outcome={Outcome.TIMEOUT: 4}).limit(Outcome.TIMEOUT) == 4


@given(st.integers(1, 80), st.floats(0, 1))
def test_pauses_grow_up_to_the_cap_and_jitter_only_shortens_them(tries: int, jitter: float) -> None:
    policy = RetryPolicy(backoff_s=0.5, backoff_cap_s=60.0)
    full = min(60.0, 0.5 * 2 ** (tries - 1))
    assert full / 2 <= policy.pause_s(tries, jitter) <= full
    assert policy.pause_s(tries, 1.0) == full


def test_which_states_are_final() -> None:
    for state in TaskState:
        assert state.is_final == (state not in (TaskState.READY, TaskState.CLAIMED))


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"


@pytest.mark.parametrize(
    ("output", "is_oom"),
    [
        (f"Traceback (most recent call last):\n  x = torch.empty(n)\n{OOM}\n", True),
        ("torch.cuda.OutOfMemoryError: CUDA out of memory.\n", True),
        ("RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be reported\n", True),
        (f"[rank0]: {OOM}\n[W1122 ProcessGroup.cpp] Warning: destroy_process_group()\n", True),
        ("jax.errors.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying\n", True),
        ("RuntimeError: HIP out of memory. Tried to allocate\n", True),
        (f"{OOM}\nsmaller batch\nValueError: no batch left\n", False),
        ("ValueError: bad\n", False),
        ("y" * 4096, False),
        ("", False),
    ],
)
def test_a_program_that_ended_without_memory_on_its_device(output: str, is_oom: bool) -> None:
    assert (outcome_of_output(output) is Outcome.DEVICE_OOM) == is_oom
