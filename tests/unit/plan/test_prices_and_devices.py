from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from muster.base.errors import MusterError, SetupError, UnknownNameError, UsageError
from muster.devices.cards import CARDS
from muster.devices.inventory import Device
from muster.plan.compute import card_of, parse_devices
from muster.plan.prices import DEFAULT_PRICES, parse_prices, read_prices, write_prices
from muster.plan.request import PlanRequest
from muster.plan.units import Seconds, Watts, measured

MINE = """
currency = "EUR"
[electricity]
per_kwh = 0.30
date = "2026-01-01"
source = "my bill"
[[card]]
name = "H100 SXM"
per_hour = 2.5
date = "2026-01-01"
source = "my contract"
[[card]]
name = "L4"
per_hour = 0.5
date = "2026-01-01"
source = "my contract"
[[card]]
name = "RTX 4090"
owned = true
date = "2026-01-01"
source = "under my desk"
"""


def test_prices_of_a_file_are_given() -> None:
    prices = parse_prices(MINE, "mine.toml", "given")
    price = prices.price("H100 SXM", is_owned=False)
    assert price is not None
    cost = price.of(2, measured(Seconds(7200.0), ""), None)
    # 2 devices x 2 h x 2.5 EUR/h
    assert cost is not None
    assert (cost.value.value, cost.value.currency, cost.origin) == (10.0, "EUR", "given")
    assert price.source == "mine.toml, 2026-01-01: my contract"


def test_an_owned_card_has_the_price_of_electricity() -> None:
    prices = parse_prices(MINE, "mine.toml", "given")
    for price in (
        prices.price("RTX 4090", is_owned=False),
        prices.price("H100 SXM", is_owned=True),
    ):
        assert price is not None and str(price) == "0.3 EUR/kWh"
        energy = measured(Watts(1000.0) * Seconds(7200.0), "")
        cost = price.of(2, measured(Seconds(7200.0), ""), energy)
        assert cost is not None and cost.value.value == pytest.approx(0.60)


def test_names_are_whole_words() -> None:
    prices = parse_prices(MINE, "mine.toml", "given")
    assert prices.price("L40S", is_owned=False) is None
    assert prices.price("L4", is_owned=False) is not None


def test_the_list_that_comes_with_muster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = read_prices(None).price("H100 SXM", is_owned=False)
    assert own is not None and own.origin == "assumed"
    write_prices(tmp_path / "prices.toml")
    copied = read_prices(None).price("H100 SXM", is_owned=False)
    # Copied and not looked at: still nobody's price.
    assert copied is not None and copied.origin == "assumed"
    with pytest.raises(UsageError, match="exists already"):
        write_prices(tmp_path / "prices.toml")
    names = {card["name"] for card in tomllib.loads(DEFAULT_PRICES)["card"]}
    assert names <= {card.name for card in CARDS}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("currency = ", "cannot be used"),
        ("[[card]]\nper_hour = 1", "has no name"),
        ('[[card]]\nname = "T4"\nper_hour = 1\ndate = "2026"', "has no source"),
        (
            '[[card]]\nname = "T4"\nper_hour = -1\ndate = "x"\nsource = "y"',
            "not an amount of money",
        ),
        ('[[card]]\nname = "T4"\ndate = "x"\nsource = "y"', "either per_hour or owned"),
        ('[[card]]\nname = "T4"\nper_hour = 1\nowned = true\ndate = "x"\nsource = "y"', "either"),
        ('[[card]]\nname = "T4"\nper_huor = 1', "unknown key 'per_huor'"),
        ("[electricity]\nper_kwh = 0.2", "has no date"),
        ("electricity = 3", "is not a table"),
    ],
)
def test_a_wrong_file_is_told(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_prices(text, "mine.toml", "given")


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="Cannot read the prices"):
        read_prices(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("text", "here", "groups"),
    [
        ("cpu", (), [("cpu", 1)]),
        ("cpu:4", (), [("cpu", 4)]),
        ("H100 SXM x8", (), [("H100 SXM", 8)]),
        ("h100 sxm x 8", (), [("H100 SXM", 8)]),
        ("NVIDIA A100-SXM4-80GB x2", (), [("A100 80GB SXM", 2)]),
        ("MI300X", (), [("MI300X", 1)]),
        ("MI300X x4", (), [("MI300X", 4)]),
        ("RTX 4090 x1, RTX 3090 x2", (), [("RTX 4090", 1), ("RTX 3090", 2)]),
        ("8", ("NVIDIA L40S",), [("L40S", 8)]),
        ("2", ("Some GPU", "Some GPU"), [("Some GPU", 2)]),
        ("2", ("NVIDIA A100-SXM4-40GB MIG 3g.20gb",), [("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 2)]),
    ],
)
def test_devices(text: str, here: tuple[str, ...], groups: list[tuple[str, int]]) -> None:
    assert [(group.name, group.count) for group in parse_devices(text, gpus(here))] == groups


def gpus(names: tuple[str, ...], memory_mib: int | None = None) -> list[Device]:
    return [
        Device(index=index, uuid=f"GPU-{index}", name=name, memory_total_mib=memory_mib)
        for index, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    ("name", "memory_mib", "card"),
    [
        ("NVIDIA A100-SXM4-40GB", 40960, "A100 40GB SXM"),
        ("NVIDIA GH200 480GB", 97871, "GH200 96GB"),
        ("NVIDIA GeForce RTX 3080", 12288, None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 19968, None),
    ],
)
def test_the_memory_of_the_cards_here_is_what_their_driver_reports(
    name: str, memory_mib: int, card: str | None
) -> None:
    (group,) = parse_devices("1", gpus((name,), memory_mib))
    assert group.memory_mib == memory_mib
    assert (group.card.name if group.card else None) == card


@pytest.mark.parametrize(
    ("text", "here", "error", "says"),
    [
        ("4", (), SetupError, "has no GPU"),
        ("4", ("A", "B"), UsageError, "unlike GPUs"),
        ("cpu:0", (), UsageError, "write 1 to 65,536"),
        ("cpu:2, L4", (), UsageError, "do not form one gang"),
        ("L4, L4 x2", (), UsageError, "names a card twice"),
        ("RTX 4190 x2", (), UnknownNameError, "did you mean 'RTX 4090'"),
        ("A100 x8", (), UnknownNameError, "A100 80GB SXM"),
    ],
)
def test_wrong_devices(
    text: str, here: tuple[str, ...], error: type[MusterError], says: str
) -> None:
    with pytest.raises(error, match=says):
        parse_devices(text, gpus(here))


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_every_card_is_found_by_its_own_name(card: object) -> None:
    assert card_of(card.name) is card  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: PlanRequest(global_batch=0), "--global-batch must be"),
        (lambda: PlanRequest(parameters=-1.0), "--parameters must be"),
        (lambda: PlanRequest(utilisation=40.0), "write 0.4 for 40 %"),
        (lambda: PlanRequest(network="net100"), "--devices-per-node 8"),
        (lambda: PlanRequest(power_w=float("nan")), "--power-w must be"),
    ],
)
def test_a_request_that_cannot_be_meant(make: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make()  # type: ignore[operator]
