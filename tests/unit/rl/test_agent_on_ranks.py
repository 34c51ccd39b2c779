"""The learner on real gloo ranks: what correctness asks of distributed recurrent PPO."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.unit.rl.toy_agents import CartPoleAgent, GymnasiumAgent
from tests.unit.train.rank_jobs import Job, Outcomes, run_jobs

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(sys.platform == "win32", reason="ranks are forked"),
]

UPDATE = 24 * 8
SCALED = {"normalize_rewards": True, "value_clip": 0.2, "entropy_coef_end": 0.0}
#: name -> (ranks, agent, settings): stopped in the third update of six, then gone on with.
EXACT: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "one": (1, CartPoleAgent(), SCALED),
    "two": (2, CartPoleAgent(), {"num_envs": 4, "batch_size": 2, "lr_schedule": "linear"}),
    "plain": (1, CartPoleAgent(memory="none", wide=False), {}),
    # Not evaluated after the third update, which would share what each rank has kept.
    "remembering": (
        2,
        CartPoleAgent(remembers=True),
        {"num_envs": 4, "batch_size": 2, "eval_frequency": 4},
    ),
}


#: Each changes what is learnt from the second update on, if it has an effect at all.
SETTINGS: dict[str, Any] = {
    "normalize_rewards": True,
    "value_clip": 1e-3,
    "lr_schedule": "linear",
    "entropy_coef_end": 1.0,
    "max_grad_norm": 1e-3,
    "gamma": 0.5,
    "gae_lambda": 0.1,
    "clip": 1e-4,
    "value_coef": 5.0,
    "normalize_observations": False,
    "seed": 1,
    "model_seed": 1,
}


def jobs() -> list[Job]:
    many = {"num_envs": 8, "batch_size": 4}
    few = {"num_envs": 4, "batch_size": 2}
    fewest = {"num_envs": 2, "batch_size": 1}
    found = [
        Job(name="1x8", ranks=1, task=CartPoleAgent(), config={**many, **SCALED}),
        Job(name="2x4", ranks=2, task=CartPoleAgent(), config={**few, **SCALED}),
        Job(name="4x2", ranks=4, task=CartPoleAgent(), config={**fewest, **SCALED}),
        Job(name="accumulated", ranks=1, task=CartPoleAgent(),
            config={**many, **SCALED, "grad_accum_steps": 2}),
        Job(name="far", ranks=2, task=CartPoleAgent(), config={**few, "target_kl": 1e-7}),
        Job(name="native", ranks=2, task=GymnasiumAgent(vectorization="native"), config=few),
        Job(name="continuous", ranks=1, task=GymnasiumAgent(env="Pendulum-v1"), config=many),
        Job(name="nan", ranks=2, task=CartPoleAgent(trouble="nan", at=30, on=4), config=few),
        Job(name="memory", ranks=1, task=CartPoleAgent(trouble="memory", at=2), config=many),
        Job(name="unstorable", ranks=1, task=CartPoleAgent(trouble="unstorable"), config=many),
        Job(name="half", ranks=1, task=CartPoleAgent(wide=False), config={"precision": "bf16"}),
    ]  # fmt: skip
    short = {**many, "num_steps": 3 * UPDATE, "eval_frequency": 0, "eval_episodes": 1}
    found.append(Job(name="base", ranks=1, task=CartPoleAgent(), config=short))
    for name, value in SETTINGS.items():
        config = {**short, name: value}
        found.append(Job(name=f"with-{name}", ranks=1, task=CartPoleAgent(), config=config))
    found.append(
        Job(name="bad-gradient", ranks=2, task=CartPoleAgent(trouble="gradient", at=12),
            config=few, checkpoint_steps=1)
    )  # fmt: skip
    for name, (ranks, task, config) in EXACT.items():
        whole = Job(name=name, ranks=ranks, task=task, config=config)
        stopped = replace(task, trouble="stop", at=2 * 24 + 3, on=4 * (ranks - 1))
        found += [
            whole,
            replace(whole, name=f"{name}-stopped", folder=f"{name}-again", task=stopped),
            replace(whole, name=f"{name}-again"),
        ]
    stopped = CartPoleAgent(trouble="stop", at=2 * 24 + 3)
    found += [
        Job(name="moved-stopped", folder="moved", ranks=2, task=stopped, config={**few, **SCALED}),
        Job(name="moved", ranks=1, task=CartPoleAgent(), config={**many, **SCALED}),
        Job(name="fewer-stopped", folder="fewer", ranks=2, task=stopped, config=few),
        Job(name="fewer", ranks=1, task=CartPoleAgent(), config=few),
    ]
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_jobs(tmp_path_factory.mktemp("agents"), jobs())


def updates(trained: Outcomes, name: str) -> list[dict[str, Any]]:
    """Lines of the updates without what a clock says."""
    trained.done(name)
    found = trained.lines(name, "update")
    clocks = ("seconds", "steps_per_s", "acting_share", "stepping_share", "learning_share")
    return [{k: v for k, v in line.items() if k not in clocks} for line in found]


def learnt(trained: Outcomes, name: str) -> dict[str, torch.Tensor]:
    """Weights, statistics and the optimizer's memory; not what belongs to single environments."""
    trained.done(name)
    return {k: v for k, v in trained.weights(name).items() if not k.startswith("rank")}


