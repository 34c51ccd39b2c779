"""Training an agent: one rollout and update from top to bottom, and what is saved of it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial

import torch

from muster.base.errors import MusterError, UnknownNameError
from muster.gang.beacon import BEACON
from muster.rank.alike import check_alike, check_same_model
from muster.rank.freed_memory import freed_memory_kept
from muster.rank.life import (
    Decision,
    Interval,
    Results,
    Status,
    StopFlag,
    Trainable,
    Trainer,
    be_rank,
    live,
    memory_explained,
)
from muster.rank.record import Reporter
from muster.rank.seeding import STEP, mix, seed_everything
from muster.rank.state import Start
from muster.rl.config import PpoConfig
from muster.rl.losses import gae, normalise_advantages
from muster.rl.progress import between
from muster.rl.reporting import evaluate, headlines, picture, sum_up, update_values, words
from muster.rl.rollout import Rollout, collect
from muster.rl.setup import AgentRun, prepare, with_rank
from muster.rl.task import AgentTask, make_agent_task
from muster.rl.update import Experience, agree, end_for_rollout, no_room_error, update


class AgentTrainer(Trainer):
    """Trains a policy by acting: one rollout and update after the other.

    ``step`` raises NonFinite when a loss, a reward or an observation is no longer a number; the
    last good checkpoint is kept then.
    """

    def __init__(self, run: AgentRun) -> None:
        self.run = run
        self.gang = run.gang
        self.state = run.state
        self._reporter = Reporter(
            run.gang, run.folder, run.progress.steps, run.say,
            with_tensorboard=run.config.tensorboard,
        )  # fmt: skip
        self._memory = ExitStack()
        if run.gang.device.type == "cpu":
            self._memory.enter_context(freed_memory_kept())

    def begin(self) -> None:
        run = self.run
        steps = f"{run.progress.steps:,} steps done"
        name = run.env.spec.name
        self._reporter.begin(f"{run.num_parameters:,} parameters, {name}, {steps}", run.fraction)
        if run.progress.over(run.config) is None and run.progress.updates == 0:
            self._check_identical("at the start")

    def status(self) -> Status:
        config, progress = self.run.config, self.run.progress
        return Status(
            step=progress.steps,
            updates=progress.updates,
            total_steps=None,
            over=progress.over(config),
            wants_evaluation=progress.wants_evaluation(config),
        )

    def step(self, stop: StopFlag, interval: Interval) -> Decision:
        run = self.run
        config, progress = run.config, run.progress
        began = time.perf_counter()
        fraction = run.fraction
        lr = between(config.lr, 0.0 if config.lr_schedule == "linear" else None, fraction)
        entropy_coef = between(config.entropy_coef, config.entropy_coef_end, fraction)
        for group in run.optimizer.param_groups:
            group["lr"] = lr

        BEACON.step, BEACON.phase = progress.updates, "data"
        run.replica.settle()  # what the policy keeps of a rank's own data, as a checkpoint has it
        # For what draws from torch's own generators (dropout, an environment of the user's).
        seed_everything(mix(config.seed, STEP, run.gang.rank, progress.updates))
        rollout = _collect(run)
        with run.clock.measure("learning"):
            BEACON.phase = "forward"
            rewards = rollout.rewards
            if config.normalize_rewards:
                rewards = run.return_scale(rewards)
            returns = gae(
                rewards, rollout.values, rollout.bootstrap, rollout.last_value,
                rollout.terminated, rollout.truncated, rollout.valid,
                gamma=config.gamma, gae_lambda=config.gae_lambda,
            )  # fmt: skip
            agreed = agree(run, rollout, returns, stop=stop.is_set, save=interval.is_due())
            if agreed.changed:
                when = f"in update {progress.updates + 1}"
                check_alike(run.policy, run.gang.council, when)
                run.optimizer.zero_grad(set_to_none=True)  # none for what is frozen: no moments
                run.replica.renew()
            if not agreed.is_finite:
                end_for_rollout(run, rollout)
            device = run.gang.device
            advantages = normalise_advantages(
                returns.advantages,
                rollout.valid,
                agreed.advantage_sums.to(device),
                agreed.advantage_squares.to(device),
            )
            experience = Experience(rollout, advantages, returns.targets)
            learned = update(run, experience, entropy_coef)
            # Only here, so that acting and learning have used the same statistics.
            run.policy.normaliser.absorb(agreed.observation_deltas.to(device))
            run.return_scale.absorb(agreed.return_deltas.to(device))

        progress.updates += 1
        progress.steps += config.rollout_steps * run.num_envs
        progress.episodes += run.window.add(agreed.episode_sums)
        if progress.updates == 1:
            run.state.check_kept()
        self._check_identical(f"after update {progress.updates}")
        if run.replica.has_other_buffers:
            run.replica.take_buffers()
        seconds = time.perf_counter() - began
        values = update_values(
            run, agreed, learned, lr=lr, entropy_coef=entropy_coef, seconds=seconds
        )
        if self._reporter.record is not None:
            self._reporter.record.line("update", values)
        self._reporter.show(
            run.fraction, partial(picture, run, values), partial(words, run, values)
        )
        return Decision(agreed.stop, agreed.save)

    def evaluate(self) -> bool:
        """Play the validation episodes, on all ranks; True when the policy is the best so far."""
        began = time.perf_counter()
        run, progress = self.run, self.run.progress
        metrics, monitor = evaluate(run, "val"), run.task.monitor
        if monitor not in metrics:
            raise UnknownNameError("number to monitor", monitor, metrics)
        higher = run.task.better == "higher"
        is_best = progress.judge(metrics[monitor], metrics["return"], higher_is_better=higher)
        line = {"step": progress.steps, "update": progress.updates, "episodes": progress.episodes}
        progress.evaluations.append({**line, **metrics})
        shown = "  ".join(f"{k} {v:.4g}" for k, v in metrics.items())
        smoothed, seconds = progress.smoothed, time.perf_counter() - began
        self._reporter.evaluated(
            {**line, **metrics, "smoothed_return": smoothed, "seconds": seconds},
            f"evaluation {shown}",
            is_best=is_best,
        )
        return is_best

    def save(self, *, is_best: bool, at_end: bool = False) -> None:
        """Keep the state as it is now, between two updates; it is written in the background."""
        run = self.run
        self._reporter.flush()
        rows = {
            **{f"env/{name}": value for name, value in run.env.state().items()},
            **{f"memory/{name}": value for name, value in run.carry.state.items()},
            **{f"running/{name}": value for name, value in vars(run.running).items()},
            "starts": run.carry.starts,
            "discounted": run.discounted,
        }
        extra = {
            "return_scale": {k: v.tolist() for k, v in run.return_scale.state_dict().items()},
            "window": run.window.to_record(),
            "envs_per_rank": run.gang.council.gather(run.place.num_envs),
            "steps_per_env": run.carry.num_steps,
            "env_seed": run.place.seed,
            "task": run.task.identity(),
            "ends": [run.config.num_steps, run.config.num_episodes],
        }
        tensors = with_rank(rows, run.gang.rank)
        run.state.save(run.progress.steps, run.progress, extra, tensors, is_best=is_best)

    def sum_up(self, why: str) -> Results:
        return sum_up(self.run, why)

    def headlines(self, results: Results) -> Iterable[str]:
        return headlines(results)

    def explain(self, error: BaseException) -> MusterError:
        return no_room_error(self.run.config, self.gang.device, error)

    def close(self) -> None:
        self.run.env.close()
        self._reporter.close()
        self._memory.close()

    def _check_identical(self, when: str) -> None:
        check_same_model(self.run.policy, self.gang.council, when)


def _collect(run: AgentRun) -> Rollout:
    config = run.config
    run.policy.eval()
    with torch.no_grad(), run.clock.measure("acting"), run.precision.autocast():
        run.policy.refresh(config.num_envs, config.rollout_steps)
    rollout = collect(run.env, run.actor, run.carry, run.place, config.rollout_steps, run.clock)
    run.policy.train()
    return rollout


def _begin(task: AgentTask, config: PpoConfig, start: Start) -> AgentTrainer:
    with memory_explained(partial(no_room_error, config, start.gang.device)):
        return AgentTrainer(prepare(task, config, start))


TRAINABLE = Trainable(PpoConfig, make_agent_task, _begin)
#: See ``rank.life``: a rank as the launcher starts it, and one in this process.
run_rank, train_agent = partial(be_rank, TRAINABLE), partial(live, TRAINABLE)
