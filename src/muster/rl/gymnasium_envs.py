"""Any registered Gymnasium environment, by its id."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal

from muster.base.errors import SetupError, UsageError
from muster.base.reaper import die_with_parent
from muster.rl.environment import Place
from muster.rl.gymnasium_spaces import ActionWriter, AutoresetMode, Reader, gymnasium
from muster.rl.gymnasium_vector import GymnasiumEnvs

__all__ = ["GymnasiumEnvs", "Vectorization", "make_gymnasium"]

Vectorization = Literal["sync", "async", "native"]
_Spec = gymnasium.envs.registration.EnvSpec
_VectorEnv = gymnasium.vector.VectorEnv[Any, Any, Any]

#: Gymnasium's own environments never truncate by themselves (its car racing does): only the time
#: limit that ``gymnasium.make`` puts around them.
_OWN = tuple(f"gymnasium.envs.{name}" for name in ("classic_control", "toy_text", "mujoco"))


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
    with _told(env_id):
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
def _told(env_id: str) -> Iterator[None]:
    """Raise what goes wrong while an environment is made as one sentence."""
    try:
        yield
    except gymnasium.error.DependencyNotInstalled as error:
        raise SetupError(f"{env_id} needs a package that is missing: {error}") from error
    except ImportError as error:
        raise SetupError(f"{env_id} cannot be imported: {error}") from error
    except (gymnasium.error.Error, TypeError) as error:
        raise UsageError(f"{env_id} cannot be made: {error}") from error
