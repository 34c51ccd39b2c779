"""A Gymnasium vector environment as a ``VectorEnv``, whatever its autoreset mode."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from muster.base.errors import SetupError, UsageError
from muster.rank.seeding import mix
from muster.rl.environment import (
    ACTION_MASK,
    EnvSpec,
    Observation,
    Outcome,
    Place,
)
from muster.rl.gymnasium_spaces import (
    OBSERVATION,
    ActionWriter,
    AutoresetMode,
    Bools,
    Floats,
    History,
    Look,
    Reader,
    Seen,
    gymnasium,
)
from muster.rl.streams import EPISODE

_VectorEnv = gymnasium.vector.VectorEnv[Any, Any, Any]


class GymnasiumEnvs:
    """A ``VectorEnv`` over a ``gymnasium.vector.VectorEnv`` of ``place.num_envs`` environments.

    Observations are one flat float32 entry ``observation``; an ``action_mask`` of the infos or of
    a Dict observation is the entry of that name. The environments live on the CPU; what is
    returned is on ``place.device``.

    Autoreset modes:

    - disabled: with Gymnasium's sync and async vectorization every episode is started with a
      seed of its own, a function of (``place.seed``, number of the environment, number of the
      episode), and ``restore`` repeats episodes exactly. Others get one seed at ``reset``.
    - same-step: the final observation is read from ``final_obs`` of the infos.
    - next-step: a step that only starts an episode is not ``valid``.

    In the last two the environments draw the starts of later episodes themselves, so ``restore``
    gives None, and what is drawn depends on how environments are split over objects.

    What an environment raises goes to the caller, and the environments are closed.
    """

    def __init__(
        self,
        envs: _VectorEnv,
        place: Place,
        *,
        name: str,
        observe: tuple[int, ...] | None = None,
        min_truncation_steps: int = 1,
    ) -> None:
        """Take ``envs`` over: they are closed when this raises.

        They are reset once to see whether they return action masks.
        """
        self._envs = envs
        self._place = place
        self._name = name
        self._is_begun = False
        self._is_closed = False
        try:
            if envs.num_envs != place.num_envs:
                raise UsageError(f"{name} has {envs.num_envs} environments, not {place.num_envs}.")
            #: When episodes begin anew.
            self.mode = _mode(name, envs)
            reader = Reader.of(name, envs.single_observation_space, observe)
            self._writer = ActionWriter.of(name, envs.single_action_space)
            self._takes_seeds = self.mode is AutoresetMode.DISABLED and isinstance(
                envs.unwrapped, gymnasium.vector.SyncVectorEnv | gymnasium.vector.AsyncVectorEnv
            )
            self._episode = np.zeros(place.num_envs, np.int64)
            self._history = History(place.num_envs, self._writer.actions)
            #: Next-step mode: the rows that the coming step only starts.
            self._must_start = np.zeros(place.num_envs, np.bool_)
            has_mask = reader.mask_space is not None or ACTION_MASK in self._begin_all()[1]
            self._look = Look(
                name=name,
                num_envs=place.num_envs,
                reader=reader,
                actions=self._writer.actions,
                has_mask=has_mask,
            )
            self._spec = EnvSpec(
                name=name,
                num_envs=place.num_envs,
                observation=self._look.entries(),
                actions=self._writer.actions,
                min_truncation_steps=min_truncation_steps,
            )
        except BaseException:
            self._abandon()
            raise
        self._episode -= 1
        self._seen: Seen

    @staticmethod
    def of(
        vector_env: _VectorEnv, place: Place, *, observe: tuple[int, ...] | None = None
    ) -> GymnasiumEnvs:
        """Environments that the caller has made. Raises UsageError for an unknown autoreset mode
        and for unsupported spaces.
        """
        spec = vector_env.spec
        name = type(vector_env).__name__ if spec is None else spec.id
        return GymnasiumEnvs(vector_env, place, name=name, observe=observe)

    @property
    def spec(self) -> EnvSpec:
        return self._spec

    def reset(self) -> Observation:
        self._check_open()
        self._episode = self._episode + 1
        self._history.clear(np.ones(self._place.num_envs, np.bool_))
        self._must_start = np.zeros_like(self._must_start)
        with self._closing():
            self._seen = self._checked(self._look.read(*self._begin_all()))
        self._is_begun = True
        return self._seen.tensors(self._place.device)

    def step(self, actions: Tensor) -> Outcome:
        self._check_begun("step")
        given = actions.detach().cpu().numpy()
        with self._closing():
            return self._step(given)

    def state(self) -> dict[str, Tensor]:
        """The numbers of the episodes under way.

        Where they can be repeated it holds their actions so far as well, and the observation that
        these have to lead to.
        """
        self._check_begun("state")
        state = {"episode": torch.tensor(self._episode)}
        if self._takes_seeds:
            seen = self._seen.tensors(torch.device("cpu"))
            state |= self._history.state()
            state |= {f"seen.{name}": values.clone() for name, values in seen.items()}
        return state

    def restore(self, state: Mapping[str, Tensor]) -> Observation | None:
        self._check_open()
        episode = np.array(state["episode"].cpu().numpy(), np.int64)
        if len(episode) != self._place.num_envs:
            raise UsageError(
                f"{self._name}: the state is of {len(episode)} environments, and there are "
                f"{self._place.num_envs}."
            )
        self._episode = episode
        self._is_begun = False
        if not self._takes_seeds or "length" not in state:
            return None
        self._history = History.of(state, self._writer.actions)
        with self._closing():
            seen = self._repeated()
        if seen is None:
            return None
        for name, values in seen.tensors(torch.device("cpu")).items():
            wanted = state.get(f"seen.{name}")
            if wanted is None or not torch.equal(values, wanted.cpu()):
                return None
        self._seen = seen
        self._is_begun = True
        return seen.tensors(self._place.device)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        close(self._envs)

    def _step(self, given: NDArray[Any]) -> Outcome:
        batch, rewards, terminations, truncations, infos = self._envs.step(
            self._writer.batch(given)
        )
        started = self._must_start
        valid = ~started
        reward = np.array(rewards, np.float32) * valid
        terminated = np.array(terminations, np.bool_) & valid
        truncated = np.array(truncations, np.bool_) & valid & ~terminated
        ended = terminated | truncated
        seen = self._look.read(batch, infos)
        self._history.append(given)
        self._history.clear(started)
        self._check_finite("reward", reward[:, None])
        self._check_truncated(truncated)

        if self.mode is AutoresetMode.NEXT_STEP:
            starts, self._must_start = started, ended
            final = seen = self._checked(seen.freed(ended))
            self._episode = self._episode + ended
        else:
            starts = ended
            final = seen = seen.freed(ended) if self.mode is AutoresetMode.DISABLED else seen
            if ended.any():
                if self.mode is AutoresetMode.SAME_STEP:
                    final = self._look.finals(seen, ended, infos)
                self._check_finite(OBSERVATION, final.flat)
                self._episode = self._episode + ended
                self._history.clear(ended)
                if self.mode is AutoresetMode.DISABLED:
                    seen = seen.replaced(ended, self._look.read(*self._begin(ended)))
            seen = self._checked(seen)
        self._seen = seen

        device = self._place.device
        observation = seen.tensors(device)
        return Outcome(
            observation=observation,
            reward=torch.from_numpy(reward).to(device),
            terminated=torch.from_numpy(terminated).to(device),
            truncated=torch.from_numpy(truncated).to(device),
            starts=torch.from_numpy(starts.copy()).to(device),
            valid=torch.from_numpy(valid).to(device),
            final=observation if final is seen else final.tensors(device),
            extras={},
        )

    def _begin_all(self) -> tuple[Any, dict[str, Any]]:
        """Start episode ``self._episode`` everywhere."""
        if self._takes_seeds:
            return self._begin(np.ones(self._place.num_envs, np.bool_))
        seed = self._seed(0)
        options = {"reset_mask": np.ones(self._place.num_envs, np.bool_)}
        is_disabled = self.mode is AutoresetMode.DISABLED
        return self._envs.reset(seed=seed, options=options if is_disabled else None)

    def _begin(self, which: Bools) -> tuple[Any, dict[str, Any]]:
        """Start episode ``self._episode`` in these rows (mode disabled)."""
        seeds: Any = None
        if self._takes_seeds:
            seeds = [self._seed(row) if begins else None for row, begins in enumerate(which)]
        return self._envs.reset(seed=seeds, options={"reset_mask": which.copy()})

    def _seed(self, row: int) -> int:
        number = self._place.first_env + row
        mixed = mix(self._place.seed, EPISODE, number, int(self._episode[row]))
        return mixed & 0x7FFFFFFF  # some environments pass it on to 32-bit generators

    def _repeated(self) -> Seen | None:
        """Replay every row to the end of its history; None if an episode ends before."""
        idle = self._history.length == 0
        if idle.all():
            return self._look.read(*self._begin_all())
        for restart, actions in self._history.rounds():
            if restart.any():
                self._begin(restart)
            batch, _, terminated, truncated, infos = self._envs.step(self._writer.batch(actions))
            if ((terminated | truncated) & ~idle).any():
                return None
        seen = self._look.read(batch, infos)
        return seen.replaced(idle, self._look.read(*self._begin(idle))) if idle.any() else seen

    def _checked(self, seen: Seen) -> Seen:
        self._check_finite(OBSERVATION, seen.flat)
        if seen.mask is not None and not seen.mask.any(axis=1).all():
            row = int(np.flatnonzero(~seen.mask.any(axis=1))[0])
            raise UsageError(f"{self._name}: {self._where(row)} its {ACTION_MASK} allows nothing.")
        return seen

    def _check_finite(self, what: str, values: Floats) -> None:
        if np.isfinite(values).all():
            return
        row, column = (int(i) for i in np.argwhere(~np.isfinite(values))[0])
        place = f"component {column} of the {what}" if what == OBSERVATION else f"the {what}"
        raise UsageError(
            f"{self._name}: {self._where(row)} {place} is {values[row, column]}. Learning from it "
            "would turn every weight into NaN."
        )

    def _check_truncated(self, truncated: Bools) -> None:
        early = truncated & (self._history.length < self._spec.min_truncation_steps)
        if early.any():
            row = int(np.flatnonzero(early)[0])
            raise UsageError(
                f"{self._name}: {self._where(row)} it is cut off, but its time limit is "
                f"{self._spec.min_truncation_steps} steps."
            )

    def _where(self, row: int) -> str:
        return (
            f"in environment {self._place.first_env + row} at step "
            f"{self._history.length[row]} of episode {self._episode[row]}"
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(f"{self._name} is closed: make new environments.")

    def _check_begun(self, call: str) -> None:
        self._check_open()
        if not self._is_begun:
            raise RuntimeError(f"{call} before reset: call reset() or restore() first.")

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        """End the environments when an error is raised inside."""
        try:
            yield
        except BaseException as error:
            self._abandon()
            if isinstance(error, EOFError | ConnectionError):
                raise SetupError(
                    f"{self._name}: a process that steps an environment has died ({error!r}).",
                    hint="was it killed for memory? Sync vectorization shows a crash in place.",
                ) from error
            if isinstance(error, ValueError) and (odd := _odd_shape(self._envs)):
                raise UsageError(
                    f"{self._name}: {odd}.",
                    hint="correct the observation_space, or what reset and step give.",
                ) from error
            raise

    def _abandon(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            abandon(self._envs)


def _odd_shape(envs: _VectorEnv) -> str | None:
    """Which environment gives an array of another shape than its space, where Gymnasium tells."""
    shape = envs.single_observation_space.shape
    for row, seen in enumerate(getattr(envs.unwrapped, "_env_obs", ())):
        got = getattr(seen, "shape", shape)
        if shape is not None and got != shape:
            return f"environment {row} gives an observation of shape {got}, its space says {shape}"
    return None


def _mode(name: str, envs: _VectorEnv) -> AutoresetMode:
    named = envs.metadata.get("autoreset_mode")
    for mode in AutoresetMode:
        if named in (mode, mode.value):
            return mode
    known = ", ".join(repr(mode.value) for mode in AutoresetMode)
    raise UsageError(
        f"{name}: its autoreset mode is {named!r}, so it is not known which observation ends an "
        "episode.",
        hint=f"metadata['autoreset_mode'] has to be one of {known}.",
    )


def close(envs: gymnasium.vector.VectorEnv[Any, Any, Any]) -> None:
    """Close the environments, by force where a process of theirs has died."""
    try:
        envs.close()
    except (OSError, EOFError):
        abandon(envs)


def abandon(envs: gymnasium.vector.VectorEnv[Any, Any, Any]) -> None:
    """End the environments after an error, without asking processes that may be dead or busy."""
    inner = envs.unwrapped
    if not isinstance(inner, gymnasium.vector.AsyncVectorEnv):
        envs.close()
        return
    for process in inner.processes:
        if process.is_alive():
            process.terminate()
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")  # that a call was pending is known
        envs.close(terminate=True)
    for process in inner.processes:
        process.join()
    inner.closed = True
