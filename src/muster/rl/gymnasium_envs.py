"""Any registered Gymnasium environment by its id; and the other way round, batched environments for
programs that know Gymnasium: as one environment and as a vector.
"""

from __future__ import annotations

import difflib
import importlib
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from muster.base.errors import SetupError, UsageError
from muster.base.reaper import die_with_parent
from muster.rl.environment import (
    ACTION_MASK,
    BatchedEnv,
    Discrete,
    EnvSpec,
    Observation,
    Outcome,
    Place,
)
from muster.rl.gymnasium_spaces import ActionWriter, AutoresetMode, Reader, gymnasium
from muster.rl.gymnasium_vector import GymnasiumEnvs

__all__ = ["EnvFace", "GymnasiumEnvs", "Maker", "VectorEnvFace", "Vectorization", "make_gymnasium"]

Vectorization = Literal["sync", "async", "native"]
_Spec = gymnasium.envs.registration.EnvSpec
_VectorEnv = gymnasium.vector.VectorEnv[Any, Any, Any]

#: Gymnasium's own environments never truncate by themselves (its car racing does): only the time
#: limit that ``gymnasium.make`` puts around them.
_OWN = tuple(f"gymnasium.envs.{name}" for name in ("classic_control", "toy_text", "mujoco"))
#: Makes the environments of a place. It is called at every ``reset`` with a seed, so what does
#: not depend on the place (data, a market) is better kept outside.
Maker = Callable[[Place], BatchedEnv]

_MAX_SEED = 2**31
_MAX_FLOAT = float(np.finfo(np.float32).max)


