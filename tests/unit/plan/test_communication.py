from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.base.errors import UnknownNameError, UsageError
from muster.plan.communication import (
    LINKS,
    Fabric,
    Link,
    agreement,
    all_reduce,
    find_link,
    given_link,
    gradient_sum,
    half_ring,
    presumed,
    ring_all_reduce,
    ring_volume,
    sharded_sum,
    tree_all_reduce,
    usual_link,
)
from muster.plan.units import Bytes, BytesPerSecond, Seconds
from muster.plan.units import given as as_given

RANKS = st.integers(2, 512)
SIZES = st.floats(1.0, 1e12).map(Bytes)


def link(alpha_s: float, bytes_per_s: float) -> Link:
    return Link(
        name="test",
        alpha=as_given(Seconds(alpha_s), ""),
        bandwidth=as_given(BytesPerSecond(bytes_per_s), ""),
        share=as_given(1.0, ""),
    )


@pytest.mark.parametrize(
    ("size", "ranks", "alpha_s", "beta", "ring_s", "tree_s"),
    [
        # n=2: ring 2·1·1e-3 + 2·(1/2)·1e9/1e9 = 0.002 + 1; tree 2·1·(0.001 + 1)
        (1e9, 2, 1e-3, 1e9, 1.002, 2.002),
        # n=4: ring 2·3·1e-3 + 2·(3/4)·1 = 0.006 + 1.5; tree 2·2·(0.001 + 1)
        (1e9, 4, 1e-3, 1e9, 1.506, 4.004),
        # n=5: ring 8·1e-3 + 2·(4/5)·1; tree ⌈log2 5⌉ = 3: 6·(0.001 + 1)
        (1e9, 5, 1e-3, 1e9, 1.608, 6.006),
        # n=8, no bytes: latency alone, 14 α against 6 α
        (0.0, 8, 1e-3, 1e9, 0.014, 0.006),
    ],
)
def test_ring_and_tree_against_arithmetic_by_hand(
    size: float, ranks: int, alpha_s: float, beta: float, ring_s: float, tree_s: float
) -> None:
    arguments = (Bytes(size), ranks, Seconds(alpha_s), BytesPerSecond(beta))
    assert ring_all_reduce(*arguments).value == pytest.approx(ring_s)
    assert tree_all_reduce(*arguments).value == pytest.approx(tree_s)
    assert half_ring(*arguments).value == pytest.approx(ring_s / 2)
    best = all_reduce(Bytes(size), ranks, link(alpha_s, beta))
    assert best.value == pytest.approx(min(ring_s, tree_s))


@given(SIZES, RANKS)
def test_the_volume_of_a_ring_is_the_known_optimum(size: Bytes, ranks: int) -> None:
    sent = ring_volume(size, ranks)
    assert sent.value == pytest.approx(size.value * 2 * (ranks - 1) / ranks)
    assert size <= sent < size * 2


@given(SIZES, RANKS, st.floats(1e-7, 1e-3), st.floats(1e8, 1e12))
def test_more_bytes_or_more_ranks_never_take_less(
    size: Bytes, ranks: int, alpha_s: float, beta: float
) -> None:
    one = link(alpha_s, beta)
    taken = all_reduce(size, ranks, one)
    assert all_reduce(size * 2, ranks, one) >= taken
    assert all_reduce(size, ranks + 1, one) >= taken * (1 - 1e-12)
    assert taken > Seconds(0.0)


def test_two_nodes_add_what_crosses_the_network() -> None:
    fabric = Fabric(link=link(0.0, 10e9), devices_per_node=4, network=link(0.0, 1e9))
    # 1 GB on 8 devices of 2 nodes. In the node: 2 halves of a ring of 4, together 2·(3/4)·1/10 =
    # 0.15 s; between nodes: min(ring 2·(1/2)·1, tree 2·1·1) = 1 s.
    assert gradient_sum(Bytes(1e9), 8, fabric).value.value == pytest.approx(1.15)
    # On one node the network plays no part: ring of 4 at 10 GB/s.
    assert gradient_sum(Bytes(1e9), 4, fabric).value.value == pytest.approx(0.15)


def test_fsdp_moves_one_and_a_half_times_what_ddp_moves() -> None:
    fabric = Fabric(link=link(1e-6, 10e9))
    whole = gradient_sum(Bytes(1e9), 8, fabric).value
    assert sharded_sum(Bytes(1e9), Bytes(1e9), 8, fabric).value / whole == pytest.approx(1.5)
    # Two rounds gather the weights twice as often: 4 halves and one to scatter the gradients.
    assert sharded_sum(Bytes(1e9), Bytes(1e9), 8, fabric, 2).value / whole == pytest.approx(2.5)


