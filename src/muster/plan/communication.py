"""What collectives cost in the α–β model: α seconds per message, β bytes per second.

A message of B bytes takes α + B/β (Hockney 1994, "The communication challenge for MPP"). The
collectives are built from it as in Thakur, Rabenseifner & Gropp 2005, "Optimization of collective
communication operations in MPICH", and Patarasu & Yuan 2009, "Bandwidth optimal all-reduce
algorithms". The arithmetic of the reduction is left out: it is small beside the transfer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from muster.plan.links import Link
from muster.plan.origin import Figure, Origin, weakest
from muster.plan.units import Bytes, BytesPerSecond, Seconds


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """How devices are joined: ``link`` inside a node, ``network`` between nodes.

    ``devices_per_node``: None for one node, whatever the number. A node has one network card,
    which its devices share. ``host``: what the processes agree over, once per step. ``overlaps``:
    False where sending takes the very cores that compute, so that nothing is hidden.
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
    weights: Bytes, num_devices: int, fabric: Fabric, num_rounds: int = 1
) -> Figure[Seconds]:
    """What FSDP moves in a step: weights gathered twice per round, gradients scattered once.

    Zhao et al. 2023, "PyTorch FSDP". Each is half of an all-reduce: 1.5 x that of DDP in a step of
    one round. Muster computes under autocast, so that what moves is fp32.
    """
    whole = gradient_sum(weights, num_devices, fabric)
    return Figure(value=whole.value * (num_rounds + 0.5), origin=whole.origin)


def agreement(num_devices: int, fabric: Fabric) -> Figure[Seconds]:
    """The one small sum over all ranks with which muster ends every step; 48 bytes."""
    if num_devices == 1 or fabric.host is None:
        return Figure(value=Seconds(0.0), origin="measured", source="nobody to agree with")
    value = all_reduce(Bytes(48), num_devices, fabric.host)
    return Figure(value=value, origin=weakest([fabric.host.alpha]))


def _shape(num_devices: int, fabric: Fabric) -> tuple[int, int]:
    """Devices per node and nodes."""
    inside = min(num_devices, fabric.devices_per_node or num_devices)
    return inside, -(-num_devices // inside)


def _origin(fabric: Fabric, num_nodes: int) -> Origin:
    links = [fabric.link] + ([fabric.network] if fabric.network and num_nodes > 1 else [])
    figures = [figure for link in links for figure in link.figures]
    return weakest(figures)
