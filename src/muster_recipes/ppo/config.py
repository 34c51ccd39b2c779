"""The flags of the recipe ``ppo``. No torch here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from muster import AgentRecipe, UsageError
from muster_recipes.refusals import require_default


@dataclass(frozen=True, kw_only=True)
class PpoRecipeConfig:
    """Recurrent PPO on any Gymnasium environment."""

    env: str = "CartPole-v1"
    """A registered environment, or module:ID to import the module that registers it."""
    observe: tuple[int, ...] | None = None
    """Only these components of the observation, such as 0 2 to hide the velocities of CartPole;
    all when not given."""
    memory: Literal["lstm", "none"] = "lstm"
    """An LSTM each for actor and critic, or none."""
    hidden: int = 64
    """Units of each LSTM."""
    vectorization: Literal["sync", "async", "native"] = "sync"
    """How environments run side by side: in turn, a process each, or the environment's own
    vector form, which cannot be resumed exactly."""
    env_kwargs: str = "{}"
    """Arguments of the environment as a JSON object, such as '{"continuous": true}'."""

    def __post_init__(self) -> None:
        if self.hidden <= 0:
            raise UsageError(f"--hidden must be greater than 0, not {self.hidden}.")
        if self.observe is not None:
            _check_components(self.observe)
        parse_env_kwargs(self.env_kwargs)

    def check_new(self) -> None:
        """Raise UsageError for a flag without effect, which an older run may have."""
        if self.memory == "none":
            require_default(self, ["hidden"], "with --memory none")


def parse_env_kwargs(text: str) -> dict[str, Any]:
    """A JSON object as arguments by name. Raises UsageError with the place of the mistake."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"--env-kwargs {text!r} is not JSON: {error.msg} at column {error.colno}.",
            hint="quote it for the shell: --env-kwargs '{\"name\": 1}'.",
        ) from None
    if not isinstance(value, dict):
        raise UsageError(
            f"--env-kwargs {text!r} must be a JSON object of arguments by name, not "
            f"{type(value).__name__}.",
            hint="such as --env-kwargs '{\"name\": 1}'.",
        )
    return value


def _check_components(observe: tuple[int, ...]) -> None:
    if not observe:
        raise UsageError("--observe names no component; drop it to observe all.")
    negative = [component for component in observe if component < 0]
    if negative:
        raise UsageError(f"--observe {negative[0]}: components count from 0.")
    if len(set(observe)) < len(observe):
        raise UsageError(f"--observe {' '.join(map(str, observe))} names a component twice.")


AGENT = AgentRecipe(
    name="ppo",
    config=PpoRecipeConfig,
    task="muster_recipes.ppo.task:PpoTask",
    # Settings of PpoConfig that suit small control tasks such as CartPole-v1.
    defaults={
        "num_envs": 8,
        "rollout_steps": 128,
        "batch_size": 2,
        "update_epochs": 10,
        "num_steps": 100_000,
        "lr": 1e-3,
        "lr_schedule": "linear",
        "entropy_coef": 0.0,
        # Returns of 100 and more would make the value's gradients so large that, once the norm
        # is clipped, the policy's are below Adam's epsilon.
        "normalize_rewards": True,
    },
)
