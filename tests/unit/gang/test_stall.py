from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.gang.stall import Heartbeat, StallDetector, Verdict, name_ranks

LIMIT = 20.0


def beat(rank: int, **values: Any) -> Heartbeat:
    return Heartbeat(rank=rank, count=0, is_ready=True, **values)


def watch_still(
    beats: list[Heartbeat], seconds: float, cpu_share: dict[int, float] | None = None
) -> list[Verdict]:
    """What is said while all ranks go on beating from where they are, up to the first end."""
    watch, said = StallDetector(len(beats), LIMIT), []
    for second in range(int(seconds) + 1):
        for item in beats:
            cpu_s = second * (cpu_share or {}).get(item.rank, 0.0)
            watch.hear(replace(item, count=second + 1, cpu_s=cpu_s), float(second))
        verdict = watch.judge(float(second))
        if verdict is not None:
            said.append(verdict)
            if verdict.is_final:
                break
    return said


WAIT = {"collective": "all-reduce", "step": 456}
DATA = {"phase": "data", "step": 456}


@pytest.mark.parametrize(
    ("places", "culprits", "text"),
    [
        (
            [WAIT, WAIT, WAIT, DATA],
            (3,),
            "rank 3 is in the data loader at step 456; ranks 0-2 wait in all-reduce",
        ),
        (
            [{"phase": "backward"}, {"phase": "ending", "step": 5}],
            (1,),
            "rank 1 is ending after an error at step 5; rank 0 waits in backward",
        ),
        (
            [{"phase": "backward"}, {"phase": "train.py:12 in load"}],
            (1,),
            "rank 1 is at train.py:12 in load; rank 0 waits in backward",
        ),
        (
            [WAIT, DATA, DATA, {"phase": "optimizer", "step": 457}],
            (1, 2, 3),
            "ranks 1-2 are in the data loader at step 456; rank 3 is in the optimizer "
            "at step 457; rank 0 waits in all-reduce",
        ),
        (
            [{"collective": "all-reduce", "num_collectives": 8}, {"collective": "broadcast"}],
            (0, 1),
            "all ranks wait for each other (mismatched collectives?): rank 0 waits in all-reduce "
            "(collective number 8); rank 1 waits in broadcast",
        ),
    ],
)
def test_who_holds_the_others_up(
    places: list[dict[str, Any]], culprits: tuple[int, ...], text: str
) -> None:
    beats = [beat(rank, **place) for rank, place in enumerate(places)]
    [verdict] = watch_still(beats, 30)
    assert verdict == Verdict(culprits=culprits, text=text)
    assert watch_still(beats, LIMIT - 1) == []


def test_a_busy_rank_is_named_once_and_ended_much_later() -> None:
    beats = [beat(0, **WAIT), beat(1, phase="forward", step=3)]
    remark, verdict = watch_still(beats, 300, {1: 0.9})
    assert not remark.is_final and remark.text.endswith("(busy, so left alone for now)")
    assert verdict.is_final and verdict.culprits == (1,)
    assert len(watch_still(beats, 10 * LIMIT - 1, {1: 0.9})) == 1


def test_a_checkpoint_is_given_the_same_time() -> None:
    beats = [beat(0, phase="checkpoint"), beat(1, collective="barrier")]
    assert [verdict.is_final for verdict in watch_still(beats, 100)] == [False]


def test_spinning_in_a_collective_is_not_idle() -> None:
    beats = [beat(0, **WAIT), beat(1, **WAIT)]
    assert [v.is_final for v in watch_still(beats, 60, {0: 1.0, 1: 1.0})] == [False]


def test_nobody_waiting_is_only_remarked() -> None:
    beats = [beat(0, phase="train.py:1 in f"), beat(1, phase="train.py:1 in f")]
    [remark] = watch_still(beats, 1000)
    assert not remark.is_final
    assert remark.text == "no rank has moved for 20 s: ranks 0-1 are at train.py:1 in f"


def test_before_the_process_group_nothing_but_silence_is_judged() -> None:
    beats = [replace(beat(0, **WAIT), is_ready=False), replace(beat(1, **DATA), is_ready=False)]
    assert watch_still(beats, 500) == []
    watch = StallDetector(2, LIMIT)
    watch.hear(replace(beats[0], count=1), 0.0)
    assert watch.judge(1.0) is None
    for second in range(2, 22):
        verdict = watch.judge(float(second))
    assert verdict is not None and verdict.culprits == (0,)


def test_a_silent_rank() -> None:
    watch = StallDetector(3, LIMIT)
    verdict = None
    for second in range(30):
        for rank in range(3):
            if rank != 2 or second < 5:
                place = DATA if rank == 2 else WAIT
                watch.hear(replace(beat(rank, **place), count=second + 1), float(second))
        verdict = watch.judge(float(second))
        if verdict:
            break
    assert verdict is not None and verdict.is_final and verdict.culprits == (2,)
    assert verdict.text == (
        "rank 2 has been silent for 16 s (stopped, or something holds the interpreter), "
        "last seen in the data loader at step 456; ranks 0-1 wait in all-reduce"
    )


