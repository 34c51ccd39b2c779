"""Everything that is decided before an agent's first step; it is printed as it is decided.

A checkpoint of an agent also works on another number of ranks. Weights, optimizer and statistics
are the same on all ranks. What belongs to single environments (their state, the memory, the returns
under way) is written by the rank that has them, as rows:

``rank<r>/env/<name>``, ``rank<r>/memory/<name>``, ``rank<r>/running/<name>``, ``rank<r>/starts``

Rows are numbered over all ranks, and everything random is a function of that number. So a training
goes on exactly where as many environments are wanted as before, whatever the ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muster.base.codec import decode
from muster.base.errors import PlanMismatchError, SetupError, UsageError
from muster.base.shown_text import count
from muster.rank.checkpoint_files import read_shapes, read_tensors
from muster.rank.precision import Precision, agree_on_precision
from muster.rank.process_group import Gang
from muster.rank.replica import Replica, make_replica, may_fuse
from muster.rank.seeding import STEP, mix, seed_everything, use_deterministic
from muster.rank.state import Say, Start, State, newest_state, seed_model
from muster.rank.task import check_gives
from muster.rl.config import PpoConfig
from muster.rl.environment import EnvSpec, Place, Split, VectorEnv, check_observation
from muster.rl.evaluation import rehearse
from muster.rl.policy import Policy
from muster.rl.progress import AgentProgress, Running, Window
from muster.rl.rollout import Actor, Carry, PhaseClock
from muster.rl.statistics import ReturnScale
from muster.rl.task import AgentTask, make_environments
from muster.run.folder import RunFolder

#: Mixed into --seed, so that the environments of the splits draw different numbers.
_SPLIT_SEEDS: dict[Split, int] = {"train": 11, "val": 12, "test": 13}


@dataclass(kw_only=True)
class AgentRun:
    """One rank's training of an agent, ready for the loop."""

    task: AgentTask
    config: PpoConfig
    gang: Gang
    folder: RunFolder
    say: Say
    precision: Precision
    env: VectorEnv
    place: Place
    policy: Policy
    replica: Replica
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    return_scale: ReturnScale
    actor: Actor
    window: Window
    progress: AgentProgress
    state: State
    clock: PhaseClock
    num_parameters: int
    measured: dict[str, float] = field(default_factory=dict)
    #: Rows of this rank's environments: begun anew, or read from a checkpoint.
    carry: Carry = field(init=False)
    running: Running = field(init=False)
    discounted: Tensor = field(init=False)

    @property
    def num_envs(self) -> int:
        """Environments of all ranks together."""
        return self.place.num_envs * self.gang.num_ranks

    @property
    def fraction(self) -> float:
        """The part of the training that is done, in [0, 1]; schedules follow it."""
        return self.progress.fraction(self.config)


def _window(spec: EnvSpec, config: PpoConfig, gang: Gang) -> Window:
    """Large enough that no rollout fills it with the short episodes that end together."""
    return Window(spec.extras, size=max(100, 2 * config.num_envs * gang.num_ranks))


def place_of(config: PpoConfig, gang: Gang, split: Split, num_envs: int) -> Place:
    """This rank's environments of a split, ``num_envs`` on every rank."""
    return Place(
        num_envs=num_envs,
        first_env=gang.rank * num_envs,
        seed=mix(config.seed, _SPLIT_SEEDS[split]),
        device=gang.device,
    )


