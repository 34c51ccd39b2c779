"""What collectives cost in the α–β model: α seconds per message, β bytes per second.

A message of B bytes takes α + B/β (Hockney 1994, "The communication challenge for MPP"). The
collectives are built from it as in Thakur, Rabenseifner & Gropp 2005, "Optimization of collective
communication operations in MPICH", and Patarasu & Yuan 2009, "Bandwidth optimal all-reduce
algorithms". The arithmetic of the reduction is left out: it is small beside the transfer.

α and β are those of a `Link`: PCIe, NVLink, Infinity Fabric, networks, and gloo on one host.
Bandwidths are those of one direction, as an all-reduce sends and receives at once; data sheets
usually name the sum of both. What a collective reaches of them is ``share``, which is assumed
unless the link was measured.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from muster.base.errors import UnknownNameError, UsageError
from muster.plan.units import (
    Bytes,
    BytesPerSecond,
    Figure,
    Origin,
    Seconds,
    assumed,
    derived,
    from_table,
    given,
    weakest,
)


@dataclass(frozen=True, kw_only=True)
class Link:
    """A connection.

    ``alpha``: time of a message; ``bandwidth``: of one direction; ``share``: the part of it that is
    reached.
    """

    name: str
    alpha: Figure[Seconds]
    bandwidth: Figure[BytesPerSecond]
    share: Figure[float]

    @property
    def beta(self) -> BytesPerSecond:
        return self.bandwidth.value * self.share.value

    @property
    def figures(self) -> tuple[Figure[Any], ...]:
        return (self.alpha, self.bandwidth, self.share)


_NCCL = "NCCL's tuning table (src/graph/tuning.cc, hwLat, ring with the Simple protocol)"
_PCIE = "PCI-SIG: {} GT/s x 16 lanes x 128/130 coding / 8"
_IB = "the rate of a node's ports together / 8"
_GUESS = "gloo over loopback, an order of magnitude: measure it and give --link-*"

#: name → α in µs, its source, GB/s of one direction, its source.
LINKS: dict[str, tuple[float, str, float, str]] = {
    "pcie3": (5.7, _NCCL, 15.75, _PCIE.format(8)),
    "pcie4": (5.7, _NCCL, 31.5, _PCIE.format(16)),
    "pcie5": (5.7, _NCCL, 63.0, _PCIE.format(32)),
    "nvlink2": (3.4, _NCCL, 150.0, "NVIDIA V100 data sheet: 300 GB/s both ways"),
    "nvlink3": (3.4, _NCCL, 300.0, "NVIDIA A100 data sheet: 600 GB/s both ways"),
    "nvlink3-bridge": (3.4, _NCCL, 56.25, "NVIDIA RTX A6000 data sheet: 112.5 GB/s both ways"),
    "nvlink4": (3.4, _NCCL, 450.0, "NVIDIA H100 data sheet: 900 GB/s both ways"),
    "nvlink4-bridge": (3.4, _NCCL, 300.0, "NVIDIA H100 NVL data sheet: 600 GB/s both ways"),
    "nvlink5": (3.4, _NCCL, 900.0, "NVIDIA HGX B200 data sheet: 1,800 GB/s both ways"),
    "infinity-fabric": (3.4, _NCCL + " for NVLink", 448.0,
                        "AMD Instinct MI300X data sheet: 7 links x 128 GB/s both ways"),
    "infinity-fabric2": (3.4, _NCCL + " for NVLink", 100.0,
                         "AMD CDNA 2: 50 GB/s of a link each way; two links of a die at work"),
    "net100": (14.0, _NCCL, 12.5, _IB),
    "gloo-loopback": (100.0, _GUESS, 1.0, _GUESS),
}  # fmt: skip
#: How many links of a die a ring uses depends on the machine, and gloo's figures are a guess.
_ASSUMED_ROWS = ("gloo-loopback", "infinity-fabric2")
_SHARE = assumed(0.8, "what large collectives reach of a link")

#: A card's name → the link its kind usually has, which a machine need not have.
_USUAL: tuple[tuple[str, str], ...] = (
    (r"B200", "nvlink5"),
    (r"H[12]00 SXM", "nvlink4"),
    (r"H[12]00 (NVL|PCIe)", "pcie5"),  # bridges join two or four cards; a ring goes beyond
    (r"A100.*SXM", "nvlink3"),
    (r"V100.*SXM", "nvlink2"),
    (r"MI3\d\dX", "infinity-fabric"),
    (r"MI2\d0", "infinity-fabric2"),
    (r"RTX 50[89]0|GH200", "pcie5"),
    (r"V100|T4", "pcie3"),
)


def find_link(name: str) -> Link:
    """A row of the table, or a network of any rate; UnknownNameError for another name.

    >>> find_link("net1600").bandwidth.value.value  # eight cards of 200 Gbit/s
    200000000000.0
    """
    if network := re.fullmatch(r"net([1-9]\d{0,5})", name):
        alpha_us, alpha_source, _, source = LINKS["net100"]
        gb_s = int(network[1]) / 8
    elif name in LINKS:
        alpha_us, alpha_source, gb_s, source = LINKS[name]
    else:
        raise UnknownNameError("link", name, LINKS)
    make = assumed if name in _ASSUMED_ROWS else from_table
    return Link(
        name=name,
        alpha=make(Seconds(alpha_us * 1e-6), alpha_source),
        bandwidth=make(BytesPerSecond(gb_s * 1e9), source),
        share=assumed(1.0, "part of the guess") if name == "gloo-loopback" else _SHARE,
    )


def given_link(name: str, bandwidth_gb_s: float | None, latency_us: float | None) -> Link:
    """The link ``name`` with what the user has measured in place of the table's values.

    A measured bandwidth is reached already, so its share is 1.
    """
    for flag, value in (
        ("--link-bandwidth-gb-s", bandwidth_gb_s),
        ("--link-latency-us", latency_us),
    ):
        if value is not None and value <= 0:
            raise UsageError(f"{flag} must be greater than 0, not {value:g}.")
    link = find_link(name)
    alpha, bandwidth, share = link.figures
    if latency_us is not None:
        alpha = given(Seconds(latency_us * 1e-6), "--link-latency-us")
    if bandwidth_gb_s is not None:
        bandwidth = given(BytesPerSecond(bandwidth_gb_s * 1e9), "--link-bandwidth-gb-s")
        share = given(1.0, "the bandwidth is one that was reached")
    return Link(name=name, alpha=alpha, bandwidth=bandwidth, share=share)


def presumed(link: Link) -> Link:
    """``link``, marked as assumed, because nobody has said that the machine has it."""

    def weaker(figure: Figure[Any]) -> Figure[Any]:
        if figure.origin != "table":
            return figure
        return assumed(figure.value, f"{figure.source}; that these cards have it: see --link")

    alpha, bandwidth, share = (weaker(figure) for figure in link.figures)
    return Link(name=link.name, alpha=alpha, bandwidth=bandwidth, share=share)


def usual_link(card_name: str) -> str:
    """The link that cards of this name usually have; ``pcie4`` where nothing else is known.

    >>> usual_link("H100 SXM"), usual_link("RTX 4090"), usual_link("cpu")
    ('nvlink4', 'pcie4', 'gloo-loopback')
    """
    if card_name == "cpu":
        return "gloo-loopback"
    for pattern, link in _USUAL:
        if re.search(pattern, card_name):
            return link
    return "pcie4"


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """How devices are joined: ``link`` inside a node, ``network`` between nodes.

    ``devices_per_node``: None for one node, whatever the number. A node's devices share its
    network, whose rate is that of all its network cards together. ``host``: the link over which
    processes agree once per step.
    ``overlaps``: False where sending takes the very cores that compute, so that nothing is hidden.
    """

    link: Link
    devices_per_node: int | None = None
    network: Link | None = None
    host: Link | None = None
    overlaps: bool = True


def ring_volume(size: Bytes, num_ranks: int) -> Bytes:
    """What each rank sends in a ring all-reduce: 2 (n-1)/n of the buffer, the least possible."""
    return size * (2 * (num_ranks - 1) / num_ranks)


def ring_all_reduce(size: Bytes, num_ranks: int, alpha: Seconds, beta: BytesPerSecond) -> Seconds:
    """2 (n-1) α + 2 (n-1)/n B/β: reduce-scatter, then all-gather."""
    return alpha * (2 * (num_ranks - 1)) + ring_volume(size, num_ranks) / beta


def tree_all_reduce(size: Bytes, num_ranks: int, alpha: Seconds, beta: BytesPerSecond) -> Seconds:
    """2 ⌈log2 n⌉ (α + B/β): a binomial reduce, then a binomial broadcast; for small buffers."""
    return (alpha + size / beta) * (2 * math.ceil(math.log2(num_ranks)))


def half_ring(size: Bytes, num_ranks: int, alpha: Seconds, beta: BytesPerSecond) -> Seconds:
    """(n-1) α + (n-1)/n B/β: an all-gather, or a reduce-scatter, of B bytes in all."""
    return ring_all_reduce(size, num_ranks, alpha, beta) * 0.5


def all_reduce(size: Bytes, num_ranks: int, link: Link) -> Seconds:
    """The cheaper of ring and tree, which is how NCCL chooses."""
    alpha, beta = link.alpha.value, link.beta
    ring = ring_all_reduce(size, num_ranks, alpha, beta)
    return min(ring, tree_all_reduce(size, num_ranks, alpha, beta))


def gradient_sum(size: Bytes, num_devices: int, fabric: Fabric) -> Figure[Seconds]:
    """All-reduce over all devices; over several nodes in three parts.

    Those are: a reduce-scatter in each node, an all-reduce between the nodes in which a node's
    network card carries the whole buffer once, and an all-gather in each node.
    """
    inside, num_nodes = _shape(num_devices, fabric)
    origin = _origin(fabric, num_nodes)
    if num_devices == 1:
        return Figure(value=Seconds(0.0), origin="measured", source="one device")
    if num_nodes == 1:
        return Figure(value=all_reduce(size, num_devices, fabric.link), origin=origin)
    assert fabric.network is not None
    between = all_reduce(size, num_nodes, fabric.network)
    alpha, beta = fabric.link.alpha.value, fabric.link.beta
    return Figure(value=half_ring(size, inside, alpha, beta) * 2 + between, origin=origin)


def sharded_sum(
    weights: Bytes, gradients: Bytes, num_devices: int, fabric: Fabric, num_rounds: int = 1
) -> Figure[Seconds]:
    """What FSDP moves in a step: weights gathered twice per round, gradients scattered once.

    Zhao et al. 2023, "PyTorch FSDP". Each is half of an all-reduce: in fp32 1.5 x that of DDP in a
    step of one round. In bf16 Muster gathers weights of half the bytes; gradients stay fp32.
    """
    gathered = gradient_sum(weights, num_devices, fabric)
    scattered = gradient_sum(gradients, num_devices, fabric)
    value = gathered.value * num_rounds + scattered.value * 0.5
    return Figure(value=value, origin=gathered.origin)


def agreement(num_devices: int, fabric: Fabric) -> Figure[Seconds]:
    """The one small sum over all ranks with which muster ends every step; 48 bytes."""
    if num_devices == 1 or fabric.host is None:
        return Figure(value=Seconds(0.0), origin="measured", source="one device needs no agreement")
    value = all_reduce(Bytes(48), num_devices, fabric.host)
    return derived(value, fabric.host.alpha)


def _shape(num_devices: int, fabric: Fabric) -> tuple[int, int]:
    """Devices per node and nodes."""
    inside = min(num_devices, fabric.devices_per_node or num_devices)
    return inside, -(-num_devices // inside)


def _origin(fabric: Fabric, num_nodes: int) -> Origin:
    links = [fabric.link] + ([fabric.network] if fabric.network and num_nodes > 1 else [])
    figures = [figure for link in links for figure in link.figures]
    return weakest(figures)
