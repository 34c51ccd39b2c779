from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.gang.blame import (
    MAX_LINES,
    RankEnd,
    RankError,
    consequence,
    find_culprit,
    mark,
    raised_while_stopping,
    report,
)

LOG = Path("runs/x/logs/rank-1.log")


def error(text: str, time_s: float = 0.0, frames: int = 2) -> RankError:
    kind, _, message = text.partition(": ")
    lines = tuple(f'  File "train.py", line {n}, in f' for n in range(frames))
    return RankError(type=kind, message=message, frames=lines, time_s=time_s)


CLOSED = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:17638"


def test_the_report_names_the_culprit_and_folds_the_rest() -> None:
    ends = [
        RankEnd(rank=0, code=1, time_s=1.0, error=error(CLOSED, 0.9)),
        RankEnd(rank=1, code=1, time_s=1.2, error=error("ValueError: bad label 7\nmore", 1.1)),
        RankEnd(rank=2, code=-15, time_s=2.0, was_stopped=True),
        RankEnd(rank=3, code=1, time_s=1.0, error=error(CLOSED, 0.9)),
    ]
    assert report(ends, world_size=4, log=LOG) == (
        "rank 1 of 4 failed: ValueError: bad label 7",
        '    File "train.py", line 0, in f',
        '    File "train.py", line 1, in f',
        "ranks 0, 2-3 ended because of it (connection closed by peer)",
        "log: runs/x/logs/rank-1.log",
    )


@pytest.mark.parametrize(
    "text",
    [
        CLOSED,
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "torch.distributed.DistBackendError: NCCL error: ncclRemoteError: A call failed possibly",
        "DistNetworkError: failed to recv, got 0 bytes",
        "DistStoreError: wait timeout after 300000ms, keys: /default_pg/0",
        "RuntimeError: Socket Timeout",
    ],
)
def test_what_looks_like_a_consequence(text: str) -> None:
    end = RankEnd(rank=0, code=1, time_s=0.0, error=error(text))
    assert consequence(end) is not None
    own = RankEnd(rank=1, code=1, time_s=9.0, error=error("KeyError: 'x'", 9.0))
    assert find_culprit([end, own]) is own


def test_a_killed_rank_is_to_blame_for_earlier_complaints() -> None:
    ends = [
        RankEnd(rank=0, code=1, time_s=1.0, error=error(CLOSED, 0.5)),
        RankEnd(rank=1, code=-9, time_s=1.1),
    ]
    lines = report(ends, world_size=2, log=LOG)
    assert lines[0] == (
        "rank 1 of 2 was killed by SIGKILL (9): by somebody else, or by the kernel for lack of "
        "memory"
    )
    lines = report(ends, world_size=2, log=LOG, num_oom_kills=1)
    assert lines[0].endswith("out of memory, the kernel has killed 1 process meanwhile")


def test_of_consequences_only_the_first_is_told() -> None:
    ends = [
        RankEnd(rank=rank, code=1, time_s=9.0, error=error(CLOSED, 5.0 - rank)) for rank in range(3)
    ]
    culprit = find_culprit(ends)
    assert culprit is not None and culprit.rank == 2


def test_in_a_log_only_a_consequence_is_marked_and_only_of_a_known_cause() -> None:
    broken = [RankEnd(rank=rank, code=1, time_s=1.0, error=error(CLOSED, rank)) for rank in (0, 1)]
    killed = RankEnd(rank=2, code=-9, time_s=1.1)
    cause = "rank 2 of 3 was killed by SIGKILL (9): by somebody else, or by the kernel for lack"
    for end in broken:
        said = mark(end, [*broken, killed], 3)
        assert said.startswith(
            f"muster: this followed (connection closed by peer); the cause: {cause}"
        )
    assert mark(killed, [*broken, killed], 3) == ""
    assert [mark(end, broken, 3) for end in broken] == ["", ""], "the cause is on another node"


def test_own_failures_of_several_ranks() -> None:
    same = [
        RankEnd(rank=rank, code=1, time_s=1.0, error=error("KeyError: 'x'", rank))
        for rank in range(3)
    ]
    other = RankEnd(rank=3, code=-11, time_s=5.0)
    lines = report([*same, other], world_size=4, log=LOG)
    assert lines[0] == "rank 0 of 4 failed: KeyError: 'x'"
    assert "ranks 1-2 failed in the same way" in lines
    assert "rank 3 failed too: SIGSEGV (11)" in lines


def test_without_a_record_the_end_of_the_log_is_shown() -> None:
    end = RankEnd(rank=0, code=3, time_s=1.0, tail=("one", "two"))
    assert report([end], world_size=1, log=LOG) == (
        "rank 0 of 1 failed: it ended with exit code 3",
        "  one",
        "  two",
        f"log: {LOG}",
    )


def test_nobody_failed() -> None:
    assert report([RankEnd(rank=0, code=0, time_s=1.0)], world_size=1, log=LOG) == ()


ENDS = st.builds(
    RankEnd,
    rank=st.integers(0, 7),
    code=st.sampled_from([0, 1, 3, -9, -11, -15]),
    time_s=st.floats(0, 10),
    was_stopped=st.booleans(),
    error=st.one_of(
        st.none(),
        st.sampled_from([error(CLOSED, 1.0, 9), error("KeyError: 'x'", 2.0, 30), error("E", 3.0)]),
    ),
    tail=st.sampled_from([(), ("a",) * 12]),
)


