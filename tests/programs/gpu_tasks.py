"""Tasks for a real CUDA device: what fills it, what breaks its context."""

import torch

from muster import batched


def empty(share):
    """So much of the whole card."""
    total = torch.cuda.get_device_properties(0).total_memory
    return torch.empty(int(share * total), dtype=torch.uint8, device="cuda")


def product(i: int):
    ones = torch.ones(256, 256, device="cuda")
    return {"sum": float((ones @ ones).sum()), "cards": torch.cuda.device_count()}


@batched(max_batch=16)
def hungry(tasks):
    """Five of them fit; the frame of a call that failed holds 40 % of the card."""
    weights = empty(0.4)
    activations = empty(0.1 * len(tasks))
    assert weights.is_cuda and activations.is_cuda
    return [{"together": len(tasks)} for _ in tasks]


class Hungry:
    """The same as a stage of a map."""

    def process(self, batch):
        weights = empty(0.4)
        activations = empty(0.1 * len(batch))
        assert weights.is_cuda and activations.is_cuda
        return [{**record, "together": len(batch)} for record in batch]


def too_much_for_two(i: int):
    held = empty(0.6)
    torch.cuda._sleep(1_000_000_000)
    return {"held": held.numel(), "sum": product(i)["sum"]}


def breaks(i: int):
    """Task 3 asks for what is not there: the kernel fails after the task has returned."""
    ones = torch.ones(8, device="cuda")
    index = torch.tensor([1 << 20 if i == 3 else 1], device="cuda")
    ones[index]
    return {"ok": 1}


def small(i: int):
    held = empty(0.05)
    torch.cuda._sleep(1_000_000_000)
    torch.cuda.synchronize()
    return {"held": held.numel()}