def prepare(task: AgentTask, config: PpoConfig, start: Start) -> AgentRun:
    """Make environments, policy and optimizer; then load the last intact checkpoint, if any.

    Raises UsageError, on every rank, for settings that make no sense.
    """
    gang, folder, say = start.gang, start.folder, start.say
    if config.num_steps is None and config.num_episodes is None:
        raise UsageError(
            "There is no end to this training.", hint="give --num-steps or --num-episodes."
        )
    say(
        f"agent      {count(config.num_envs * gang.num_ranks, 'environment')} x "
        f"{count(config.rollout_steps, 'step')} per update, "
        f"{count(config.num_minibatches, 'minibatch', 'minibatches')} x "
        f"{count(config.update_epochs, 'epoch')}, on {gang.where}"
    )
    precision = agree_on_precision(config.precision, gang)
    say(f"precision  {precision}")
    if precision.name == "fp16" and gang.device.type == "cpu":
        raise UsageError(
            "--precision fp16: torch has no LSTM in fp16 for the CPU.", hint="use fp32 or bf16."
        )
    if config.deterministic:
        use_deterministic()
    seed_everything(mix(config.seed, STEP, gang.rank))
    checkpoint, extra = newest_state(start)
    if checkpoint is not None:
        _check_same_task(extra.get("task", {}), task.identity(), folder)
    place = place_of(config, gang, "train", config.num_envs)
    place = dataclasses.replace(place, seed=extra.get("env_seed", place.seed))
    env = make_environments(task, "train", place)
    for line in task.remarks():
        say(line)
    seed_model(config)
    policy = task.policy(env.spec)
    check_gives(task.policy, policy, Policy)
    policy.normaliser.enabled = config.normalize_observations
    policy.to(gang.device)
    replica = make_replica(
        "ddp" if gang.num_ranks > 1 else "single", policy, gang, precision, has_unused=False
    )
    fused = may_fuse(replica.parameters) or None
    optimizer = torch.optim.Adam(replica.parameters, lr=config.lr, eps=1e-5, fused=fused)
    scaler = precision.scaler()
    run = AgentRun(
        task=task,
        config=config,
        gang=gang,
        folder=folder,
        say=say,
        precision=precision,
        env=env,
        place=place,
        policy=policy,
        replica=replica,
        optimizer=optimizer,
        scaler=scaler,
        return_scale=ReturnScale().to(gang.device),
        actor=Actor(policy, env.spec, precision, compiled=config.compile),
        window=_window(env.spec, config, gang),
        progress=AgentProgress(),
        # Sharded: every rank has environments of its own.
        state=State(start, policy, optimizer, scaler, is_sharded=True, keep=config.keep),
        clock=PhaseClock(gang.device),
        num_parameters=sum(p.numel() for p in policy.parameters()),
    )
    if checkpoint is None:
        _begin_episodes(run)
        who = f"The environments of {type(task).__name__}"
        check_observation(who, env.spec, run.carry.observation)
    else:
        _go_on(run, checkpoint, extra)
    if run.progress.over(config) is None:
        one = partial(place_of, config, gang, num_envs=1)
        rehearse(task, policy, env.spec, gang, config.seed, one, say)
    return run


def _check_same_task(before: Mapping[str, str], now: Mapping[str, str], folder: RunFolder) -> None:
    changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    if changed:
        raise PlanMismatchError(
            f"The {' and '.join(changed)} of this training has changed since {folder.path} was "
            "begun: its policy has been chosen by, and may have seen, what is now the test.",
            hint="choose another --run-dir for the new one; this one is untouched.",
        )


def _go_on(run: AgentRun, checkpoint: Path, extra: Mapping[str, Any]) -> None:
    council, say = run.gang.council, run.say
    run.state.restore(checkpoint, extra)
    run.policy.normaliser.renew()
    scale = {k: torch.tensor(v, dtype=torch.float64) for k, v in extra["return_scale"].items()}
    run.return_scale.load_state_dict(scale)
    run.window.restore(extra["window"])
    run.progress = decode(AgentProgress, extra["progress"], ignore_unknown=True)
    ends = [run.config.num_steps, run.config.num_episodes]
    has_schedule = run.config.lr_schedule != "constant" or run.config.entropy_coef_end is not None
    if has_schedule and extra.get("ends", ends) != ends:
        say("note       the end has moved, and with it the schedules: they jump here")
    trouble = _restore_environments(run, checkpoint, extra)
    # One decision: environments of one training are all restored or all begun anew.
    troubles = [t for t in council.gather(trouble) if t]
    say(f"resume     from step {run.progress.steps:,} (update {run.progress.updates})")
    if troubles:
        _begin_anew(run)
        say(f"note       {troubles[0]}; every environment begins a new episode")


