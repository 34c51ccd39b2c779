"""The real command on this machine, as a user types it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import MusterCli

from muster.cli.main import main

HOSTS = Path(__file__).parents[1] / "unit" / "doctor" / "hosts"


def by_check(report: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in report["findings"]:
        found.setdefault(finding["check"], []).append(finding)
    return found


def test_what_is_broken_is_found_repaired_recorded_and_found_again(
    muster_cli: MusterCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An interface that does not exist: gloo fails, and another one is seen to work."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    done = muster_cli(
        *("doctor", "--devices", "cpu:2", "--json", "--save-facts", "host.json", "--fix", "env"),
        *("--time-limit", "4m"),  # a busy machine needs more than a minute
        timeout_s=300,
    )
    assert done.returncode == 2, done.stderr
    report = json.loads(done.stdout)
    found = by_check(report)
    assert report["exit_code"] == 2
    (broken,) = found["all-reduce"]
    assert broken["severity"] == "error"
    assert "nosuch0" in broken["what"]
    assert "it was right on this machine" in broken["fix"]
    assert [one["severity"] for one in found["matmul"]] == ["ok"]
    assert [one["severity"] for one in found["backends"]] == ["ok"]
    assert [one["severity"] for one in found["disk-space"]] != ["error"]
    assert report["facts"]["torch"]["run"]["status"] == "ok"

    interface = broken["settings"]["GLOO_SOCKET_IFNAME"]
    shell = 'source muster_env.sh; echo "$GLOO_SOCKET_IFNAME"'
    said = subprocess.run(["bash", "-euc", shell], cwd=tmp_path, capture_output=True, text=True)
    assert said.stdout.strip() == interface != "nosuch0"

    again = muster_cli("doctor", "--from-facts", "host.json", "--json")
    assert again.returncode == 2
    assert json.loads(again.stdout) == report


def test_torch_that_hangs_is_cut_off(
    muster_cli: MusterCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "bad" / "torch"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("import time\ntime.sleep(600)\n")
    (folder / "version.py").write_text('__version__ = "2.9.0+cu130"\ncuda = "13.0"\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "bad"))
    for limit in ("6", "20", "60"):  # on a busy machine nothing may be left of a short time for it
        done = muster_cli("doctor", "--quiet", "--time-limit", limit, timeout_s=300)
        if "importing" in done.stdout:
            break
    # By its own limit, which is longer, it would be told as an error.
    assert "was not examined: the time for all checks was over at importing torch" in done.stdout
    assert "at importing torch, after" in done.stdout and "--time-limit" in done.stdout


def test_torch_that_does_not_start_is_told_with_its_reason(
    muster_cli: MusterCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "bad" / "torch"
    folder.mkdir(parents=True)
    why = "libcudart.so.13: cannot open shared object file"
    (folder / "__init__.py").write_text(f"raise ImportError({why!r})\n")
    (folder / "version.py").write_text('__version__ = "2.9.0+cu130"\ncuda = "13.0"\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "bad"))
    done = muster_cli("doctor", "--quiet")
    assert done.returncode == 2
    assert f"torch 2.9.0+cu130 does not start: ImportError: {why}" in done.stdout


@pytest.mark.quick
def test_quick_starts_no_torch_and_measures_nothing(muster_cli: MusterCli) -> None:
    done = muster_cli("doctor", "--quick", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == report["exit_code"]
    facts = report["facts"]
    assert facts["torch"]["version"]
    assert facts["torch"]["run"]["status"] == "skipped"
    assert [facts[name] for name in ("matmuls", "host_copies", "peer_copies", "all_reduce")] == [
        None
    ] * 4


@pytest.mark.parametrize(
    ("name", "flags", "code"),
    [
        ("healthy_8gpu", ("--strict",), 0),
        ("mixed_cards", (), 0),
        ("mixed_cards", ("--strict",), 1),
        ("driver_mismatch", (), 2),
    ],
)
def test_exit_codes(
    capsys: pytest.CaptureFixture[str], name: str, flags: tuple[str, ...], code: int
) -> None:
    assert main(["doctor", "--from-facts", str(HOSTS / f"{name}.json"), *flags]) == code
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("broken:" if code == 2 else "healthy:")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--from-facts", "none.json"), "Cannot read the facts in none.json"),
        (("--from-facts", "x.json", "--quick"), "--quick has no effect with --from-facts"),
        (
            ("--from-facts", "x.json", "--save-facts", "y.json"),
            "--save-facts has no effect with --from-facts",
        ),
        (("--quick", "--devices", "cpu"), "--devices has no effect with --quick"),
        (("--fix-file", "x.sh"), "--fix-file has no effect without --fix env"),
        (("--time_limit", "1"), "nothing can be examined in that time"),
        (("--devices", "gpu"), "is not a choice of devices"),
    ],
)
def test_mistakes_are_usage_errors(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], says: str
) -> None:
    assert main(["doctor", *flags]) == 2
    assert says in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_a_setup_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    target = str(tmp_path / "file" / "x.sh")
    facts = str(HOSTS / "healthy_8gpu.json")
    assert main(["doctor", "--from-facts", facts, "--fix", "env", "--fix-file", target]) == 3
    assert f"Cannot write the settings to {target}" in capsys.readouterr().err


def test_a_models_memory_is_shown_beside_the_findings(muster_cli: MusterCli) -> None:
    """fp32, AdamW: 4 bytes each for weights and gradients, 8 for the optimizer's two moments."""
    done = muster_cli("doctor", "--quick", "--model", "params=1e9", "--json")
    assert done.returncode == 0, done.stderr
    (plan,) = json.loads(done.stdout)["memory"]
    text = json.dumps(plan)
    assert "weights" in text and "optimizer" in text
    shown = muster_cli("doctor", "--quick", "--quiet", "--model", "params=1e9").stdout
    assert re.search(r"weights +3\.73 GiB", shown)  # 4e9 / 2^30
    assert re.search(r"optimizer +7\.45 GiB", shown)


@pytest.mark.quick
def test_flags_about_a_model_need_one(muster_main: MusterCli) -> None:
    done = muster_main("doctor", "--quick", "--batch-size", "3")
    assert done.returncode == 2
    assert "--batch-size" in done.stderr and "--model" in done.stderr
