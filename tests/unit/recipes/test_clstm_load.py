"""What becomes of a file or of settings: the market, what is said of it, what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.unit.recipes.clstm_files import file_of

from muster import UsageError
from muster_recipes.clstm_ppo.bars import VOLATILITY_FLOOR
from muster_recipes.clstm_ppo.config import ClstmPpoConfig
from muster_recipes.clstm_ppo.load import fingerprint, load_market


def test_a_file_becomes_a_market(tmp_path: Path) -> None:
    config = ClstmPpoConfig(data=file_of(tmp_path, 400), window=10, episode_bars=20)
    said: list[str] = []
    market = load_market(config, said.append)
    assert market.symbols == ("A", "B") and market.bars_per_year == 252.0
    assert market.features.shape == (800, len(market.feature_names))
    assert market.features.dtype == torch.float32 and market.features.isfinite().all()
    assert market.volatility.dtype == torch.float64 and (market.volatility > 0).all()
    assert not market.truth
    assert any("800 bars of 2 symbols, 252 bars per year" in line for line in said)
    assert load_market(config, said.append) is market
    file_of(tmp_path, 401)
    assert len(load_market(config, said.append).time) == 802


def test_too_short_a_history_says_what_is_needed(tmp_path: Path) -> None:
    config = ClstmPpoConfig(data=file_of(tmp_path, 200), window=30)
    with pytest.raises(UsageError) as caught:
        load_market(config, lambda _: None)
    text = str(caught.value)
    assert "each split must have 283 bars of one symbol (window 30 + episode 252 + 1)" in text
    assert "train 140, val 30, test 30" in text
    for flag in ("--episode-bars", "--window", "--val-share", "--test-share"):
        assert flag in text


def test_the_simulated_market_is_labelled_and_knows_its_truth() -> None:
    config = ClstmPpoConfig(sim_symbols=3, sim_bars=2100)
    said: list[str] = []
    market = load_market(config, said.append)
    assert market.source == "simulated" and said[0].startswith("Simulated market: 6300 bars")
    assert market.truth["drift"].shape == (6300,)
    assert set(market.truth["drift"].abs().tolist()) == {config.sim_drift}
    assert market.features.isfinite().all() and market.volatility.min() >= VOLATILITY_FLOOR
    with pytest.raises(UsageError, match="The simulated market is too short"):
        load_market(replace(config, sim_bars=300), said.append)


def test_of_a_file_it_is_said_that_implied_volatility_is_estimated(tmp_path: Path) -> None:
    said: list[str] = []
    config = ClstmPpoConfig(data=file_of(tmp_path, 400), window=10, episode_bars=20)
    load_market(config, said.append)
    assert any(
        "implied volatility is estimated from the bars, not quoted: what a policy earns from the "
        "estimate, a real market would not pay" in line
        for line in said
    )
    assert not any("WARNING" in line for line in said)
    said.clear()
    load_market(ClstmPpoConfig(sim_symbols=1, sim_bars=2100), said.append)
    assert not any("estimated" in line for line in said)


def test_a_volume_in_which_nothing_can_be_opened_is_refused(tmp_path: Path) -> None:
    path = file_of(tmp_path, 400, volume=10_000)
    config = ClstmPpoConfig(data=path, window=10, episode_bars=20)
    with pytest.raises(UsageError) as caught:
        load_market(config, lambda _: None)
    assert "No position can be opened at any start of the train split" in str(caught.value)
    assert "the median volume there is 10000" in str(caught.value)
    assert "more than 10000 shares" in str(caught.value)


def test_a_volume_that_is_mostly_too_thin_is_warned_of(tmp_path: Path) -> None:
    path = file_of(tmp_path, 400, volume=0)
    lines = path.read_text(encoding="utf-8").splitlines()
    some = [line[:-1] + "20000" if i % 3 == 0 else line for i, line in enumerate(lines[1:])]
    path.write_text("\n".join([lines[0], *some]) + "\n", encoding="utf-8")
    said: list[str] = []
    load_market(ClstmPpoConfig(data=path, window=10, episode_bars=20), said.append)
    assert any("WARNING: in 67% of the bars nothing can be opened" in line for line in said)


def test_a_fingerprint_is_of_the_bars_alone(tmp_path: Path) -> None:
    config = ClstmPpoConfig(data=file_of(tmp_path, 400), window=10, episode_bars=20)
    market = load_market(config, lambda _: None)
    found = fingerprint(market)
    assert len(found) == 64
    other = replace(config, data=(tmp_path / "bars.csv").rename(tmp_path / "moved.csv"), skew=2.0)
    assert fingerprint(load_market(other, lambda _: None)) == found
    volume = market.volume.clone()
    volume[-1] += 1
    assert fingerprint(replace(market, volume=volume)) != found
    assert fingerprint(replace(market, symbols=("A", "C"))) != found
    assert fingerprint(load_market(ClstmPpoConfig(sim_symbols=1), lambda _: None)) == ""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"skew": math.nan}, "--skew must be a finite number, not nan"),
        ({"capital": math.inf}, "--capital must be a finite number, not inf"),
        ({"sim_drift": -math.inf}, "--sim-drift must be a finite number, not -inf"),
        ({"sim_correlation": math.nan}, "--sim-correlation must be a finite number"),
        ({"action_space": 31}, "--action-space must be 31 or 91, not 31"),
        ({"action_space": "all"}, "--action-space must be 31 or 91, not 'all'"),
        ({"data": Path("none.csv")}, "--data none.csv does not exist"),
        ({"data": Path("none.csv"), "sim_seed": 3, "sim_drift": 0.0},
         "--sim-seed, --sim-drift have no effect with --data"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_meant_are_refused(
    settings: dict[str, object], expected: str
) -> None:
    with pytest.raises(UsageError) as caught:
        ClstmPpoConfig(**settings)  # type: ignore[arg-type]
    assert expected in str(caught.value)
