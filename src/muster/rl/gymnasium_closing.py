"""Ending the processes of Gymnasium's async environments, whatever state they are in."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

from muster.rl.gymnasium_import import gymnasium


def close(envs: gymnasium.vector.VectorEnv[Any, Any, Any]) -> None:
    """The ordinary way; by force where a process of theirs has died."""
    try:
        envs.close()
    except (OSError, EOFError):
        abandon(envs)


def abandon(envs: gymnasium.vector.VectorEnv[Any, Any, Any]) -> None:
    """After an error. Processes are not asked: they may be dead, or in the middle of a step."""
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