def make_gymnasium(
    env_id: str,
    place: Place,
    *,
    vectorization: Vectorization = "sync",
    observe: tuple[int, ...] | None = None,
    env_kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> GymnasiumEnvs:
    """Make ``place.num_envs`` environments ``env_id``; ``module:env_id`` imports a module first.

    ``vectorization``: sync steps one after another in this process; async has a process for each,
    which pays when a step takes longer than about 0.1 ms; native is the environment's own vector
    form, where it has one (it cannot be resumed exactly). ``observe``: keep only these components
    of the flat observation, in this order. ``env_kwargs`` go to ``gymnasium.make``.

    Raises UsageError (unknown id, unsupported spaces, wrong arguments) and SetupError (a package
    is missing).
    """
    spec = _registered(env_id)
    kwargs = dict(env_kwargs)
    with _explained(env_id):
        if vectorization == "native":
            envs = _native(env_id, spec, place.num_envs, kwargs)
        else:
            _check_one(env_id, spec, kwargs, observe)
            envs = _vector(spec, place.num_envs, kwargs, is_async=vectorization == "async")
    return GymnasiumEnvs(
        envs,
        place,
        name=env_id,
        observe=observe,
        min_truncation_steps=_time_limit(spec, kwargs),
    )


def _registered(env_id: str) -> _Spec:
    module, _, name = env_id.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise SetupError(
                f"Cannot import {module!r}, which should register {name!r}: {error}."
            ) from error
    spec = gymnasium.registry.get(name)
    if spec is None:
        near = difflib.get_close_matches(name, gymnasium.registry, n=3, cutoff=0.5)
        meant = f"did you mean {', '.join(map(repr, near))}? " if near else ""
        raise UsageError(
            f"Unknown Gymnasium environment {name!r}.",
            hint=f"{meant}'MODULE:{name}' imports MODULE first, which registers it.",
        )
    return spec


def _vector(spec: _Spec, num_envs: int, kwargs: dict[str, Any], *, is_async: bool) -> _VectorEnv:
    parent_pid = os.getpid()

    def make() -> gymnasium.Env[Any, Any]:
        if is_async and sys.platform == "linux" and os.getpid() != parent_pid:
            die_with_parent(parent_pid)
        return _make(spec, kwargs)

    if not is_async:
        return gymnasium.vector.SyncVectorEnv(
            [make] * num_envs, copy=False, autoreset_mode=AutoresetMode.DISABLED
        )
    with warnings.catch_warnings():
        # Forking beside threads is what data loaders do too. The processes step environments
        # only: they touch neither torch nor a GPU.
        warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
        return gymnasium.vector.AsyncVectorEnv(
            [make] * num_envs,
            copy=False,
            context="fork" if sys.platform == "linux" else None,
            autoreset_mode=AutoresetMode.DISABLED,
        )


def _make(spec: _Spec, kwargs: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    # The checker only warns, and costs time in every step; what matters here is checked anyway.
    return gymnasium.make(spec, **{"disable_env_checker": True, **kwargs})


def _check_one(
    env_id: str, spec: _Spec, kwargs: dict[str, Any], observe: tuple[int, ...] | None
) -> None:
    """Make one environment to find what is wrong with all, before processes are started."""
    env = _make(spec, kwargs)
    try:
        Reader.of(env_id, env.observation_space, observe)
        ActionWriter.of(env_id, env.action_space)
    finally:
        env.close()


def _native(env_id: str, spec: _Spec, num_envs: int, kwargs: dict[str, Any]) -> _VectorEnv:
    if spec.vector_entry_point is None:
        raise UsageError(
            f"{env_id} has no vector form of its own.", hint="use sync or async vectorization."
        )
    return gymnasium.make_vec(
        spec, num_envs=num_envs, vectorization_mode="vector_entry_point", **kwargs
    )


def _time_limit(spec: _Spec, kwargs: dict[str, Any]) -> int:
    """The smallest number of steps after which an episode can be truncated, as far as known."""
    limit = kwargs.get("max_episode_steps", spec.max_episode_steps)
    is_own = str(spec.entry_point).startswith(_OWN) and not spec.additional_wrappers
    return max(1, int(limit)) if is_own and limit is not None else 1


@contextmanager
def _explained(env_id: str) -> Iterator[None]:
    """Raise what goes wrong while an environment is made as an error of one sentence."""
    try:
        yield
    except gymnasium.error.DependencyNotInstalled as error:
        raise SetupError(f"{env_id} needs a package that is missing: {error}") from error
    except ImportError as error:
        raise SetupError(f"{env_id} cannot be imported: {error}") from error
    except (gymnasium.error.Error, TypeError) as error:
        raise UsageError(f"{env_id} cannot be made: {error}") from error


class EnvFace(gymnasium.Env[NDArray[np.float32], Any]):
    """One environment of a ``BatchedEnv`` as a ``gymnasium.Env``.

    Observations are one flat float32 Box: the entries of ``EnvSpec.observation`` in their order,
    without the action mask, each in row-major order. Infos hold ``action_mask`` (int8, as
    ``Discrete.sample`` takes it) where there is one, and at the end of an episode its extras.
    ``reset(seed=...)`` decides everything that follows; without a seed the next episode begins.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - declared so by Gymnasium

    def __init__(self, maker: Maker, device: torch.device | str = "cpu") -> None:
        self._source = _Source(maker, 1, torch.device(device))
        self.observation_space = _observation_space(self._source.spec)
        self.action_space = _action_space(self._source.spec)
        #: What the next episode begins with, where the last step has ended one.
        self._next: Observation | None = None
        self._is_running = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        if seed is None and self._next is not None:
            observation = self._next
        else:
            observation = self._source.reset(seed, self.np_random)
        self._next = None
        self._is_running = True
        return self._source.flat(observation)[0], _mask_info(observation, single=True)

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        if not self._is_running:
            raise gymnasium.error.ResetNeeded("The episode is over: call reset() before step().")
        outcome = self._source.step(np.asarray(action)[None])
        terminated, truncated = bool(outcome.terminated), bool(outcome.truncated)
        info = _mask_info(outcome.final, single=True)
        if terminated or truncated:
            info |= {name: float(values) for name, values in outcome.extras.items()}
            self._next = outcome.observation
            self._is_running = False
        seen = self._source.flat(outcome.final)[0]
        return seen, float(outcome.reward), terminated, truncated, info


class VectorEnvFace(gymnasium.vector.VectorEnv[NDArray[np.float32], Any, NDArray[Any]]):
    """A ``BatchedEnv`` as a ``gymnasium.vector.VectorEnv``; autoreset mode same-step.

    Observations and infos as ``EnvFace`` has them; where an episode has ended, ``final_obs`` has
    its last observation and ``final_info`` its last mask and its extras. ``reset`` takes one
    seed, which decides everything that follows in all environments.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012 - declared so by Gymnasium
        "render_modes": [],
        "autoreset_mode": AutoresetMode.SAME_STEP,
    }

    def __init__(self, maker: Maker, num_envs: int, device: torch.device | str = "cpu") -> None:
        self._source = _Source(maker, num_envs, torch.device(device))
        self.num_envs = num_envs
        self.single_observation_space = _observation_space(self._source.spec)
        self.single_action_space = _action_space(self._source.spec)
        batch_space = gymnasium.vector.utils.batch_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Raises UsageError for a list of seeds and for a ``reset_mask``: here all environments
        share one seed, and each begins anew when its episode ends.
        """
        if not (seed is None or isinstance(seed, int | np.integer)):
            raise UsageError(f"reset takes one seed for all environments, not {seed!r}.")
        if options and "reset_mask" in options:
            raise UsageError("reset_mask has no use here: the autoreset mode is same-step.")
        super().reset(seed=seed)
        observation = self._source.reset(seed, self.np_random)
        return self._source.flat(observation), _mask_info(observation, single=False)

    def step(
        self, actions: Any
    ) -> tuple[NDArray[np.float32], NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        if not self._source.is_begun:
            raise gymnasium.error.ResetNeeded("Call reset() before the first step().")
        outcome = self._source.step(np.asarray(actions))
        return (
            self._source.flat(outcome.observation),
            _numpy(outcome.reward).astype(np.float64),
            _numpy(outcome.terminated),
            _numpy(outcome.truncated),
            _mask_info(outcome.observation, single=False) | self._final_infos(outcome),
        )

    def _final_infos(self, outcome: Outcome) -> dict[str, Any]:
        """Report the ends of episodes as Gymnasium's vector environments do in same-step mode."""
        ended = _numpy(outcome.terminated | outcome.truncated)
        if not ended.any():
            return {}
        flat = self._source.flat(outcome.final)
        final_obs = np.full(self.num_envs, None, dtype=object)
        for row in np.flatnonzero(ended):
            final_obs[row] = flat[row].copy()
        final_info = _mask_info(outcome.final, single=False)
        for name, values in outcome.extras.items():
            final_info |= {name: _numpy(values), f"_{name}": ended.copy()}
        return {
            "final_obs": final_obs,
            "_final_obs": ended.copy(),
            "final_info": final_info,
            "_final_info": ended.copy(),
        }


class _Source:
    """The batched environments behind a face, made anew for every seed."""

    def __init__(self, maker: Maker, num_envs: int, device: torch.device) -> None:
        self._maker = maker
        self._num_envs = num_envs
        self._device = device
        self._env = self._made(0)
        self.spec = self._env.spec
        self.is_begun = False

    def reset(self, seed: int | None, generator: np.random.Generator) -> Observation:
        """Reset with ``seed``; the first time without one, with a seed from ``generator``."""
        if seed is not None:
            self._env = self._made(int(seed))
        elif not self.is_begun:
            self._env = self._made(int(generator.integers(_MAX_SEED)))
        self.is_begun = True
        return self._env.reset()

    def step(self, actions: NDArray[Any]) -> Outcome:
        """Take one step with actions as Gymnasium has them, [num_envs, ...]."""
        kind = torch.int64 if isinstance(self.spec.actions, Discrete) else torch.float32
        return self._env.step(torch.as_tensor(actions, dtype=kind, device=self._device))

    def flat(self, observation: Observation) -> NDArray[np.float32]:
        """The observation as one new array [num_envs, size]."""
        entries = [observation[name] for name in _entries(self.spec)]
        parts = [entry.reshape(self._num_envs, -1).to(torch.float32) for entry in entries]
        return _numpy(torch.cat(parts, dim=1))

    def _made(self, seed: int) -> BatchedEnv:
        place = Place(num_envs=self._num_envs, first_env=0, seed=seed, device=self._device)
        return self._maker(place)


def _entries(spec: EnvSpec) -> list[str]:
    return [name for name in spec.observation if name != ACTION_MASK]


def _observation_space(spec: EnvSpec) -> gymnasium.Space[Any]:
    """The observation space; a batched environment states no bounds, so they are the type's."""
    size = sum(math.prod(spec.observation[name].shape) for name in _entries(spec))
    return gymnasium.spaces.Box(-_MAX_FLOAT, _MAX_FLOAT, (size,), np.float32)


def _action_space(spec: EnvSpec) -> gymnasium.Space[Any]:
    if isinstance(spec.actions, Discrete):
        return gymnasium.spaces.Discrete(spec.actions.num_actions)
    low, high = (np.array(bound, np.float32) for bound in spec.actions)
    return gymnasium.spaces.Box(low, high, dtype=np.float32)


def _mask_info(observation: Observation, *, single: bool) -> dict[str, Any]:
    if ACTION_MASK not in observation:
        return {}
    mask = _numpy(observation[ACTION_MASK]).astype(np.int8)
    if single:
        return {ACTION_MASK: mask[0]}
    return {ACTION_MASK: mask, f"_{ACTION_MASK}": np.ones(len(mask), np.bool_)}


def _numpy(values: Tensor) -> NDArray[Any]:
    """A copy as an array, because users of Gymnasium may write into what they are given."""
    return np.array(values.detach().cpu().numpy())
