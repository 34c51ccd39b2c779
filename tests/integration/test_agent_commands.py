"""``muster train ppo`` and ``muster train clstm-ppo`` as they are typed, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import MusterCli

#: Small enough for a test: the market, the network and the rollout.
TINY = (
    *("--sim-symbols", "2", "--sim-bars", "900", "--window", "5", "--episode-bars", "20"),
    *("--hidden", "8", "--num_envs", "8", "--batch_size", "4", "--rollout-steps", "20"),
    *("--eval-episodes", "4", "--no-tensorboard", "--devices", "cpu:2"),
)


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "training_results.json").read_text())
    return found


def test_the_market_on_two_ranks_resumed_and_compared(
    muster_cli: MusterCli, tmp_path: Path
) -> None:
    words = ("train", "clstm-ppo", "--num_episodes", "40", *TINY, "--run-dir", "run")
    done = muster_cli(*words)
    assert done.returncode == 0, done.stderr
    assert "simulated" in done.stdout.lower()
    found = results(tmp_path / "run")
    assert found["num_ranks"] == 2 and found["num_envs"] == 16
    assert found["episodes"] >= 40
    assert {"return", "sharpe", "max_drawdown"} <= set(found["metrics"]["test"])
    told = json.dumps(found["agent"])
    for baseline in ("hold", "random", "buy"):
        assert baseline in told
    assert list((tmp_path / "run" / "figures").glob("*.png"))
    assert (tmp_path / "run" / "curves.png").stat().st_size > 10_000
    looked = muster_cli("status", "run")
    assert looked.returncode == 0 and "episodes · val return" in looked.stdout, looked.stderr

    longer = muster_cli(*words[:3], "80", *words[4:])  # the same training, further
    assert longer.returncode == 0, longer.stderr
    assert "resume     from step" in longer.stdout
    assert results(tmp_path / "run")["episodes"] >= 80

    other = muster_cli(*words, "--gamma", "0.5")
    assert other.returncode != 0
    assert "--gamma 0.99, now 0.5" in other.stderr and "Traceback" not in other.stderr


def test_the_larger_action_space(muster_cli: MusterCli, tmp_path: Path) -> None:
    done = muster_cli(
        "train", "clstm-ppo", "--action-space", "91", "--num_episodes", "8", *TINY,
        "--devices", "cpu", "--run-dir", "run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "options-91" in done.stdout


def test_any_gymnasium_environment(muster_cli: MusterCli, tmp_path: Path) -> None:
    done = muster_cli(
        "train", "ppo", "--env", "CartPole-v1", "--num-steps", "512", "--num-envs", "4",
        "--rollout-steps", "64", "--hidden", "8", "--eval-episodes", "1", "--eval-frequency", "0",
        "--observe", "0", "2", "--json", "--devices", "cpu", "--run-dir", "run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["results"]["steps"] == 512
    assert (tmp_path / "run" / "tb").is_dir()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("ppo", "--env", "CartPole-v9", "--num-steps", "9"), "CartPole-v1"),
        (("ppo", "--num-envs", "8", "--batch-size", "3"), "must be divisible by --batch-size 3"),
        (("ppo", "--gamma", "1.5"), "--gamma must be between 0 and 1"),
        (("ppo", "--multi-gpu", "dp"), "one process per GPU"),
        (("ppo", "--num-gpus", "-1", "--max-gpus", "1"), "each choose the devices"),
        (("clstm-ppo", "--data", "no/such.csv"), "no/such.csv"),
        (("clstm-ppo", "--action-space", "30"), "action-space"),
        (("clstm-pop",), "clstm-ppo"),
    ],
)
def test_mistakes_are_told_without_a_traceback(
    muster_main: MusterCli, words: tuple[str, ...], said: str
) -> None:
    done = muster_main("train", *words, "--devices", "cpu")
    assert done.returncode in (2, 3), done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.quick
def test_what_does_not_fit_an_agent_is_refused(muster_main: MusterCli) -> None:
    for command, said in (("verify", "learns by acting"), ("plan", "learns by acting")):
        done = muster_main(command, "ppo")
        assert done.returncode == 2, done.stderr
        assert said in done.stderr and "Traceback" not in done.stderr
