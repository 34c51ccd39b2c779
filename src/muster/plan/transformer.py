"""What is known of a decoder-only transformer from its config.json: parameters, FLOPs, activations.

Only families whose layers are known exactly are taken; for others the user gives the number of
parameters. The counts are those of transformers' own models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.base.codec import read_json
from muster.base.errors import UsageError
from muster.plan.units import Bytes, Flops

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
