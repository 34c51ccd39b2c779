"""Memory per GPU of a training by part (weights, gradients, optimizer, activations), and whether it
fits; and what the config.json of a decoder-only transformer tells: parameters, FLOPs, activations.

Muster computes under autocast: weights, gradients and AdamW's two moments are fp32 (16 bytes per
parameter; Rajbhandari et al. 2020, "ZeRO", has the same sum for its mixed precision), and bf16 or
fp16 adds a 2-byte copy of the weights that the backward still needs. FSDP divides all but that copy
and the activations by the number of GPUs, and gathers one unit (a layer) at a time. With bf16 it
gathers the copy itself, of one unit (2 bytes of it, 2 of its gradient, 4 of the sum): no GPU has a
copy of all. A model with BatchNorm is gathered in fp32; that is not counted here.

Only families of transformers whose layers are known exactly are taken; for others the user gives
the number of parameters. The counts are those of transformers' own models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from muster.base.codec import read_json
from muster.base.errors import UsageError
from muster.devices.cards import CARDS, Precision
from muster.plan.units import Bytes, Figure, Flops, assumed, derived

#: model_type → whether the MLP is gated, and whether q, k and v have biases.
_FAMILIES: dict[str, tuple[bool, bool]] = {
    "llama": (True, False),
    "mistral": (True, False),
    "qwen2": (True, True),
    "gpt2": (False, True),
}


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """``kv_width``: heads of keys x their size; ``inner``: width of the MLP; sizes in numbers."""

    family: str
    layers: int
    width: int
    heads: int
    kv_width: int
    attention_width: int
    inner: int
    vocabulary: int
    positions: int
    is_tied: bool

    @property
    def parameters(self) -> int:
        """The number of parameters; tied embeddings count once."""
        tables = self.vocabulary * (1 if self.is_tied else 2) + self._position_rows
        return tables * self.width + self.layers * self.layer_parameters + self._norm

    @property
    def layer_parameters(self) -> int:
        is_gated, has_bias = _FAMILIES[self.family]
        h, a, kv, f = self.width, self.attention_width, self.kv_width, self.inner
        attention = h * a + 2 * h * kv + a * h
        mlp = (3 if is_gated else 2) * h * f
        bias = (a + 2 * kv) if has_bias else 0
        if self.family == "gpt2":
            bias += h + f + h
        return attention + mlp + bias + 2 * self._norm

    @property
    def largest_unit(self) -> int:
        """Parameters that FSDP gathers at once: a layer, or what is outside the layers."""
        return max(self.layer_parameters, self.parameters - self.layers * self.layer_parameters)

    def flops_per_sample(self, sequence: int) -> Flops:
        """Forward and backward of ``sequence`` tokens: 6 N + 12 L H Q T per token.

        Chowdhery et al. 2022, "PaLM", appendix B. N leaves out tables that are only looked up in.
        """
        looked_up = self._position_rows + (0 if self.is_tied else self.vocabulary)
        in_products = self.parameters - looked_up * self.width
        attention = 12 * self.layers * self.attention_width * sequence
        return Flops(float((6 * in_products + attention) * sequence))

    def activations(self, sequence: int, bytes_each: int) -> Bytes:
        """What one sample of ``sequence`` tokens keeps for the backward, without dropout.

        After Korthikanti et al. 2022, "Reducing activation recomputation in large transformer
        models", section 4.1, with attention scores not kept (scaled_dot_product_attention) and,
        for gated MLPs, its four inner tensors. Logits and their gradient are fp32.
        """
        is_gated, _ = _FAMILIES[self.family]
        h, f = self.width, self.inner
        norms = 2 * h
        attention = h + self.attention_width + 2 * self.kv_width + self.attention_width
        mlp = h + (4 if is_gated else 2) * f
        layer = (norms + attention + mlp) * bytes_each * sequence
        logits = 2 * 4 * self.vocabulary * sequence
        return Bytes(float(self.layers * layer + logits))

    def checkpointed_activations(self, sequence: int, bytes_each: int) -> Bytes:
        """The activations with only each layer's input kept and one layer recomputed at a time."""
        kept = self.layers * self.width * sequence * bytes_each
        whole = self.activations(sequence, bytes_each).value
        logits = 2 * 4 * self.vocabulary * sequence
        return Bytes(kept + (whole - logits) / self.layers + logits)

    @property
    def _position_rows(self) -> int:
        return self.positions if self.family == "gpt2" else 0

    @property
    def _norm(self) -> int:
        return self.width * (2 if self.family == "gpt2" else 1)


