"""The table of cards: names as drivers give them, figures as data sheets print them."""

from __future__ import annotations

import re

import pytest

from muster.devices.cards import CARDS, Card, Precision, find_card

#: As drivers print them, and the card; None: its figures are not known here, which is said.
NAMES: dict[str, str | None] = {
    "NVIDIA GB200": "GB200 (per GPU)",
    "NVIDIA GB300": None,
    "NVIDIA B200": "B200 (HGX)",
    "NVIDIA B200 MIG 1g.23gb": None,
    "NVIDIA GH200 480GB": "GH200 96GB",
    "NVIDIA GH200 144G HBM3e": "GH200 144GB",
    "NVIDIA GH200 480GB MIG 1g.12gb": None,
    "NVIDIA H200": "H200 SXM",
    "NVIDIA H200 NVL": "H200 NVL",
    "NVIDIA H20": None,
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H100 64GB HBM2": None,
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    "NVIDIA H100 80GB HBM3 MIG 3g.40gb": None,
    "NVIDIA H800": None,
    "NVIDIA A100-SXM4-80GB": "A100 80GB SXM",
    "NVIDIA A100-SXM-80GB": "A100 80GB SXM",
    "A100-SXM4-40GB": "A100 40GB SXM",
    "NVIDIA A100-SXM4-40GB": "A100 40GB SXM",
    "NVIDIA A100-SXM-64GB": None,
    "NVIDIA A100 80GB PCIe": "A100 80GB PCIe",
    "NVIDIA A100-PCIE-40GB": "A100 40GB PCIe",
    "A100-PCIE-40GB": "A100 40GB PCIe",
    "NVIDIA A100X": None,
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb": None,
    "NVIDIA A100-SXM4-80GB MIG 1g.10gb": None,
    "NVIDIA A100 80GB PCIe MIG 2g.20gb": None,
    "GRID A100-40C": None,
    "GRID A100D-80C": None,
    "GRID A100-4-20C": None,
    "NVIDIA A800-SXM4-80GB": None,
    "NVIDIA A30": "A30",
    "NVIDIA A30 MIG 1g.6gb": None,
    "NVIDIA A30X": None,
    "NVIDIA A40": "A40",
    "NVIDIA A40-48Q": None,
    "NVIDIA A10": "A10",
    "NVIDIA A10-24Q": None,
    "NVIDIA A10G": "A10G",
    "NVIDIA A10M": None,
    "NVIDIA A16": None,
    "NVIDIA A2": None,
    "NVIDIA RTX A6000": "RTX A6000",
    "NVIDIA RTX A5000": None,
    "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
    "NVIDIA RTX 5000 Ada Generation": None,
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": None,
    "Quadro RTX 6000": None,
    "NVIDIA L40S": "L40S",
    "NVIDIA L40": "L40",
    "NVIDIA L40G": None,
    "NVIDIA L4": "L4",
    "Tesla V100-SXM2-16GB": "V100 16GB SXM",
    "Tesla V100-SXM2-32GB": "V100 32GB SXM",
    "Tesla V100-SXM3-32GB": "V100 32GB SXM",
    "Tesla V100-SXM3-32GB-H": None,
    "Tesla V100-PCIE-16GB": "V100 PCIe",
    "Tesla V100-PCIE-32GB": "V100 32GB PCIe",
    "Tesla V100S-PCIE-32GB": "V100S",
    "Tesla V100-DGXS-32GB": None,
    "Tesla V100-FHHL-16GB": None,
    "GRID V100D-32Q": None,
    "Tesla P100-PCIE-16GB": None,
    "Tesla P100-SXM2-16GB": None,
    "Tesla P40": None,
    "Tesla K80": None,
    "Tesla T4": "T4",
    "NVIDIA T4": "T4",
    "NVIDIA T4G": None,
    "NVIDIA T400": None,
    "NVIDIA GeForce RTX 5090": "RTX 5090",
    "NVIDIA GeForce RTX 5090 D": None,
    "NVIDIA GeForce RTX 5090 Laptop GPU": None,
    "NVIDIA GeForce RTX 5080": "RTX 5080",
    "NVIDIA GeForce RTX 5070 Ti": None,
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA GeForce RTX 4090 D": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA GeForce RTX 4080": "RTX 4080",
    "NVIDIA GeForce RTX 4080 SUPER": None,
    "GeForce RTX 3090": "RTX 3090",
    "NVIDIA GeForce RTX 3090 Ti": None,
    "NVIDIA GeForce RTX 3080": "RTX 3080 10GB",
    "NVIDIA GeForce RTX 3080 Ti": None,
    "NVIDIA GeForce GTX 1080 Ti": None,
    "NVIDIA TITAN RTX": None,
    "AMD Instinct MI325X OAM": "MI325X",
    "AMD Instinct MI300X": "MI300X",
    "AMD Instinct MI300X OAM": "MI300X",
    "AMD Instinct MI300X VF": None,
    "AMD Instinct MI300A": None,
    "AMD Instinct MI250X": "MI250X (one die)",
    "AMD Instinct MI250": "MI250 (one die)",
    "AMD Instinct MI250X / MI250": None,  # its driver does not tell which of the two
    "AMD Instinct MI210": "MI210",
    "AMD Instinct MI100": None,
    "": None,
}


