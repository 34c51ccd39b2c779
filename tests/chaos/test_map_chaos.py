"""``muster map`` under kill -9 and full disks: afterwards the output is that of a quiet run."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.chaos.killed_map import BATCH, NUM_ROWS, Place


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What undisturbed runs write."""
    expected = {}
    for kind in ("Hash", "Later"):
        place = Place(tmp_path_factory.mktemp("quiet") / kind, 0)
        assert place.start(kind).wait(300) == 1, place.said()  # rejects
        expected[kind] = place.output()
    return expected


def check_storm(folder: Path, seed: int, quiet: dict[str, dict[str, str]]) -> None:
    kind = ("Hash", "Later")[seed % 2]
    place = Place(folder, seed)
    code = place.storm(kind)
    assert code == 1, place.said()
    assert place.output() == quiet[kind]
    in_flight = 2 * max(BATCH, 10)
    assert place.num_seen() <= NUM_ROWS + sum(place.kills.values()) * in_flight
    deadline = time.monotonic() + 300
    while place.processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert place.processes() == {}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_anywhere_the_output_is_that_of_a_quiet_run(
    tmp_path: Path, quiet: dict[str, dict[str, str]], seed: int
) -> None:
    check_storm(tmp_path / "storm", seed, quiet)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 32))
def test_thirty_storms(tmp_path: Path, quiet: dict[str, dict[str, str]], seed: int) -> None:
    check_storm(tmp_path / "storm", seed, quiet)


def campaign(place: Path, num_kills: int, quiet: dict[str, dict[str, str]]) -> Counter[str]:
    """Maps under kills, one after another, until there were ``num_kills``; what was found amiss."""
    found: Counter[str] = Counter()
    for seed in range(1000, 1000 + num_kills):
        kind = ("Hash", "Later")[seed % 2]
        storm = Place(place / f"storm{seed}", seed)
        code = storm.storm_at_work(kind, most=10)
        assert code == 1, storm.said()
        ids = Counter(record["id"] for record in storm.records("out.jsonl"))
        bad = Counter(record["row"] for record in storm.records("run/errors.jsonl"))
        found["maps"] += 1
        found["kills"] += sum(storm.kills.values())
        found["doubled"] += sum((ids + bad).values()) - len(ids) - len(bad)
        found["lost"] += len(missing_rows(kind, set(ids) | set(bad)))
        found["other outputs"] += storm.output() != quiet[kind]
        found["repeated"] += storm.num_seen() - NUM_ROWS
        deadline = time.monotonic() + 300
        while (left := storm.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        found["orphans"] += len(left)
        if found["kills"] >= num_kills:
            break
    print(dict(found))
    return found


def missing_rows(kind: str, there: set[int | str]) -> set[int]:
    """Rows of which neither a record nor a reject is there, and that no stage drops."""
    kept = {
        n for n in range(NUM_ROWS) if kind == "Later" or n % 31 != 2 or n % 97 == 5
    }  # fmt: skip
    return {n for n in kept if n not in there and f"{n}.0" not in there}


def check_campaign(place: Path, num_kills: int, quiet: dict[str, dict[str, str]]) -> None:
    found = campaign(place, num_kills, quiet)
    assert found["kills"] >= num_kills
    amiss = {name: found[name] for name in ("lost", "doubled", "orphans", "other outputs")}
    assert not any(amiss.values()), found
    assert found["repeated"] <= found["kills"] * 2 * max(BATCH, 10), found


@pytest.mark.thorough
def test_ten_kills_cost_nothing_but_rows_in_flight(
    tmp_path: Path, quiet: dict[str, dict[str, str]]
) -> None:
    check_campaign(tmp_path, 10, quiet)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_kills_cost_nothing_but_rows_in_flight(
    tmp_path: Path, quiet: dict[str, dict[str, str]]
) -> None:
    check_campaign(tmp_path, 200, quiet)


@contextlib.contextmanager
def small_disk(folder: Path, size_kib: int) -> Iterator[Path]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a small disk here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill_up(tmp_path: Path, quiet: dict[str, dict[str, str]], size_kib: int) -> None:
    with small_disk(tmp_path / f"disk{size_kib}", size_kib) as disk:
        place = Place(disk, size_kib)
        place.notes = tmp_path / f"notes{size_kib}"
        place.environment["CHAOS_NOTES"] = str(place.notes)
        code = place.start("Hash").wait(300)
        if code != 1 or not (disk / "out.jsonl").exists():
            assert "Traceback" not in place.said(), place.said()
            remount = ["mount", "-o", "remount,size=64m", str(disk)]
            subprocess.run(remount, check=True)
            assert place.start("Hash").wait(300) == 1, place.said()
        assert place.output() == quiet["Hash"]


@pytest.mark.parametrize("size_kib", [300, pytest.param(420, marks=pytest.mark.slow)])
def test_a_disk_that_fills_up_costs_nothing_that_was_done(
    tmp_path: Path, quiet: dict[str, dict[str, str]], size_kib: int
) -> None:
    fill_up(tmp_path, quiet, size_kib)


@pytest.mark.slow
@pytest.mark.parametrize("size_kib", range(180, 640, 24))
def test_a_disk_that_is_full_at_any_write(
    tmp_path: Path, quiet: dict[str, dict[str, str]], size_kib: int
) -> None:
    fill_up(tmp_path, quiet, size_kib)