def read_transformer(path: Path) -> Transformer:
    """The model of a config.json. SetupError for a file that is missing or no JSON; UsageError
    for a family that is not known here, or a config that lacks what counts.
    """
    record = read_json(path, "model config")
    if not isinstance(record, dict):
        raise UsageError(f"{path} is not the config of a model.")
    family = record.get("model_type")
    if family not in _FAMILIES:
        raise UsageError(
            f"{path}: the model type {family!r} is not known here "
            f"(known: {', '.join(sorted(_FAMILIES))}).",
            hint="give the number of parameters instead: params=7e9.",
        )
    try:
        return _gpt2(record) if family == "gpt2" else _llama_like(str(family), record)
    except KeyError as error:
        raise UsageError(f"{path} lacks {error}, without which nothing can be counted.") from None


def _llama_like(family: str, record: Mapping[str, Any]) -> Transformer:
    width, heads = int(record["hidden_size"]), int(record["num_attention_heads"])
    head_size = int(record.get("head_dim") or width // heads)
    return Transformer(
        family=family,
        layers=int(record["num_hidden_layers"]),
        width=width,
        heads=heads,
        kv_width=int(record.get("num_key_value_heads") or heads) * head_size,
        attention_width=heads * head_size,
        inner=int(record["intermediate_size"]),
        vocabulary=int(record["vocab_size"]),
        positions=int(record.get("max_position_embeddings", 2048)),
        is_tied=bool(record.get("tie_word_embeddings", False)),
    )


def _gpt2(record: Mapping[str, Any]) -> Transformer:
    width = int(record["n_embd"])
    return Transformer(
        family="gpt2",
        layers=int(record["n_layer"]),
        width=width,
        heads=int(record["n_head"]),
        kv_width=width,
        attention_width=width,
        inner=int(record.get("n_inner") or 4 * width),
        vocabulary=int(record["vocab_size"]),
        positions=int(record.get("n_positions", 1024)),
        is_tied=bool(record.get("tie_word_embeddings", True)),
    )


Strategy = Literal["single", "ddp", "fsdp"]
Optimizer = Literal["adamw", "sgd", "sgd-momentum"]

_FP32 = 4
_STATES: dict[Optimizer, int] = {"adamw": 2, "sgd": 0, "sgd-momentum": 1}
#: What CUDA, its libraries and the allocator's rounding take before a tensor exists.
CONTEXT = assumed(Bytes(0.75 * 2**30), "CUDA context, libraries and the allocator's rounding")
#: The share of the parameters in the largest unit, where only their number is known. A model
#: without a ModuleList of layers is one unit, and needs more.
_UNIT_SHARE = assumed(1 / 16, "a usual layer of a deep model")
_MOST_DEVICES = 4096


@dataclass(frozen=True, kw_only=True)
class Need:
    """What is trained, and how.

    ``activations``: bytes that one sample keeps for the backward, None where that is not known;
    ``checkpointed``: the same with activation checkpointing in the model, where that is known;
    ``largest_unit``: parameters FSDP gathers at once, None: a usual share of them.
    """

    parameters: Figure[int]
    activations: Figure[Bytes] | None = None
    checkpointed: Figure[Bytes] | None = None
    largest_unit: int | None = None
    micro_batch: int = 1
    precision: Precision = "bf16"
    strategy: Strategy = "ddp"
    num_devices: int = 1
    optimizer: Optimizer = "adamw"
    on_gpu: bool = True


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    size: Figure[Bytes]


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The parts that exist at the same time at the worst moment; ``total`` is their sum.

    ``is_whole``: False where the activations are not known, and the total is a lower bound.
    """

    parts: tuple[Part, ...]
    total: Figure[Bytes]
    is_whole: bool

    def fits(self, memory: Bytes) -> bool:
        return self.total.value <= memory

    def record(self) -> dict[str, Any]:
        return {
            "parts": {part.name: part.size.record() for part in self.parts},
            "total": self.total.record(),
            "is_whole": self.is_whole,
        }


def footprint(need: Need) -> Footprint:
    """Memory of one GPU. The worst moment is the end of the forward, or the update.

    torch's AdamW works on all tensors at once and takes one more copy of the parameters for it
    ("foreach" in torch.optim), when the activations are gone.
    """
    count = need.parameters.value
    shards = need.num_devices if need.strategy == "fsdp" else 1
    own = count / shards
    update = _FP32 * own
    kept = 0.0 if need.activations is None else need.activations.value.value * need.micro_batch
    is_half = need.precision in ("bf16", "fp16")
    has_copy = is_half and not (shards > 1 and need.precision == "bf16")
    in_step = kept + (2 * count if has_copy else 0)

    parts = [
        _part("weights", _FP32 * own, need.parameters),
        _part("gradients", _FP32 * own, need.parameters),
        _part("optimizer", _FP32 * _STATES[need.optimizer] * own, need.parameters),
    ]
    if shards > 1:
        parts.append(_gathered_unit(need))
    if need.optimizer == "adamw" and update > in_step:
        parts.append(_part("update (activations are gone by then)", update, need.parameters))
    else:
        if has_copy:
            parts.append(_part(f"{need.precision} copy", 2 * count, need.parameters))
        if need.activations is not None:
            parts.append(_part("activations", kept, need.activations))
    if need.on_gpu:
        parts.append(Part(name="CUDA context", size=CONTEXT))
    total = sum((part.size.value for part in parts), Bytes(0.0))
    return Footprint(
        parts=tuple(parts),
        total=derived(total, *(part.size for part in parts)),
        is_whole=need.activations is not None,
    )


def remedies(need: Need, memory: Bytes) -> tuple[str, ...]:
    """Changes that make it fit, each alone, the cheapest first; empty where none of them does."""
    found = []
    batch = largest_micro_batch(need, memory)
    if batch is not None and batch < need.micro_batch:
        found.append(f"--batch-size {batch}, and --grad-accum-steps to keep the global batch")
    is_copied = need.strategy != "fsdp" and need.num_devices > 1
    if is_copied and _fits(replace(need, strategy="fsdp"), memory):
        found.append(f"--strategy fsdp over the {need.num_devices} devices")
    if need.precision in ("fp32", "tf32") and need.activations is not None:
        # Half of the bytes is the most that bf16 saves of activations.
        half = replace(need.activations, value=need.activations.value * 0.5)
        if _fits(replace(need, precision="bf16", activations=half), memory):
            found.append("--precision bf16")
    lean = replace(need, activations=need.checkpointed)
    if need.checkpointed is not None and _fits(lean, memory):
        found.append("activation checkpointing in the model (torch.utils.checkpoint)")
    count = fewest_sharded_devices(need, memory)
    if count is not None and count > need.num_devices:
        found.append(f"--strategy fsdp over {count} such devices")
    card = smallest_card(need)
    if card is not None:
        found.append(f"a card with more memory: {card}")
    return tuple(found)


def largest_micro_batch(need: Need, memory: Bytes) -> int | None:
    """The most samples at once that fit; None where not even one does, or it is not known."""
    if need.activations is None or not _fits(replace(need, micro_batch=1), memory):
        return None
    if need.activations.value <= Bytes(0.0):
        return need.micro_batch
    low, high = 1, 2
    while _fits(replace(need, micro_batch=high), memory):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(replace(need, micro_batch=middle), memory):
            low = middle
        else:
            high = middle
    return low


def fewest_sharded_devices(need: Need, memory: Bytes) -> int | None:
    """How many devices FSDP needs; None where no number is enough."""
    for count in range(2, _MOST_DEVICES + 1):
        if _fits(replace(need, strategy="fsdp", num_devices=count), memory):
            return count
    return None


def smallest_card(need: Need) -> str | None:
    """The card of the table with the least memory in which it fits as it is."""
    fitting = [card for card in CARDS if _fits(need, Bytes(float(card.memory_gib * 2**30)))]
    best = min(fitting, key=lambda card: card.memory_gib, default=None)
    return None if best is None else f"{best.name} ({best.memory_gib} GiB)"


def _fits(need: Need, memory: Bytes) -> bool:
    return footprint(need).fits(memory)


def _gathered_unit(need: Need) -> Part:
    """A layer's whole weights and gradients, which are there while it computes."""
    count = need.largest_unit
    rests_on: Figure[Any] = need.parameters
    if count is None:
        count, rests_on = int(need.parameters.value * _UNIT_SHARE.value), _UNIT_SHARE
    return _part("gathered unit", 2 * _FP32 * count, rests_on)  # in bf16 as many: 2 + 2 + 4


def _part(name: str, size: float, rests_on: Figure[Any]) -> Part:
    return Part(name=name, size=derived(Bytes(float(size)), rests_on))
