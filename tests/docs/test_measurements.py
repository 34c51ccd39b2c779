"""The figures of the pages are those that the benchmarks have recorded."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WRITER = runpy.run_path(str(ROOT / "docs/generate_measurements.py"))
ABOUT = {"date": "2026-01-02", "processor": "P", "cores": 2, "kernel": "6", "versions": {}}


def test_the_pages_hold_what_was_recorded() -> None:
    """Renew: python docs/generate_measurements.py"""
    stale = [page.name for page, text in WRITER["pages"]().items() if page.read_text() != text]
    assert stale == []


def of_benchmark(name: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # which it takes away
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        return runpy.run_path(str(ROOT / f"benchmarks/{name}.py"))


def test_a_difference_is_judged_where_its_interval_is_on_one_side_of_the_goal() -> None:
    at_most = of_benchmark("measuring")["at_most"]
    assert at_most([0.1] * 20, 1.0) is True and at_most([2.0] * 20, 1.0) is False
    assert at_most([-3.0, 4.0] * 10, 1.0) is None, "its interval has the goal in it"
    assert at_most([0.1] * 5, 1.0) is None and at_most([], 1.0) is None, "too few for an interval"
    # A few that stand out decide nothing.
    assert at_most([*[0.1] * 18, 90.0, 90.0], 1.0) is True


def test_a_difference_is_told_with_its_sign_and_its_interval() -> None:
    told = of_benchmark("measuring")["told"]
    assert told([0.5] * 10) == "+0.50 [+0.50, +0.50]" and told([]) == "-"
    assert told([-1.0, 0.04, 2.0], 1) == "+0.0 [-1.0, +2.0]"


def test_processor_time_is_that_of_the_process_that_is_asked_for() -> None:
    processor_s = of_benchmark("measuring")["processor_s"]
    before = time.process_time()
    asked = processor_s(os.getpid())
    assert before <= asked <= time.process_time()
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert 0 <= processor_s(other.pid) < 60
        other.kill()
    with pytest.raises(OSError):
        processor_s(other.pid)


def test_what_points_cost_is_the_difference_of_halves_with_threads_and_coordinator() -> None:
    cost_of = of_benchmark("metrics")["cost_of"]
    block = {"wall": [1.0, 1.02], "cpu": [1.0, 1.01], "inside": 0.005, "others": 0.02}
    without = {"wall": [1.0, 1.0], "cpu": [1.0, 1.0], "inside": 0.0, "others": 0.01}
    # A moment in which something else ran is in one block, where it makes 10 s of 2.
    torn = {**block, "wall": [1.0, 9.0]}
    wall_s = 4 * 2.02 + 10
    cost = cost_of(
        {"blocks": [without] * 5, "coordinator": 0.05},
        {"blocks": [block, torn, block, block, block], "coordinator": 0.01 * wall_s},
    )
    threads = 100 * (5 * 0.02 / wall_s - 5 * 0.01 / 10)
    assert cost.wall == pytest.approx(1.0 + threads)
    assert cost.processor == pytest.approx(0.5 + threads + 0.5)
    assert cost.inside == pytest.approx(100 * 5 * 0.005 / wall_s) and cost.nothing == 0.0


def test_what_viewers_cost_is_told_from_the_spans_in_which_their_server_is_stopped() -> None:
    pytest.importorskip("starlette")
    benchmark = of_benchmark("dashboard")
    span_s = benchmark["SPAN_S"]
    num = round(1.5 * benchmark["STRETCH_S"] / span_s)
    # 100 tasks in a span without viewers, 99 in one with; 0.08 s of the processor for all of them,
    # and 1 ms of the server's.
    spans, ended = [], list[float]()
    sweep_s = server_s = 0.0
    for number in range(num + 1):
        goes_on = number % 2 == 0
        spans.append(benchmark["Span"](number * span_s, goes_on, sweep_s, server_s))
        tasks = 99 if goes_on else 100
        ended += [(number + (i + 0.5) / tasks) * span_s for i in range(tasks)]
        sweep_s, server_s = sweep_s + 0.08, server_s + 0.001 * goes_on
    costs = benchmark["viewers_cost"](spans, ended)
    assert len(costs) == 1, "half a stretch is none"
    assert costs[0].rate == pytest.approx(1.0)
    of_server = 0.001 / span_s / (os.cpu_count() or 1)
    assert costs[0].processor == pytest.approx(100 * (100 / 99 - 1 + of_server))
    assert costs[0].server == pytest.approx(100 * 0.0005 / span_s)


def test_what_a_tracker_costs_is_told_from_the_spans_in_which_it_is_stopped() -> None:
    benchmark = of_benchmark("trackers")
    span_s, stretch_s = benchmark["SPAN_S"], benchmark["STRETCH_S"]
    spans = [
        benchmark["Span"](n * span_s, n % 2 == 1) for n in range(round(2.5 * stretch_s / span_s))
    ]
    pieces = []
    for n, span in enumerate(spans):
        # A machine that gets slower all the time, and a tracker that costs 1 % now and then.
        speed = 0.0001 * (1 + n / len(spans))
        pieces += [
            benchmark["Piece"](span.began + i * span_s / 30, speed * (1.1 if n % 20 == 1 else 1), 0)
            for i in range(30)
        ]
    costs = benchmark["costs"](pieces, spans, 1)
    assert len(costs) == 3
    assert costs == pytest.approx([1.0] * 3, abs=0.5)


def test_each_idle_second_of_an_agents_workers_is_somewhere() -> None:
    idle = of_benchmark("agent_client")["idle"]
    calls = [{"began": b, "ended": e} for b, e in ((1, 2), (1, 3), (5.5, 6.5), (6.5, 7))]
    found = idle([(0, 4), (5, 8)], calls, 2, 9.0)
    assert found == {"starting": 3.0, "ending": 4.0, "between": 4.0, "at_work": 2.5}
    assert sum(found.values()) + 4.5 == 2 * 9.0


def test_no_table_of_measurements_is_written_by_hand() -> None:
    page = (ROOT / "docs/measurements.md").read_text()
    by_hand = re.sub(r"<!-- (goals|figures).*?<!-- end -->", "", page, flags=re.DOTALL)
    assert not [line for line in by_hand.splitlines() if line.startswith("|")]


def test_each_record_is_of_a_full_run_of_a_benchmark_that_there_is() -> None:
    records = WRITER["recorded"](ROOT / "benchmarks/results")
    known = WRITER["described"](ROOT / "benchmarks")
    assert records and {*records} <= {*known}
    assert [name for name, record in records.items() if record.get("is_quick")] == []


def test_goals_are_one_table_and_say_what_bounds_them() -> None:
    goal = {"what": "w", "wanted": "≥ 2", "measured": "1", "is_held": False, "bound": ""}
    bound = {**goal, "is_held": None, "bound": "3: a loop (decision 0070)"}
    record = {"command": "c", "machine": ABOUT, "tables": [], "goals": [goal, bound]}
    page = "<!-- goals -->\nold\n<!-- end -->\nafter\n"
    found = WRITER["written"](page, {"x": record})
    assert "| [x](measurements-tables.md#x) | w | ≥ 2 | 1 | **missed** |  | 2026-01-02 |" in found
    link = "3: a loop ([decision 0070](decisions/0070-commands-cost-what-they-are-promised.md))"
    assert f"| not judged | {link} | 2026-01-02 |" in found
    assert "old" not in found and WRITER["written"](found, {"x": record}) == found


def test_other_figures_change_the_page_and_a_missing_record_is_said_to_be_so() -> None:
    tables: list[dict[str, Any]] = [{"caption": "", "headers": ["a"], "rows": [["b|c"]]}]
    record = {"command": "python x.py", "machine": ABOUT, "tables": tables}
    page = "before\n<!-- figures: x -->\nold\n<!-- end -->\nafter\n"
    found = WRITER["written"](page, {"x": record})
    assert "| b\\|c |" in found and "old" not in found
    assert found.startswith("before\n") and found.endswith("<!-- end -->\nafter\n")
    assert WRITER["written"](found, {"x": record}) == found
    assert "No record yet" in WRITER["written"](found, {}) and "b\\|c" not in WRITER["written"](
        found, {}
    )


def test_the_page_of_tables_has_a_place_for_every_benchmark() -> None:
    known = WRITER["described"](ROOT / "benchmarks")
    page = WRITER["tables"]({}, known)
    assert {"chaos", "growth", "map_overhead-stage", "scale-large"} <= {*known}
    assert [name for name in known if f"## {name}\n\n{known[name]}\n" not in page] == []
