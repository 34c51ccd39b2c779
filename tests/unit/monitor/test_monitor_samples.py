"""From a recorded driver to rows of a file, on a clock that is told."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.conftest import MusterCli
from tests.unit.devices.fake_driver import Driver
from tests.unit.monitor.recorded_gpus import MIB, ToldClock, h100, lost_after

from muster.base.settings import Settings
from muster.devices import nvml
from muster.devices.inventory import Holder
from muster.devices.nvml_usage import GpuUsage, usage_source
from muster.monitor.files import read_rows
from muster.monitor.host import HostReader, HostUsage
from muster.monitor.recorder import record
from muster.monitor.sample import COLUMNS, Sample, Sampler, Work, rows
from muster.monitor.sinks import open_sink


@pytest.fixture(autouse=True)
def _closed_library() -> Iterator[None]:
    nvml.open_library.cache_clear()
    yield
    nvml.open_library.cache_clear()


def test_a_thousand_samples_of_eight_gpus_without_drift_one_of_them_lost_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ToldClock()
    turn = iter(range(10_000))

    def slow_answer(counter: int) -> int:
        clock.now_s += 0.02  # NVML: a window of 20 ms per figure
        return 1024

    changes = {"nvmlDeviceGetPcieThroughput": slow_answer}
    gpus = [h100(number, **changes) for number in range(8)]
    gpus[5]["nvmlDeviceGetUtilizationRates"] = lost_after(400, SimpleNamespace(gpu=95, memory=1))
    Driver(*gpus).install(monkeypatch)
    waited: list[float] = []

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        # A scheduler wakes one up late, each time a little, now and then a lot.
        number = next(turn)
        clock.now_s += seconds + (0.9 if number % 97 == 96 else 0.003)
        return len(waited) > 1000

    path = tmp_path / "log.csv"
    sampler = Sampler(usage_source(Settings()), clock, HostReader(tmp_path))
    sink = open_sink(path)
    record(sampler, sink, 5.0, clock, wait)
    sink.close()

    found = list(read_rows(path))
    hosts = [row for row in found if row.device == "host"]
    assert len(hosts) == 1001  # and the one at the end
    for number, row in enumerate(hosts[:1000]):
        assert 0.0 <= row.elapsed_s - 5.0 * number <= 0.91, number
    for number in range(8):
        assert sum(row.device == f"gpu{number}" for row in found) == 1001
    lost = [row for row in found if row.device == "gpu5"]
    assert [row.lost is None for row in lost] == [True] * 400 + [False] * 601
    assert lost[500].uuid == "GPU-0005"
    assert lost[500].power_w is None
    assert all(row.lost is None for row in found if row.device == "gpu6")


def sample(**changes: object) -> Sample:
    values = {
        "time_s": 1_769_850_300.25,
        "elapsed_s": 10.0004,
        "host_name": "box",
        "host": HostUsage(cpu_percent=12.34, memory_used_mib=5),
        **changes,
    }
    return Sample(**values)  # type: ignore[arg-type]


def test_the_host_is_a_row_also_without_a_gpu() -> None:
    (row,) = rows(sample())
    assert (row.device, row.host) == ("host", "box")
    assert row.time_utc == "2026-01-31T09:05:00.250+00:00"
    assert (row.elapsed_s, row.utilisation_percent, row.memory_used_mib) == (10.0, 12.3, 5)
    assert row.power_w is None


def test_a_gpu_row_names_units_reasons_and_processes() -> None:
    gpu = GpuUsage(
        index=3,
        uuid="GPU-3",
        name="H100",
        throttle=("power cap", "sync boost"),
        processes=(
            Holder(pid=41, user="ada", used_mib=900, command="python secret --token x"),
            Holder(pid=42),
        ),
    )
    row = rows(sample(gpus=(gpu,), work={41: Work("digits", "rank 3")}))[1]
    assert row.throttle == "power cap+sync boost"
    assert row.processes == "pid 41 ada 900 MiB, digits/rank 3; pid 42"


@pytest.mark.parametrize(("throttle", "text"), [((), "none"), (None, None)])
def test_not_throttled_is_not_the_same_as_not_known(
    throttle: tuple[str, ...] | None, text: str | None
) -> None:
    gpu = GpuUsage(index=0, uuid="", name="x", throttle=throttle)
    row = rows(sample(gpus=(gpu,)))[1]
    assert (row.throttle, row.uuid) == (text, None)


def test_a_reason_of_two_lines_stays_one_row() -> None:
    gpu = GpuUsage(index=0, uuid="a", name="x\ny", lost="it fell\noff the bus")
    row = rows(sample(gpus=(gpu,)))[1]
    assert (row.name, row.lost) == ("x y", "it fell off the bus")


def test_columns_name_their_units() -> None:
    figures = [name for name, kind in COLUMNS.items() if kind is not str]
    units = ("_s", "_percent", "_mib", "_w", "_c", "_mhz", "_mib_s")
    assert [name for name in figures if not name.endswith(units)] == []
    assert list(COLUMNS)[:4] == ["time_utc", "elapsed_s", "host", "device"]


def test_formats_agree(tmp_path: Path) -> None:
    gpu = GpuUsage(index=0, uuid="GPU-a", name="x", memory_used_mib=3, power_w=1.25)
    made = rows(sample(gpus=(gpu,)))
    for suffix in ("csv", "jsonl"):
        sink = open_sink(tmp_path / f"log.{suffix}")
        sink.write(made)
        sink.close()
    with (tmp_path / "log.csv").open() as file:
        from_csv = list(csv.DictReader(file))
    from_json = [json.loads(x) for x in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert from_csv[1]["power_w"] == "1.2"
    assert from_json[1]["power_w"] == 1.2
    assert from_csv[1]["temperature_c"] == ""
    assert from_json[1]["temperature_c"] is None


def test_the_processes_of_a_worker_are_named_by_run_and_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=900 * MIB)]
    Driver(h100(0, nvmlDeviceGetComputeRunningProcesses=held)).install(monkeypatch)
    taken = Sampler(usage_source(Settings()), ToldClock(), HostReader(tmp_path)).take()
    assert taken.work == {}  # this process is nobody's worker
    (process,) = taken.gpus[0].processes
    assert process.pid == os.getpid()


def test_without_matplotlib_a_log_is_summed_up_and_a_remark_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, muster_main: MusterCli
) -> None:
    """It ended in a traceback, with --json too."""
    sink = open_sink(tmp_path / "log.csv")
    sink.write(rows(sample()))
    sink.close()
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    done = muster_main("monitor", "log.csv")
    assert done.returncode == 0 and "host" in done.stdout and "figure:" not in done.stdout
    assert "pip install 'muster-gpu[figures]'" in done.stderr
    told = muster_main("monitor", "log.csv", "--json")
    assert told.returncode == 0 and json.loads(told.stdout)["figure"] is None
