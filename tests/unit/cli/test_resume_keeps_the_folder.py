"""A run goes on in its own folder and under its own name."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conftest import MusterCli

import muster
from muster.api.start.options import SweepOptions
from muster.cli.commands.resume import _merged, _options
from muster.cli.commands.sweep import flags_of_sweep
from muster.cli.flags import sweep_options
from muster.cli.gang import gang_options
from muster.cli.options import Part
from muster.cli.parse import RunPlace, parse_groups
from muster.cli.train_flags import flags_of_train
from muster.farm.executors.cluster import ClusterRequest


@pytest.mark.parametrize("flag", ["--run-dir", "--name"])
@pytest.mark.parametrize("command", ["resume", "retry"])
def test_another_folder_is_refused(
    command: str, flag: str, tmp_path: Path, muster_main: MusterCli
) -> None:
    """It was taken and had no effect."""
    done = muster_main(command, "runs/a", flag, "b")
    assert done.returncode == 2
    assert f"muster {command} has no flag {flag}" in done.stderr
    assert flag not in muster_main(command, "--help-all").stdout


def test_another_folder_for_a_map_is_refused(tmp_path: Path, muster_main: MusterCli) -> None:
    (tmp_path / "t.py").write_text("def up(record):\n    return record\n")
    (tmp_path / "in.jsonl").write_text('{"x": 1}\n')
    words = ("--input", "in.jsonl", "--output", "out.jsonl", "--run-dir", "a", "--on", "inline")
    assert muster_main("map", "t.py:up", *words, "--quiet").returncode == 0
    done = muster_main("resume", "a", "--run-dir", "b")
    assert done.returncode == 2
    assert "--run-dir has no effect" in done.stderr


@pytest.mark.parametrize("command", ["resume", "retry"])
def test_a_sweep_of_a_program_goes_on_from_another_folder(
    command: str, tmp_path: Path, muster_main: MusterCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was named by a path from here, and looked for from where it was begun."""
    (tmp_path / "begun").mkdir()
    monkeypatch.chdir(tmp_path / "begun")
    target = Path("t.py")
    target.write_text("def f(x: int):\n    return 1 / x\n")
    options = {"executor": "inline", "run_dir": "r", "monitor_interval_s": 0.0}
    muster.sweep("t.py:f", grid={"x": [0, 1]}, **options)
    done = muster_main(command, "begun/r", "--json")
    assert done.returncode == 1, done.stderr
    assert '"done": 1' in done.stdout and '"failed": 1' in done.stdout
    assert not (tmp_path / "begun" / "begun").exists()


@pytest.mark.parametrize(
    ("begun", "now"),
    [("--nproc-per-node=2", "--devices=cpu:1"), ("--devices=cpu:1", "--nproc-per-node=2")],
)
def test_a_choice_of_devices_replaces_any_other(begun: str, now: str) -> None:
    before = flags_of_train(["digits", begun], "train", "")
    typed = flags_of_train(["digits", now], "train", "")
    assert begun in " ".join(before.argv()).replace(" cpu", "=cpu").replace(" 2", "=2")
    again = " ".join(_merged(Path("r"), before, typed).argv())
    assert now.partition("=")[0] in again and begun.partition("=")[0] not in again


_SETUP = ("--setup=true", "--hosts-python=/x")


