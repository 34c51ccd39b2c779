"""The table of cards: names as drivers give them, figures as data sheets print them."""

from __future__ import annotations

import pytest

from muster.devices.cards import CARDS, Precision, find_card


@pytest.mark.parametrize(
    ("driver_name", "card"),
    [
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB SXM"),
        ("Tesla V100-SXM2-16GB", "V100 16GB SXM"),
        ("Tesla T4", "T4"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI325X OAM", "MI325X"),
        ("NVIDIA B200", "B200 (HGX)"),
        ("NVIDIA GB200", "GB200 (per GPU)"),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3080 Ti", None),
        ("", None),
    ],
)
def test_cards_are_found_by_the_drivers_name(driver_name: str, card: str | None) -> None:
    found = find_card(driver_name)
    assert (found.name if found else None) == card


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