def _restore_environments(run: AgentRun, checkpoint: Path, extra: Mapping[str, Any]) -> str | None:
    """Restore what belongs to single environments; returns why where that is impossible."""
    counts = list(extra["envs_per_rank"])
    if sum(counts) != run.num_envs:
        return f"there were {sum(counts)} environments, now {run.num_envs}"
    device = run.gang.device
    rows = {k: v.to(device) for k, v in read_rows(checkpoint, counts, run.place).items()}
    observation = run.env.restore(group(rows, "env"))
    if observation is None:
        return "these environments cannot be brought to the same state again"
    run.carry = Carry(
        observation=observation,
        state=group(rows, "memory"),
        starts=rows["starts"],
        num_steps=int(extra["steps_per_env"]),
    )
    run.running = Running(**group(rows, "running"))
    run.discounted = rows["discounted"]
    return None


def _begin_anew(run: AgentRun) -> None:
    """Begin new episodes, from streams that no earlier start has used."""
    run.env.close()
    run.place = dataclasses.replace(run.place, seed=mix(run.place.seed, run.progress.updates))
    run.env = make_environments(run.task, "train", run.place)
    run.window = _window(run.env.spec, run.config, run.gang)
    _begin_episodes(run)


def _begin_episodes(run: AgentRun) -> None:
    """Begin an episode in every environment, with an empty memory and no reward yet."""
    num_envs, device = run.place.num_envs, run.gang.device
    run.carry = Carry(
        observation=run.env.reset(),
        state=run.policy.initial_state(num_envs, device),
        starts=torch.ones(num_envs, dtype=torch.bool, device=device),
    )
    run.running = Running.fresh(num_envs, device)
    run.discounted = torch.zeros(num_envs, dtype=torch.float64, device=device)


Rows = dict[str, Tensor]


def with_rank(rows: Mapping[str, Tensor], rank: int) -> Rows:
    """Names of one rank's rows in a checkpoint."""
    return {f"rank{rank}/{name}": value for name, value in rows.items()}


def read_rows(checkpoint: Path, counts: list[int], place: Place) -> Rows:
    """The rows of ``place`` out of those that ranks with ``counts`` environments have written.

    The caller sees to it that the number of environments over all ranks is the same. Raises
    SetupError where a rank's rows are not whole.
    """
    shapes = read_shapes(checkpoint)
    room = {
        name: torch.zeros(shape, dtype=dtype)
        for name, (shape, dtype) in shapes.items()
        if name.startswith("rank")
    }
    read_tensors(checkpoint, room, process_group=None)
    names = sorted(name.partition("/")[2] for name in room if name.startswith("rank0/"))
    rows = {}
    for name in names:
        pieces = []
        for rank, num_rows in enumerate(counts):
            piece = room.get(f"rank{rank}/{name}")
            if piece is None or len(piece) != num_rows:
                raise SetupError(
                    f"The checkpoint {checkpoint.name} has no whole {name} of rank {rank}.",
                    hint="it was written by another version; use another --run-dir.",
                )
            pieces.append(piece)
        whole = _joined(pieces)
        rows[name] = whole[place.first_env : place.first_env + place.num_envs]
    return rows


def group(rows: Mapping[str, Tensor], prefix: str) -> Rows:
    """The rows called ``prefix/…``, without it."""
    start = f"{prefix}/"
    return {name[len(start) :]: v for name, v in rows.items() if name.startswith(start)}


def _joined(pieces: list[Tensor]) -> Tensor:
    """Rows of all ranks; further dimensions are padded with zeros to the largest."""
    sizes = [max(piece.shape[d] for piece in pieces) for d in range(1, pieces[0].dim())]
    padded = []
    for piece in pieces:
        room = piece.new_zeros((len(piece), *sizes))
        room[tuple(slice(0, size) for size in piece.shape)] = piece
        padded.append(room)
    return torch.cat(padded)