@given(st.lists(ENDS, unique_by=lambda end: end.rank, max_size=8))
def test_a_report_is_short_and_names_a_rank_that_failed(ends: list[RankEnd]) -> None:
    lines = report(ends, world_size=8, log=LOG)
    assert len(lines) <= MAX_LINES
    culprit = find_culprit(ends)
    if culprit is None:
        assert lines == () and all(end.code == 0 for end in ends)
        return
    assert lines[0].startswith(f"rank {culprit.rank} of 8 ")
    own = [end for end in ends if end.code != 0 and consequence(end) is None]
    assert not own or culprit in own


def test_only_what_a_rank_raised_of_its_own_is_told_of_a_gang_that_was_stopped() -> None:
    ends = [
        RankEnd(rank=0, code=-15, time_s=1.0, was_stopped=True),
        RankEnd(rank=1, code=130, time_s=1.0, was_stopped=True, error=error("KeyboardInterrupt")),
        RankEnd(rank=2, code=1, time_s=1.0, was_stopped=True, error=error(CLOSED)),
        RankEnd(rank=3, code=1, time_s=1.2, was_stopped=True, error=error("ValueError: full")),
    ]
    own = raised_while_stopping(ends)
    assert [end.rank for end in own] == [3]
    assert report(own, world_size=4, log=LOG)[0] == "rank 3 of 4 failed: ValueError: full"
    assert report(raised_while_stopping(ends[:3]), world_size=4, log=LOG) == ()


#: What NCCL's watchdog leaves in a log before it aborts the process, and what follows it there.
WATCHDOG = (
    "[rank0]:[E1122 ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group"
    " watchdog thread terminated with exception: [Rank 0] Watchdog caught collective operation"
    " timeout: WorkNCCL(SeqNum=42, OpType=ALLREDUCE) ran for 600031 milliseconds.",
    *(f"frame #{number}: c10d::ProcessGroupNCCL::watchdogHandler()" for number in range(30)),
    "Fatal Python error: Aborted",
)


def test_ranks_that_nccl_has_aborted_are_not_to_blame() -> None:
    ends = [RankEnd(rank=r, code=-6, time_s=100 + r / 100, tail=WATCHDOG) for r in range(3)]
    late = RankEnd(rank=3, code=-15, time_s=101.0, was_stopped=True, tail=("step 7",))
    assert [consequence(end) for end in ends] == ["timed out waiting for the others"] * 3
    assert report([*ends, late], world_size=4, log=LOG) == (
        "rank 3 of 4 did not come to where the others waited",
        "  step 7",
        "ranks 0-2 ended because of it (timed out waiting for the others)",
        f"log: {LOG}",
    )
    crashed = RankEnd(rank=3, code=-11, time_s=99.0)
    assert find_culprit([*ends, crashed]) is crashed
    # On a node where all of them gave up, NCCL's own word is shown and not the stacks after it.
    lines = report(ends, world_size=8, log=LOG)
    assert lines[0].startswith("rank 0 of 8 was killed by SIGABRT")
    assert "Watchdog caught collective operation timeout" in lines[1]


def test_an_abort_of_another_kind_is_a_ranks_own() -> None:
    own = "watchdog thread terminated with exception: CUDA error: an illegal memory access"
    ends = [
        RankEnd(rank=0, code=-6, time_s=100.0, tail=WATCHDOG),
        RankEnd(rank=1, code=-6, time_s=101.0, tail=(own,)),
    ]
    culprit = find_culprit(ends)
    assert culprit is not None and culprit.rank == 1


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: DataLoader timed out after 30 seconds",
        "subprocess.TimeoutExpired: Command 'fetch' timed out after 30 seconds",
    ],
)
def test_a_rank_that_raised_a_timeout_of_its_own_is_told_with_its_traceback(text: str) -> None:
    ends = [RankEnd(rank=r, code=-15, time_s=101.0, was_stopped=True) for r in (0, 1, 3)]
    ends.append(RankEnd(rank=2, code=1, time_s=100.0, error=error(text, 100.0)))
    assert report(ends, world_size=4, log=LOG) == (
        f"rank 2 of 4 failed: {text}",
        '    File "train.py", line 0, in f',
        '    File "train.py", line 1, in f',
        "ranks 0-1, 3 ended because of it (stopped)",
        f"log: {LOG}",
    )


def test_of_several_ranks_that_were_stopped_none_is_accused() -> None:
    """NCCL aborts one rank, and those that waited as it did are stopped before their turn."""
    ends = [RankEnd(rank=r, code=-15, time_s=101.0, was_stopped=True) for r in (0, 2, 3)]
    aborted = RankEnd(rank=1, code=-6, time_s=100.0, tail=WATCHDOG)
    lines = report([*ends, aborted], world_size=4, log=LOG)
    assert lines[0] == "one of ranks 0, 2-3 of 4 did not come to where the others waited"
    assert "Watchdog caught collective operation timeout" in lines[1]
    assert lines[2:] == (f"log: {LOG}",)
    assert find_culprit([*ends, aborted]) is aborted