def test_fsdp_in_bf16_gathers_half_the_bytes_and_adds_gradients_in_fp32() -> None:
    """1 GB of fp32: two gathers of 0.5 GB are half of an all-reduce of it, and so is the sum."""
    fabric = Fabric(link=link(1e-9, 10e9))
    whole = gradient_sum(Bytes(1e9), 8, fabric).value
    once = sharded_sum(Bytes(0.5e9), Bytes(1e9), 8, fabric).value
    twice = sharded_sum(Bytes(0.5e9), Bytes(1e9), 8, fabric, 2).value
    assert once / whole == pytest.approx(1.0) and twice / whole == pytest.approx(1.5)


def test_one_device_has_nobody_to_talk_to() -> None:
    fabric = Fabric(link=link(1.0, 1.0), host=link(1.0, 1.0))
    assert gradient_sum(Bytes(1e9), 1, fabric).value == Seconds(0.0)
    assert agreement(1, fabric).value == Seconds(0.0)
    assert agreement(2, fabric).value > Seconds(0.0)


def test_every_link_has_a_source_and_an_origin() -> None:
    for name in LINKS:
        for figure in find_link(name).figures:
            assert figure.source
            assert figure.origin in ("table", "assumed")
    gloo = find_link("gloo-loopback")
    assert {figure.origin for figure in gloo.figures} == {"assumed"}


@pytest.mark.parametrize(
    ("name", "gb_s"),
    [
        ("pcie4", 31.5),  # 16 GT/s x 16 lanes x 128/130 / 8 bits = 31.508 GB/s
        ("pcie5", 63.0),
        ("nvlink3", 300.0),  # half of 600 GB/s both ways
        ("nvlink4", 450.0),
        ("nvlink5", 900.0),
        ("net25", 3.125),  # 25 Gb/s / 8
        ("net400", 50.0),
    ],
)
def test_bandwidths_are_those_of_one_direction(name: str, gb_s: float) -> None:
    assert find_link(name).bandwidth.value == BytesPerSecond(gb_s * 1e9)


def test_a_measured_link_replaces_the_table() -> None:
    found = given_link("pcie4", 12.0, 20.0)
    assert found.beta == BytesPerSecond(12e9)
    assert found.alpha.value.value == pytest.approx(20e-6)
    assert {figure.origin for figure in found.figures} == {"given"}
    only_latency = given_link("pcie4", None, 20.0)
    assert only_latency.bandwidth == find_link("pcie4").bandwidth


def test_a_link_that_nobody_has_named_is_assumed() -> None:
    found = presumed(find_link("nvlink3"))
    assert {figure.origin for figure in found.figures} == {"assumed"}
    assert "600 GB/s both ways; that these cards have it: see --link" in found.bandwidth.source
    assert found.beta == find_link("nvlink3").beta
    measured_here = presumed(given_link("pcie4", 12.0, 20.0))
    assert {figure.origin for figure in measured_here.figures} == {"given"}


def test_dies_of_mi200_are_joined_by_infinity_fabric() -> None:
    found = find_link("infinity-fabric2")
    assert found.bandwidth.value == BytesPerSecond(100e9)
    assert found.bandwidth.origin == "assumed"  # how many links a ring uses is the machine's affair


def test_wrong_links_are_told() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'nvlink4'"):
        find_link("nvlink-4")
    with pytest.raises(UsageError, match="--link-latency-us must be greater than 0, not -1"):
        given_link("pcie4", None, -1.0)


@pytest.mark.parametrize(
    ("card", "name"),
    [
        ("H100 SXM", "nvlink4"),
        ("H200 SXM", "nvlink4"),
        ("H100 PCIe", "pcie5"),
        ("H200 NVL", "pcie5"),
        ("B200 (HGX)", "nvlink5"),
        ("A100 80GB SXM", "nvlink3"),
        ("A100 80GB PCIe", "pcie4"),
        ("MI300X", "infinity-fabric"),
        ("MI325X", "infinity-fabric"),
        ("MI250X (one die)", "infinity-fabric2"),
        ("MI250 (one die)", "infinity-fabric2"),
        ("MI210", "infinity-fabric2"),
        ("V100 32GB SXM", "nvlink2"),
        ("V100 32GB PCIe", "pcie3"),
        ("V100S", "pcie3"),
        ("GH200 96GB", "pcie5"),
        ("RTX 4090", "pcie4"),
        ("RTX 5090", "pcie5"),
        ("cpu", "gloo-loopback"),
    ],
)
def test_the_usual_link_of_a_card(card: str, name: str) -> None:
    assert usual_link(card) == name
    find_link(name)