@pytest.mark.parametrize(
    ("begun", "now", "keeps"),
    [
        (("--hosts=a", *_SETUP), "--devices=cpu:1", ()),
        (("--hosts=a", *_SETUP), "--nproc-per-node=2", ()),
        (("--hosts=a,b", *_SETUP, "--min-nodes=2", "--max-restarts=1"), "--hosts=a", _SETUP),
        (("--hosts=a,b", "--min-nodes=1", "--max-restarts=1"), "--hosts=a,c", ("--min-nodes=1",)),
        (("--hosts=a,b", "--master-addr=1.2.3.4"), "--hosts=b,a", ()),
        (("--hosts=a,b", "--master-addr=1.2.3.4", "--master-port=9"), "--devices=cpu:1", ()),
        (("--nodes=2", "--master-addr=a", "--master-port=9"), "--devices=cpu:1",
         ("--master-addr=a", "--master-port=9")),
    ],
)  # fmt: skip
def test_what_was_said_for_hosts_goes_with_them(
    begun: tuple[str, ...], now: str, keeps: tuple[str, ...]
) -> None:
    """It was refused: no effect without --hosts; or more nodes than the pause's own command has."""
    before, typed = (flags_of_train(["digits", *words], "train", "") for words in (begun, [now]))
    again = _merged(Path("r"), before, typed)
    gang_options(again)
    words = " ".join(again.argv()).replace("=", " ")
    for one in ("--setup", "--hosts-python", "--min-nodes", "--master-addr", "--master-port"):
        assert (one in words) == any(kept.startswith(one) for kept in keeps), (one, words)


def test_a_sweep_on_hosts_goes_on_here(tmp_path: Path, muster_main: MusterCli) -> None:
    before = flags_of_sweep(
        ["t.py:f", "--hosts", "a", "--setup", "true", "--gpus-per-worker", "1", "--retries", "2"]
    )
    typed = flags_of_sweep(["t.py:f", "--devices", "cpu:1"])
    again = _merged(Path("r"), before, typed)
    assert sweep_options(again).executor == "local"
    assert "--setup" not in again.argv() and "--retries" in again.argv()
    typed = flags_of_sweep(["t.py:f", "--hosts", "b"])
    assert "--setup" in _merged(Path("r"), before, typed).argv()


@pytest.mark.parametrize("now", ["--devices=cpu:1", "--on=local"])
def test_a_call_on_hosts_goes_on_here(now: str) -> None:
    groups = {"place": RunPlace, "options": Part(of=SweepOptions, without=("run_dir", "name"))}
    begun = SweepOptions(cluster=ClusterRequest(hosts="a", hosts_setup=("true",)))
    assert begun.executor == "ray"
    found = _options(parse_groups(groups, ["r", now], "resume", ""), begun)
    assert found.executor == "local" and found.cluster == ClusterRequest()


def test_a_flag_of_retry_is_no_flag_of_a_map_that_goes_on(
    tmp_path: Path, muster_main: MusterCli
) -> None:
    """It was taken and had no effect."""
    (tmp_path / "t.py").write_text("def up(record):\n    return record\n")
    (tmp_path / "in.jsonl").write_text('{"x": 1}\n')
    words = ("--input", "in.jsonl", "--output", "out.jsonl", "--run-dir", "a", "--on", "inline")
    assert muster_main("map", "t.py:up", *words, "--quiet").returncode == 0
    done = muster_main("resume", "a", "--cancelled")
    assert done.returncode == 2
    assert "--cancelled" in done.stderr and "Traceback" not in done.stderr


def test_an_array_goes_on_elsewhere_by_its_elements(tmp_path: Path, muster_main: MusterCli) -> None:
    """It said that --array has no effect, which nobody had typed."""
    (tmp_path / "t.py").write_text("def f(x: int):\n    return {'y': x}\n")
    words = ("sweep", "t.py:f", "--grid", "x=1,2,3", "--run-dir", "a", "--array", "2")
    assert muster_main("slurm-script", *words, "--output", "job.sh").returncode == 0
    done = muster_main("resume", "a", "--on", "local")
    assert done.returncode == 2
    assert "a is an array: it has no coordinator that could go on --on local." in done.stderr
    for number in ("0", "1"):
        words = ("resume", "a", "--element", number, "--on", "inline", "--quiet")
        assert muster_main(*words).returncode == 0
    collected = muster_main("collect", "a")
    assert "3 new results; 3 done" in collected.stdout, collected.stderr