def test_a_rank_that_has_ended_is_not_silent() -> None:
    watch = StallDetector(2, LIMIT)
    watch.hear(beat(0, phase="data"), 0.0)
    watch.hear(beat(1, phase="data"), 0.0)
    watch.forget(0)
    watch.hear(replace(beat(1, phase=""), count=1, has_ended=True), 1.0)
    for second in range(2, 60):
        assert watch.judge(float(second)) is None


def test_time_in_which_the_watchdog_did_not_run_is_not_held_against_anyone() -> None:
    watch = StallDetector(1, LIMIT)
    watch.hear(beat(0), 0.0)
    assert watch.judge(1.0) is None
    assert watch.judge(1000.0) is None  # the machine was asleep
    assert watch.judge(1004.0) is None


@given(st.lists(st.sampled_from([WAIT, DATA, {"phase": "forward"}]), min_size=1, max_size=8))
def test_a_gang_that_moves_is_never_blamed(places: list[dict[str, Any]]) -> None:
    watch = StallDetector(len(places), LIMIT)
    for second in range(200):
        for rank, place in enumerate(places):
            step = second // 10 if rank == 0 else 0
            item = replace(beat(rank, **place), count=second + 1, step=step)
            watch.hear(item, float(second))
        assert watch.judge(float(second)) is None


@given(st.sets(st.integers(0, 40), min_size=1))
def test_folded_ranks_say_exactly_who(ranks: set[int]) -> None:
    text = name_ranks(ranks)
    word, _, listing = text.partition(" ")
    assert word == ("rank" if len(ranks) == 1 else "ranks")
    named: set[int] = set()
    for part in listing.split(", "):
        first, _, last = part.partition("-")
        named |= set(range(int(first), int(last or first) + 1))
    assert named == ranks


def silence(seconds: int, cpu_share: float | None) -> list[Verdict]:
    """What is said while rank 1 of 2 gives no beat and its node sees this use of a core."""
    watch, said = StallDetector(2, LIMIT), []
    watch.hear(beat(1, phase="train.py:3 in load"), 0.0)
    for second in range(seconds + 1):
        watch.hear(replace(beat(0, **WAIT), count=second + 1), float(second))
        if cpu_share is not None:
            watch.see_cpu(1, second * cpu_share, float(second))
        verdict = watch.judge(float(second))
        if verdict is not None:
            said.append(verdict)
            if verdict.is_final:
                break
    return said


@pytest.mark.parametrize("cpu_share", [None, 0.0, 0.01])
def test_a_silent_rank_without_cpu_is_ended(cpu_share: float | None) -> None:
    [verdict] = silence(60, cpu_share)
    assert verdict.is_final and verdict.culprits == (1,)
    assert "rank 1 has been silent for 20 s (stopped, or something holds the" in verdict.text


@pytest.mark.parametrize("cpu_share", [0.2, 1.0, 16.0])
def test_a_silent_rank_that_computes_gets_the_long_limit(cpu_share: float) -> None:
    [remark] = silence(int(9 * LIMIT), cpu_share)
    assert not remark.is_final
    assert "computes), last seen at train.py:3 in load; rank 0 waits in all-reduce" in remark.text
    assert silence(int(11 * LIMIT), cpu_share)[-1].is_final


def test_a_rank_that_computed_and_is_stopped_then_is_ended() -> None:
    watch = StallDetector(2, LIMIT)
    for second in range(60):
        watch.hear(replace(beat(0, **WAIT), count=second + 1), float(second))
        watch.hear(beat(1), 0.0)
        watch.see_cpu(1, float(min(second, 40)), float(second))
        verdict = watch.judge(float(second))
        if verdict is not None and verdict.is_final:
            assert 45 <= second <= 55
            return
    pytest.fail("it was not ended")


@pytest.mark.parametrize("cpu_share", [0.0, 1.0])
def test_compiling_is_never_ended_and_no_alarm(cpu_share: float) -> None:
    both = [beat(0, phase="compiling", step=0), beat(1, phase="compiling", step=0)]
    one = [beat(0, **WAIT), beat(1, phase="compiling", step=0)]
    for beats in (both, one):
        [remark] = watch_still(beats, 400, dict.fromkeys((0, 1), cpu_share))
        assert not remark.is_final and "compiling" in remark.text
        assert "mismatched" not in remark.text


def test_a_long_backward_is_no_mismatch() -> None:
    beats = [beat(0, phase="backward", step=2), beat(1, phase="backward", step=2)]
    remark, *_ = watch_still(beats, 100, {0: 1.0, 1: 1.0})
    assert not remark.is_final and "mismatched" not in remark.text


