from __future__ import annotations

import pytest

from muster.api.start.options import SweepOptions, as_trackers, options_of_call
from muster.base.errors import UsageError
from muster.base.flags import parse_duration
from muster.cli.flags import SpaceFlags
from muster.cli.parse import parse_groups


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("30m", 1800), ("2h", 7200), ("1h30m", 5400), ("1d", 86400),
     ("500ms", 0.5), ("1.5h", 5400)],
)  # fmt: skip
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text, "--timeout") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "abc", "10 parsecs", "-5", "1h-30m", "5x"])
def test_a_duration_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--timeout"):
        parse_duration(text, "--timeout")


def _options(*words: str) -> SweepOptions:
    options: SweepOptions = parse_groups({"options": SweepOptions}, words, "sweep", "").options
    return options


@pytest.mark.parametrize(
    ("words", "devices", "gpu_ids", "max_gpus"),
    [
        ("", "auto", None, None),
        ("--devices cpu:8", "cpu:8", None, None),
        ("--gpus 4", "4", None, None),
        ("--gpus=0,2", "0,2", None, None),
        ("--gpu-ids 0", "auto", "0", None),
        ("--gpu_ids 0", "auto", "0", None),
        ("--num-gpus 3", "3", None, None),
        ("--num-gpus -1", "auto", None, None),
        ("--world-size 2", "2", None, None),
        ("--max-gpus 2", "auto", None, 2),
        ("--no-multi-gpu", "auto", None, 1),
    ],
)
def test_every_alias_means_what_it_says(
    words: str, devices: str, gpu_ids: str | None, max_gpus: int | None
) -> None:
    options = _options(*words.split())
    assert (options.devices, options.gpu_ids, options.max_gpus) == (devices, gpu_ids, max_gpus)


def test_two_choices_of_devices_are_refused() -> None:
    with pytest.raises(UsageError, match="--devices and --gpu-ids each choose the devices"):
        _options("--gpu-ids", "1", "--devices", "cpu")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"retries": -1}, "--retries -1 is too small"),
        ({"gpus_per_task": 0}, "--gpus-per-task 0 is too small"),
        ({"timeout_s": 0.0}, "leaves no time to run"),
        ({"per_gpu": 0}, "--per-gpu 0 is too small"),
        ({"max_gpus": 0}, "--max-gpus 0 leaves no GPU"),
        ({"export_interval_s": 0.0}, "is not a time"),
    ],
)
def test_impossible_values_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SweepOptions(**values)  # type: ignore[arg-type]


def test_a_flag_that_adds_up_may_be_given_several_times() -> None:
    words = ["--grid", "a=1", "--seeds", "3", "--grid=b=2", "--grid", "c=3", "d=4"]
    parsed = parse_groups({"space": SpaceFlags}, words, "sweep", "")
    assert parsed.space.grid == ("a=1", "b=2", "c=3", "d=4")
    assert parsed.space.seeds == "3"


@pytest.mark.parametrize(
    ("given", "names"),
    [(None, ()), ("none", ()), ("wandb, mlflow", ("wandb", "mlflow")), (["wandb"], ("wandb",))],
)
def test_trackers_are_named_in_calls_as_on_the_command_line(
    given: object, names: tuple[str, ...]
) -> None:
    assert as_trackers(given) == names  # type: ignore[arg-type]
    (options,) = options_of_call("sweep", {"log_to": given}, SweepOptions)
    assert options.log_to == names


@pytest.mark.parametrize("given", ["w", ["typo"]])
def test_no_tracker_is_told(given: object) -> None:
    with pytest.raises(UsageError, match="tracker of log_to"):
        as_trackers(given)  # type: ignore[arg-type]