@pytest.mark.parametrize(("driver_name", "card"), NAMES.items())
def test_cards_are_found_by_the_drivers_whole_name(driver_name: str, card: str | None) -> None:
    found = find_card(driver_name)
    assert (found.name if found else None) == card


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_nothing_cut_from_a_card_or_sold_as_a_variant_is_taken_for_it(card: Card) -> None:
    for name in [name for name, found in NAMES.items() if found == card.name]:
        for other in ("MIG 1g.5gb", "Laptop GPU", "D", "Ti", "SUPER", "VF"):
            assert find_card(f"{name} {other}") is None
        for other in ("-40C", "-8Q"):
            assert find_card(f"{name}{other}") is None


@pytest.mark.parametrize(
    ("driver_name", "memory_mib", "card"),
    [
        ("NVIDIA H100 80GB HBM3", 81559, "H100 SXM"),
        ("NVIDIA H200", 143771, "H200 SXM"),
        ("NVIDIA GH200 480GB", 97871, "GH200 96GB"),
        ("NVIDIA A10G", 23028, "A10G"),  # less a sixteenth, for the correction of errors
        ("Tesla T4", 15360, "T4"),
        ("NVIDIA B200", 183359, "B200 (HGX)"),
        ("NVIDIA GeForce RTX 3080", 10240, "RTX 3080 10GB"),
        ("NVIDIA GeForce RTX 3080", 12288, None),  # two cards of one name
        ("AMD Instinct MI300X", 24564, None),  # an eighth of it: a partition
        ("NVIDIA A100-SXM4-80GB", 40960, None),
    ],
)
def test_a_card_has_the_memory_that_its_driver_reports(
    driver_name: str, memory_mib: int, card: str | None
) -> None:
    found = find_card(driver_name, memory_mib)
    assert (found.name if found else None) == card


def test_what_a_name_says_about_memory_is_what_the_row_says() -> None:
    for driver_name, name in NAMES.items():
        said = re.search(r"\b(\d+)GB", driver_name)
        if said and name is not None and "GH200" not in driver_name:
            card = find_card(driver_name)
            assert card is not None and card.memory_gib == int(said[1])


@pytest.mark.parametrize(
    ("driver_name", "precision", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "tf32", 156.0),
        ("NVIDIA H100 PCIe", "fp16", 756.0),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("Tesla T4", "bf16", None),
        ("Tesla V100-SXM2-16GB", "fp32", 15.7),
    ],
)
def test_peaks_are_dense(driver_name: str, precision: Precision, tflops: float | None) -> None:
    card = find_card(driver_name)
    assert card is not None
    assert card.peak_flops(precision) == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_every_row_is_plausible_and_says_where_it_is_from() -> None:
    assert len(CARDS) >= 20
    assert len({card.name for card in CARDS}) == len(CARDS)
    for card in CARDS:
        assert card.source
        assert 8 <= card.memory_gib <= 300
        assert 50 <= card.power_w <= 1500
        assert 8 <= card.fp32_tflops <= (card.fp16_tflops or 0)
        # Bytes per operation of all cards of this decade lie close together.
        assert 1 < 1e3 * card.bandwidth_gb_s / (1e3 * card.fp16_tflops) < 15
