from __future__ import annotations

import pytest

from muster.base.errors import UsageError
from muster.devices.inventory import DeviceRequest, parse_devices, parse_gpu_ids


@pytest.mark.parametrize(
    ("text", "request_"),
    [
        ("auto", DeviceRequest(kind="auto", text="--devices auto")),
        (" auto ", DeviceRequest(kind="auto", text="--devices auto")),
        ("4", DeviceRequest(kind="count", count=4, text="--devices 4")),
        ("cpu", DeviceRequest(kind="cpu", text="--devices cpu")),
        ("cpu:8", DeviceRequest(kind="cpu", count=8, text="--devices cpu:8")),
        ("0,2,3", DeviceRequest(kind="ids", ids=("0", "2", "3"), text="--devices 0,2,3")),
        ("GPU-8a", DeviceRequest(kind="ids", ids=("GPU-8a",), text="--devices GPU-8a")),
        (
            "MIG-GPU-8a/1/0, 3",
            DeviceRequest(
                kind="ids", ids=("MIG-GPU-8a/1/0", "3"), text="--devices MIG-GPU-8a/1/0, 3"
            ),
        ),
    ],
)
def test_devices(text: str, request_: DeviceRequest) -> None:
    assert parse_devices(text) == request_


@pytest.mark.parametrize(
    ("text", "ids"),
    [("0", ("0",)), ("0,1", ("0", "1")), ("GPU-8a, 2", ("GPU-8a", "2"))],
)
def test_gpu_ids_is_always_a_list(text: str, ids: tuple[str, ...]) -> None:
    request = parse_gpu_ids(text)
    assert (request.kind, request.ids) == ("ids", ids)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0",
            "--devices 0 asks for zero GPUs: a single number is how many, not which one.\n"
            "Hint: write --devices cpu to run on the CPU, or --gpu-ids 0 for GPU 0.",
        ),
        (
            "none",
            "--devices none is not a choice of devices.\n"
            "Hint: write --devices cpu for no GPU, --devices auto for all free GPUs, "
            "or --devices 2 for two of them.",
        ),
        (
            "",
            "--devices '' is not a choice of devices.\n"
            "Hint: write --devices cpu for no GPU, --devices auto for all free GPUs, "
            "or --devices 2 for two of them.",
        ),
        (
            "cuda:1",
            "--devices cuda:1 is not a choice of devices.\nHint: write --gpu-ids 1 for GPU 1.",
        ),
        (
            "cpu:0",
            "--devices cpu:0 asks for no CPU worker, so nothing could run.\n"
            "Hint: write --devices cpu for one worker per core, or cpu:1 for a single one.",
        ),
        (
            "-1",
            "--devices -1: entry 1 ('-1') is neither a GPU number nor a UUID.\n"
            "Hint: write numbers (0,2,3) or UUIDs (GPU-8932f937,…), separated by commas.",
        ),
        (
            "0,,1",
            "--devices 0,,1: entry 2 ('') is neither a GPU number nor a UUID.\n"
            "Hint: write numbers (0,2,3) or UUIDs (GPU-8932f937,…), separated by commas.",
        ),
        (
            "1,2,1",
            "--devices 1,2,1: 1 is listed twice.\n"
            "Hint: list each GPU once; --per-gpu 2 puts two workers on each.",
        ),
    ],
)
def test_what_is_no_choice_of_devices_says_what_to_write(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_devices(text)
    assert str(caught.value) == message


@pytest.mark.parametrize("text", ["", "auto", "cpu", "0-2", "1.5"])
def test_gpu_ids_takes_nothing_but_ids(text: str) -> None:
    with pytest.raises(UsageError, match="is neither a GPU number nor a UUID"):
        parse_gpu_ids(text)


def test_more_workers_than_any_machine_has_cores_are_refused() -> None:
    assert parse_devices("cpu:4096").count == 4096
    with pytest.raises(UsageError, match="asks for more CPU workers than 4,096"):
        parse_devices("cpu:99999")