@pytest.mark.parametrize("name", ["2x4", "4x2", "accumulated"])
def test_ranks_times_environments_make_no_difference(trained: Outcomes, name: str) -> None:
    """16: N ranks x E environments = 1 rank x N E environments, to 1e-6 after 6 updates."""
    one, other = learnt(trained, "1x8"), learnt(trained, name)
    assert one.keys() == other.keys()
    for key, value in one.items():
        torch.testing.assert_close(other[key], value, rtol=1e-6, atol=1e-6, msg=key)
    for mine, theirs in zip(updates(trained, "1x8"), updates(trained, name), strict=True):
        for key in ("return", "episodes", "policy_loss", "value_loss", "entropy", "kl"):
            assert theirs.get(key) == pytest.approx(mine.get(key), rel=1e-6, abs=1e-9), key


@pytest.mark.parametrize("name", ["1x8", "2x4", "4x2", "native", "continuous", "plain"])
def test_the_first_ratio_is_one(trained: Outcomes, name: str) -> None:
    """2: acting and learning compute the same, with episodes that end inside sequences."""
    lines = updates(trained, name)
    assert len(lines) == 6
    assert all(abs(line["first_kl"]) < 1e-9 for line in lines), [x["first_kl"] for x in lines]


def test_the_policy_is_learning(trained: Outcomes) -> None:
    lines = updates(trained, "1x8")
    assert lines[-1]["entropy"] < lines[0]["entropy"]
    assert all(line["kl"] > 0 and line["minibatches"] == 4 for line in lines)


def test_the_statistics_have_counted_every_step_once(trained: Outcomes) -> None:
    for name in ("1x8", "2x4", "4x2"):
        assert learnt(trained, name)["model/normaliser.moments.0.count"].item() == 6 * UPDATE


def test_all_ranks_end_an_update_together(trained: Outcomes) -> None:
    """11: a tiny --target-kl stops the second minibatch on every rank, and nobody waits."""
    lines = updates(trained, "far")
    assert len(lines) == 6
    assert all(line["stopped_early"] and line["minibatches"] == 2 for line in lines)


def test_only_real_steps_count(trained: Outcomes) -> None:
    """A native vector environment needs a step to start anew: part of no episode."""
    found = trained.done("native")
    assert found["episodes"] > 0
    count = learnt(trained, "native")["model/normaliser.moments.0.count"].item()
    assert count < 6 * UPDATE
    window = found["window"]
    assert window["return"] == pytest.approx(window["length"]), "a reward of 1 for each step"


@pytest.mark.parametrize("name", EXACT)
def test_a_resumed_run_has_the_same_bits(trained: Outcomes, name: str) -> None:
    """14: environments, memories, statistics, optimizer and schedules, all of it."""
    assert trained.of(f"{name}-stopped").results is None
    whole, again = trained.weights(name), trained.weights(f"{name}-again")
    assert whole.keys() == again.keys()
    different = [key for key, value in whole.items() if not torch.equal(value, again[key])]
    assert different == []
    assert updates(trained, f"{name}-again") == updates(trained, name)
    assert trained.done(f"{name}-again")["metrics"] == trained.done(name)["metrics"]


def test_a_run_goes_on_with_other_ranks(trained: Outcomes) -> None:
    """As many environments in all: the same training, to rounding."""
    one, moved = learnt(trained, "1x8"), learnt(trained, "moved")
    for key, value in one.items():
        torch.testing.assert_close(moved[key], value, rtol=1e-6, atol=1e-6, msg=key)


def test_other_numbers_of_environments_begin_anew_and_it_is_said(trained: Outcomes) -> None:
    found = trained.of("fewer")
    trained.done("fewer")
    assert any("there were 8 environments, now 4" in line for line in found.said)


def test_what_is_not_a_number_ends_all_ranks(trained: Outcomes) -> None:
    for rank in (0, 1):
        found = trained.of("nan", rank)
        assert "MusterError" in found.kinds and found.exit_code == 1
        # Every rank says where it was, also the one on which all is well.
        assert "The reward of environment " in (found.error or "")
        assert " is no longer a number in update " in (found.error or "")
        assert "correct what the environment gives" in (found.error or "")


def test_memory_that_runs_out_is_told_with_what_takes_it(trained: Outcomes) -> None:
    found = trained.of("memory")
    assert "MusterError" in found.kinds and found.exit_code == 3
    assert "8 environments x 24 steps" in (found.error or "")


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_has_an_effect(trained: Outcomes, name: str) -> None:
    base, changed = learnt(trained, "base"), learnt(trained, f"with-{name}")
    weights = [key for key in base if key.startswith("model/net")]
    assert any(not torch.equal(base[key], changed[key]) for key in weights)


def test_a_gradient_that_is_no_number_is_never_applied(trained: Outcomes) -> None:
    """The loss was finite. What is kept is from before, and can be gone on from."""
    for rank in (0, 1):
        found = trained.of("bad-gradient", rank)
        assert found.exit_code == 1 and "The gradient" in (found.error or "")
    kept = trained.weights("bad-gradient")
    assert all(bool(torch.isfinite(value).all()) for value in kept.values())


def test_a_policy_that_no_checkpoint_can_hold_is_refused_after_one_update(
    trained: Outcomes,
) -> None:
    found = trained.of("unstorable")
    assert "the model keeps _extra_state, a dict" in (found.error or ""), found.trace
    assert found.exit_code == 2
    assert trained.lines("unstorable", "update") == []


def test_half_precision_trains(trained: Outcomes) -> None:
    assert trained.done("half")["precision"].startswith("bf16")