# -------------------------------------------------- ranks that wait on GPUs, at full processor load

SPIN = dict.fromkeys(range(4), 1.0)
ITEM = {"phase": "train.py:61 in main", "step": 7, "on_gpu": True}


def test_a_rank_asleep_is_named_while_the_others_spin_in_item() -> None:
    beats = [beat(rank, **ITEM) for rank in range(3)]
    beats.append(beat(3, phase="train.py:57 in main", step=7))
    [verdict] = watch_still(beats, 30, {0: 1.0, 1: 1.0, 2: 1.0})
    assert verdict == Verdict(
        culprits=(3,),
        text="rank 3 is at train.py:57 in main at step 7; "
        "ranks 0-2 wait for the GPU at train.py:61 in main at step 7",
    )


def test_a_rank_whose_own_kernel_hangs_is_named() -> None:
    place = {"phase": "backward", "step": 9, "on_gpu": True}
    beats = [beat(rank, own_done=rank != 3, **place) for rank in range(4)]
    for load in (SPIN, {}):  # a host that spins, and one that blocks
        remark, verdict = watch_still(beats, 300, load)
        text = (
            "rank 3 has a GPU that is not done with its own work, in backward at step 9; "
            "ranks 0-2 wait for the GPU in backward at step 9"
        )
        assert remark.culprits == (3,) and remark.text.startswith(text) and not remark.is_final
        assert verdict == Verdict(culprits=(3,), text=text)


def test_gpus_that_all_wait_are_not_ended_at_the_limit() -> None:
    beats = [beat(rank, **ITEM, own_done=own) for rank, own in enumerate((True, None))]
    for load in (SPIN, {}):
        remark, verdict = watch_still(beats, 300, load)
        assert not remark.is_final
        assert remark.text.startswith(
            "no rank has moved for 20 s: ranks 0-1 wait for the GPU at train.py:61 in main"
        )
        assert verdict.is_final


def test_the_only_rank_may_compute_on_its_gpu_as_long_as_it_likes() -> None:
    [remark] = watch_still([beat(0, **ITEM)], 1000)
    assert not remark.is_final
    assert remark.text == (
        "no rank has moved for 20 s: rank 0 waits for the GPU at train.py:61 in main at step 7"
    )


def test_a_rank_that_saves_its_tensors_from_a_gpu_is_left_alone() -> None:
    beats = [beat(0, phase="checkpoint", on_gpu=True), beat(1, collective="an agreement")]
    assert [verdict.is_final for verdict in watch_still(beats, 400)] == [False]


@pytest.mark.parametrize("phase", ["data", "evaluation"])
def test_a_long_evaluation_or_rollout_on_gpus_is_never_ended(phase: str) -> None:
    place = {"phase": phase, "step": 7}
    on_gpu = [beat(rank, on_gpu=True, **place) for rank in range(3)]
    for last, load in (
        (beat(3, on_gpu=True, **place), SPIN),
        (beat(3, **place), SPIN),  # seen between two of its calls
        (beat(3, **place), {0: 1.0, 1: 1.0, 2: 1.0}),  # its disk is slow
    ):
        [remark] = watch_still([*on_gpu, last], 1000, load)
        assert not remark.is_final and remark.text.startswith("no rank has moved for 20 s: ranks")


def test_a_rank_that_holds_up_gpus_in_mid_step_is_named() -> None:
    waits = {"phase": "forward", "step": 7, "on_gpu": True, "own_done": True}
    beats = [*(beat(rank, **waits) for rank in range(3)), beat(3, phase="data", step=7)]
    [verdict] = watch_still(beats, 30, {0: 1.0, 1: 1.0, 2: 1.0})
    assert verdict.is_final and verdict.culprits == (3,)
    assert verdict.text.startswith("rank 3 is in the data loader at step 7; ranks 0-2 wait for")


def test_a_failed_rank_that_hangs_on_its_gpu_waits_for_nobody() -> None:
    beats = [beat(0, phase="backward", step=5), beat(1, phase="ending", step=5, on_gpu=True)]
    verdicts = watch_still(beats, 400)
    assert verdicts[-1].is_final and {verdict.culprits for verdict in verdicts} == {(1,)}
    assert "rank 0 waits in backward" in verdicts[-1].text


def test_a_script_that_evaluates_on_its_gpus_is_not_ended() -> None:
    """All ranks in ``.item()``, or all but one: a rank that is waited for looks the same."""
    between = beat(2, phase=ITEM["phase"], step=7)
    for last in (beat(2, **ITEM), between):
        [remark] = watch_still([beat(0, **ITEM), beat(1, **ITEM), last], 1000, SPIN)
        assert not remark.is_final
