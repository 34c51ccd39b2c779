"""What the screen shows of a sample, at any width and height of a terminal."""

from __future__ import annotations

from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from muster.cli.commands.monitor import plain_line, rate, render, summary_rows
from muster.devices.inventory import Holder
from muster.devices.nvml_usage import GpuUsage
from muster.monitor.files import Summary
from muster.monitor.host import HostUsage
from muster.monitor.sample import Sample, Work, rows

GPU = GpuUsage(
    index=0,
    uuid="GPU-0",
    name="NVIDIA H100 80GB HBM3",
    utilisation_percent=90.0,
    memory_used_mib=60_000,
    memory_total_mib=81_559,
    power_w=690.2,
    power_limit_w=700.0,
    temperature_c=61,
    sm_clock_mhz=1980,
    memory_clock_mhz=2619,
    throttle=("power cap",),
    pcie_receive_mib_s=1234.5,
    pcie_send_mib_s=2.1,
    processes=(Holder(pid=41, user="ada", used_mib=59_000, command="python train.py " + "x" * 99),),
)
LOST = GpuUsage(index=1, uuid="", name="NVIDIA H100 80GB HBM3", lost="fell off the bus")
HOST = HostUsage(cpu_percent=33.3, memory_used_mib=2048, memory_total_mib=8192, disk_read_mib_s=1.5)


def sample(*gpus: GpuUsage) -> Sample:
    return Sample(
        time_s=0.0,
        elapsed_s=75.0,
        host_name="box",
        host=HOST,
        gpus=gpus,
        work={41: Work("digits", "rank 0")},
    )


def shown(one: Sample, width: int, height: int, problem: str | None = None) -> list[str]:
    out = StringIO()
    console = Console(file=out, width=width, height=height)
    console.print(render(one, width, height, problem=problem))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_wide_terminal_shows_everything() -> None:
    text = "\n".join(shown(sample(GPU, LOST), 150, 30))
    for part in (
        "watched for 1 min 15 s",
        "CPU 33 %  memory 2.0/8.0 GiB  disk r 1.5 w –",
        "█████████░  90 %  58.6/79.6 GiB  690/700 W  61 °C  1,980/2,619 MHz  1,234/2.1",
        "power cap",
        "NVIDIA H100 80GB HBM3",
        "gpu1 is lost: fell off the bus",
        "gpu0  41   ada   59,000 MiB  digits/rank 0  python train.py",
    ):
        assert part in text, part


def test_a_narrow_one_keeps_what_matters() -> None:
    text = "\n".join(shown(sample(GPU, LOST), 80, 24))
    for part in ("90 %", "58.6/79.6 GiB", "690/700 W", "61 °C", "power cap", "digits/rank 0"):
        assert part in text, part
    assert "MHz" not in text


@given(st.integers(60, 200), st.integers(5, 60), st.integers(0, 8))
def test_it_fits_the_terminal(width: int, height: int, num_gpus: int) -> None:
    lines = shown(sample(*[GPU] * num_gpus), width, height)
    assert max(map(len, lines)) <= width
    assert len(lines) <= max(height, num_gpus + 5)


def test_without_a_gpu_it_says_why() -> None:
    assert "No GPU: no driver" in shown(sample(), 80, 24, "no driver")


def test_a_line_for_logs() -> None:
    line = plain_line(sample(GPU, LOST))
    assert line == (
        "    75.0 s  cpu 33 % mem 2.0/8.0 GiB disk r 1.5 w – net in – out – MiB/s"
        " | gpu0 90 % 58.6/79.6 GiB 690 W 61 °C throttled: power cap | gpu1 LOST"
    )


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (0.04, "0.0"), (99.9, "99.9"), (1234.5, "1,234")]
)
def test_rates(value: float | None, text: str) -> None:
    assert rate(value) == text


def test_the_summary_names_machines_only_where_there_are_several() -> None:
    one = rows(sample(GPU, LOST))
    assert [line[0] for line in summary_rows(Summary(one).devices())] == ["host", "gpu0", "gpu1"]
    assert summary_rows(Summary(one).devices())[2][-1] == (
        "NVIDIA H100 80GB HBM3, lost in 1 sample"
    )
