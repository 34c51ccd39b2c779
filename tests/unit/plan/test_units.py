from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.plan.units import (
    Bytes,
    BytesPerSecond,
    Flops,
    FlopsPerSecond,
    Joules,
    Money,
    Quantity,
    Seconds,
    Watts,
)

KINDS = (Seconds, Bytes, BytesPerSecond, Flops, FlopsPerSecond, Watts, Joules, Money)
AMOUNTS = st.floats(1e-3, 1e12)


@pytest.mark.parametrize(
    ("dividend", "divisor", "quotient"),
    [
        (Flops(6e12), FlopsPerSecond(2e12), Seconds(3.0)),
        (Bytes(100e9), BytesPerSecond(25e9), Seconds(4.0)),
        (Seconds(6.0), Seconds(4.0), 1.5),
        (Seconds(6.0), 4, Seconds(1.5)),
    ],
)
def test_quotients_have_the_unit_that_physics_gives_them(
    dividend: Quantity, divisor: object, quotient: object
) -> None:
    found = operator.truediv(dividend, divisor)
    assert found == quotient
    assert type(found) is type(quotient)


@pytest.mark.parametrize(
    ("left", "right", "product"),
    [
        (Watts(700.0), Seconds(3600.0), Joules(2.52e6)),  # 700 W for an hour: 0.7 kWh
        (Seconds(1.5), 4, Seconds(6.0)),
        (4, Seconds(1.5), Seconds(6.0)),
    ],
)
def test_products_too(left: object, right: object, product: Quantity) -> None:
    assert operator.mul(left, right) == product


#: Every pair that is meant, by kind; all others must be refused.
MEANT = {
    operator.truediv: {
        *((kind, kind) for kind in KINDS),
        (Flops, FlopsPerSecond),
        (Bytes, BytesPerSecond),
    },
    operator.mul: {(Watts, Seconds)},
    operator.add: {(kind, kind) for kind in KINDS},
    operator.sub: {(kind, kind) for kind in KINDS},
    operator.lt: {(kind, kind) for kind in KINDS},
}


@pytest.mark.parametrize("operation", MEANT, ids=lambda o: o.__name__)
@pytest.mark.parametrize("left", KINDS, ids=lambda k: k.__name__)
@pytest.mark.parametrize("right", KINDS, ids=lambda k: k.__name__)
def test_nothing_else_can_be_combined(
    operation: Callable[[object, object], object], left: type[Quantity], right: type[Quantity]
) -> None:
    if (left, right) in MEANT[operation]:
        operation(left(2.0), right(4.0))
        return
    with pytest.raises(TypeError):
        operation(left(2.0), right(4.0))


def test_two_currencies_are_not_added() -> None:
    with pytest.raises(TypeError, match="USD and EUR"):
        Money(1.0, "USD") + Money(1.0, "EUR")
    assert Money(1.0, "EUR") + Money(2.0, "EUR") == Money(3.0, "EUR")
    assert (Money(1.5, "EUR") * 2).currency == "EUR"


@pytest.mark.parametrize(
    ("quantity", "text"),
    [
        (Seconds(0.0), "0.0 s"),
        (Seconds(0.000_25), "250 µs"),
        (Seconds(0.0125), "12.50 ms"),
        (Seconds(12.0), "12.0 s"),
        # The mistake this module is for: 90 seconds are not 90 hours.
        (Seconds(90.0), "1 min 30 s"),
        (Seconds(7200.0), "2 h 00 min"),
        (Seconds(200_000.0), "2 d 07 h"),  # 55.56 h: whole hours that have passed
        (Bytes(512.0), "512 B"),
        (Bytes(1.5 * 2**30), "1.50 GiB"),
        (BytesPerSecond(450e9), "450 GB/s"),
        (Flops(8.6e13), "86 TFLOP"),
        (FlopsPerSecond(9.895e14), "989.5 TFLOP/s"),
        (Watts(700.0), "700 W"),
        (Joules(3.6e6), "1.000 kWh"),
        (Joules(3600.0), "1 Wh"),
        (Money(12.345, "EUR"), "12.35 EUR"),
        (Money(0.0123, "EUR"), "0.0123 EUR"),
    ],
)
def test_what_is_shown_has_its_unit(quantity: Quantity, text: str) -> None:
    assert str(quantity) == text


@given(AMOUNTS)
def test_hours_and_kilowatt_hours_are_the_only_conversions(value: float) -> None:
    assert Seconds(value).hours * 3600 == pytest.approx(value)
    assert Joules(value).kilowatt_hours * 3.6e6 == pytest.approx(value)
