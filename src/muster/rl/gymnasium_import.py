"""Gymnasium, or what to install. Its users import it from here, and are imported only on use."""

from __future__ import annotations

from muster.base.errors import MissingPackageError, SetupError

try:
    import gymnasium
    from gymnasium.vector import AutoresetMode
except ModuleNotFoundError as error:
    if error.name is None or not error.name.startswith("gymnasium"):
        raise
    raise MissingPackageError("A Gymnasium environment", "gymnasium", "rl") from None
except ImportError as error:
    raise SetupError(
        f"Gymnasium environments need gymnasium >= 1.1; the one here cannot be used: {error}.",
        hint="pip install 'muster-gpu[rl]'.",
    ) from error

__all__ = ["AutoresetMode", "gymnasium"]
