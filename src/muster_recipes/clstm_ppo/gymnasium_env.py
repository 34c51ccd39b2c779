"""The options market for programs that know Gymnasium.

    import muster_recipes.clstm_ppo.gymnasium_env
    env = gymnasium.make("muster/Options-v0")

Importing this module is what makes the id known, as everywhere since Gymnasium 1.0; so does
``gymnasium.make("muster_recipes.clstm_ppo.gymnasium_env:muster/Options-v0")``. Nothing heavy is
imported before an environment is made.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster import UnknownNameError
from muster_recipes.clstm_ppo.config import ClstmPpoConfig

if TYPE_CHECKING:
    from muster.agents import EnvFace, Maker, Split, VectorEnvFace

ID = "muster/Options-v0"


def register() -> None:
    """Make ``ID`` known to Gymnasium; once is enough, and more does no harm."""
    try:
        from gymnasium.envs import registration
    except ImportError:
        return  # making an environment will report it

    if ID in registration.registry:
        return
    registration.register(
        id=ID,
        entry_point=f"{__name__}:make",
        vector_entry_point=f"{__name__}:make_vector",
    )


def make(split: Split = "train", device: str = "cpu", **settings: Any) -> EnvFace:
    """One environment. ``settings``: fields of ``ClstmPpoConfig``, the flags of the recipe.

    An observation is the market's features at the bar followed by ``portfolio_names``.

    Raises:
        UnknownNameError: no such split or setting.
        UsageError: values that make no sense, or data that cannot be used.
        SetupError: Gymnasium is missing.
    """
    from muster.agents import EnvFace

    return EnvFace(_maker(split, device, settings), device)


def make_vector(
    num_envs: int = 1, split: Split = "train", device: str = "cpu", **settings: Any
) -> VectorEnvFace:
    """``num_envs`` environments that step as one batch; else as ``make``."""
    from muster.agents import VectorEnvFace

    return VectorEnvFace(_maker(split, device, settings), num_envs, device)


def _maker(split: Split, device: str, settings: dict[str, Any]) -> Maker:
    """The market is loaded and priced once, for all seeds."""
    import torch

    from muster.agents import BatchedEnv, Place
    from muster_recipes.clstm_ppo.exchange import Exchange
    from muster_recipes.clstm_ppo.load import SPLITS, load_market
    from muster_recipes.clstm_ppo.options_env import OptionsEnv

    if split not in SPLITS:
        raise UnknownNameError("split", split, list(SPLITS))
    config = _config(settings)
    market = load_market(config, lambda _: None)
    exchange = Exchange.of(market, config, torch.device(device))

    def made(place: Place) -> BatchedEnv:
        return OptionsEnv(market, split, config, place, exchange, show="features")

    return made


def _config(settings: dict[str, Any]) -> ClstmPpoConfig:
    """The settings as on the command line: a path may be text, the action space a number."""
    names = [field.name for field in dataclasses.fields(ClstmPpoConfig)]
    for name in settings:
        if name not in names:
            raise UnknownNameError("setting", name, names)
    settings = dict(settings)
    if isinstance(settings.get("data"), str):
        settings["data"] = Path(settings["data"])
    if isinstance(settings.get("action_space"), int):
        settings["action_space"] = str(settings["action_space"])
    return ClstmPpoConfig(**settings)


register()
