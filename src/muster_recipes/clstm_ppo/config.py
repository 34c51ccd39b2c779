"""The flags of the recipe ``clstm-ppo``. No torch here."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from muster import AgentRecipe, UsageError
from muster_recipes.refusals import flag_of, require_default

_ActionSpace = Literal["31", "91"]


@dataclass(frozen=True, kw_only=True)
class ClstmPpoConfig:
    """An options-trading agent: cascaded LSTM and PPO (after Zou et al., arXiv 2212.02721).

    The defaults of the simulated market keep option prices fair but for the drift: with a faster
    or wilder variance than this, implied volatility at today's level misprices options so much
    that there is something to earn without any drift.
    """

    data: Path | None = None
    """CSV or Parquet with timestamp, symbol, open, high, low, close, volume; without it a market
    is simulated."""
    max_gap_bars: float = 10.0
    """A file in which more bars than this are missing in a row is refused."""
    val_share: float = 0.15
    """Share of the time, after the training split, by which the best policy is chosen."""
    test_share: float = 0.15
    """Share of the time, at the end, that is seen only by the final evaluation."""
    action_space: _ActionSpace = "31"
    """31: hold, buy calls and puts, close; 91: covered, spreads, straddles, condors as well."""
    window: int = 30
    """Bars that the feature LSTM looks back."""
    hidden: int = 256
    """Units of each LSTM."""
    episode_bars: int | None = None
    """Bars per episode; 252 for daily bars, else 200."""
    capital: float = 100_000.0
    """Cash at the start of an episode."""
    expiry_days: float = 30.0
    """Days to expiry of an option when it is bought."""
    skew: float = 1.0
    """Implied volatility = current volatility + skew x (ln K/S)^2."""
    costs: bool = True
    """Charge spread, commissions, fees and slippage; --no-costs only to study."""
    sim_symbols: int = 32
    """Simulated: independent paths."""
    sim_bars: int = 2520
    """Simulated: bars of each path, one every day, weekends too."""
    sim_seed: int = 0
    """Simulated: which market; --seed does not change it."""
    sim_drift: float = 0.5
    """Simulated: the drift switches between plus and minus this, per year."""
    sim_switch_bars: float = 180.0
    """Simulated: mean number of bars between two switches of the drift."""
    sim_volatility: float = 0.2
    """Simulated: long-run volatility per year (Heston's square root of theta)."""
    sim_vol_of_vol: float = 0.1
    """Simulated: Heston's sigma."""
    sim_mean_reversion: float = 1.0
    """Simulated: Heston's kappa."""
    sim_correlation: float = -0.3
    """Simulated: Heston's rho."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{flag_of(field.name)} must be a finite number, not {value}.")
        if self.action_space not in get_args(_ActionSpace):
            raise UsageError(
                f"--action-space must be {' or '.join(get_args(_ActionSpace))}, not "
                f"{self.action_space!r}."
            )
        if self.data is not None:
            self._check_data(self.data)
        for name in ("window", "hidden", "episode_bars", "capital", "expiry_days", "sim_symbols",
                     "sim_bars", "sim_volatility", "sim_mean_reversion", "val_share",
                     "test_share"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"{flag_of(name)} must be greater than 0, not {value}.")
        for name in ("skew", "sim_drift", "sim_vol_of_vol", "max_gap_bars"):
            if getattr(self, name) < 0:
                raise UsageError(f"{flag_of(name)} must be 0 or more, not {getattr(self, name)}.")
        if self.val_share + self.test_share >= 1:
            raise UsageError(
                f"--val-share {self.val_share} and --test-share {self.test_share} leave nothing "
                "for training: together they must be less than 1."
            )
        if self.sim_switch_bars < 1:
            raise UsageError(f"--sim-switch-bars must be 1 or more, not {self.sim_switch_bars}.")
        if not -1 <= self.sim_correlation <= 1:
            raise UsageError(
                f"--sim-correlation must be between -1 and 1, not {self.sim_correlation}."
            )

    def check_new(self) -> None:
        """Raise UsageError for a flag without effect, which an older run may have."""
        if self.data is None:
            require_default(self, ["max_gap_bars"], "without --data")
        if not self.sim_drift:
            require_default(self, ["sim_switch_bars"], "with --sim-drift 0")

    def _check_data(self, data: Path) -> None:
        """Check what ``--dry-run`` can tell without reading the file."""
        changed = [
            flag_of(field.name)
            for field in dataclasses.fields(self)
            if field.name.startswith("sim_") and getattr(self, field.name) != field.default
        ]
        if changed:
            raise UsageError(
                f"{', '.join(changed)} {'has' if len(changed) == 1 else 'have'} no effect with "
                "--data: the market is read, not simulated.",
                hint="drop --data to simulate, or the --sim flags to read.",
            )
        if not data.is_file():
            raise UsageError(
                f"--data {data} {'is not a file' if data.exists() else 'does not exist'}.",
                hint="--data names one file of bars; without it a market is simulated.",
            )


AGENT = AgentRecipe(
    name="clstm-ppo",
    config=ClstmPpoConfig,
    task="muster_recipes.clstm_ppo.task:ClstmPpoTask",
    # Settings of PpoConfig that suit the market.
    defaults={
        "num_envs": 256,
        "rollout_steps": 64,
        "batch_size": 128,
        "num_episodes": 5000,
        "lr": 1e-3,
        # With advantages of standard deviation 1, the edge of holding over trading is a few
        # hundredths: a bonus that stays would outweigh it.
        "entropy_coef_end": 0.0,
        "target_kl": 0.02,
        "normalize_rewards": True,
        "patience": 500,
        "eval_frequency": 2,
    },
)
