"""Gymnasium, or what to install. Its users import it from here, and are imported only on use."""

from __future__ import annotations

from muster.base.errors import SetupError

try:
    import gymnasium
    from gymnasium.vector import AutoresetMode
except ImportError as error:
    raise SetupError(
        f"Gymnasium environments need gymnasium >= 1.1, which cannot be imported ({error}).",
        hint="pip install 'muster-gpu[rl]'",
    ) from error

__all__ = ["AutoresetMode", "gymnasium"]
