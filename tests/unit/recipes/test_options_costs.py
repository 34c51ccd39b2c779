"""Costs against sums done by hand."""

from __future__ import annotations

import pytest
import torch

from muster_recipes.clstm_ppo import costs


def _tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_spread_widens_with_the_distance_from_the_money() -> None:
    half = costs.half_spread(_tensor(1.0, 1.1, 0.9, 2.0))
    assert half.tolist() == pytest.approx([0.01, 0.0115, 0.0115, 0.025])


def test_the_spread_never_exceeds_mid_so_that_a_sale_always_brings_something() -> None:
    assert float(costs.half_spread(_tensor(1000.0))) == 0.5


@pytest.mark.parametrize(
    ("share", "rate"),
    [(0.0, 0.001), (0.00999, 0.001), (0.01, 0.005), (0.0499, 0.005), (0.05, 0.01), (0.0999, 0.01),
     (0.1, 0.02), (0.1999, 0.02), (0.2, 0.02), (5.0, 0.02)],
)  # fmt: skip
def test_slippage_steps_where_the_specification_says(share: float, rate: float) -> None:
    """To the last bit: no step is made of a less precise number."""
    assert float(costs.slippage(_tensor(share))) == rate


def test_an_order_of_a_fifth_of_the_volume_is_the_first_that_is_impossible() -> None:
    assert costs.MAX_ORDER_SHARE == 0.2


def test_buying_ten_contracts_at_the_money() -> None:
    """Mid $2.50: 10 x (100 x 2.50 x 1 % + 0.65 + 0.04) = 31.90, and slippage 0.5 % = 12.50."""
    unit = costs.option_cost(_tensor(2.5), _tensor(1.0), _tensor(0.0))
    assert float(10 * unit.fixed) == pytest.approx(31.90)
    assert float(10 * (unit.fixed + 0.005 * unit.per_slippage)) == pytest.approx(44.40)


def test_selling_ten_contracts_pays_the_fees_on_sales_too() -> None:
    """Received 100 x 2.50 x (1 - 1 % - 0.5 %) = 246.25 each: SEC 10 x 246.25 x 0.00278 / 1000 =
    0.00684575; TAF 10 x 100 x 0.000166 = 0.166."""
    unit = costs.option_cost(_tensor(2.5), _tensor(1.0), _tensor(1.0))
    cost = float(10 * (unit.fixed + 0.005 * unit.per_slippage))
    assert cost == pytest.approx(44.40 + 0.00684575 + 0.166, abs=1e-12)


def test_buying_and_selling_shares() -> None:
    """200 shares at $50 of 10,000 traded: 2 % of the volume, so 0.5 % of $10,000."""
    price, shares, volume = _tensor(50.0), _tensor(200.0), _tensor(10_000.0)
    assert float(costs.shares_cost(price, shares, volume, is_sale=False)) == pytest.approx(50.0)
    fees = (10_000 - 50) * 0.00278 / 1000 + 200 * 0.000166
    sale = float(costs.shares_cost(price, shares, volume, is_sale=True))
    assert sale == pytest.approx(50.0 + fees, abs=1e-12)


def test_a_series_trades_one_twentieth_of_the_underlying() -> None:
    """One million shares: 50,000 in one series, so 500 contracts."""
    assert float(costs.series_contracts(_tensor(1e6))) == pytest.approx(500.0)
