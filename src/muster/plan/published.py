"""Trainings whose speed others have published, and the share of a card's peak that follows.

A plan of steps that nobody has measured rests on them: `reach` gives the share that work of a kind
usually reaches, and the interval in which nine of ten further trainings of that kind lie, if they
spread as these do. tests/unit/plan/test_published.py plans each of them from the others alone.
They are large trainings that somebody was proud of; one that waits for its data is slower.

What limits a kind of work decides what its share is taken of. Transformers are products of
matrices, so it is the card's peak. ResNets wait for memory between their products: from a V100 over
an A100 to an RTX 3090 their share of the peak goes from 0.16 to 0.42, while the operations for each
byte that the memory could move stay between 25 and 37.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal, NamedTuple

from muster.devices.cards import CARDS, Card, Precision

Measured = Literal["transformer", "convolution"]

#: Student's t for 1, 2, … degrees of freedom: 5 % lie above it. Beyond the table: the normal's.
_T = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771,
      1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725)  # fmt: skip
_T_OF_MANY = 1.645


@dataclass(frozen=True, kw_only=True)
class Published:
    """A training as it was published. ``flops``: of a sample's forward and backward;
    ``samples_per_s``: of all devices together. The rest is what a plan of it is asked with.
    """

    name: str
    kind: Measured
    card: str
    num_devices: int
    parameters: float
    flops: float
    samples_per_s: float
    source: str
    global_batch: int
    batch_size: int
    precision: Precision = "bf16"
    strategy: Literal["ddp", "fsdp"] = "ddp"
    network: str | None = None

    @property
    def rate(self) -> float:
        """Operations a second of one device."""
        return self.samples_per_s * self.flops / self.num_devices

    @property
    def on(self) -> Card:
        return next(card for card in CARDS if card.name == self.card)


class Reach(NamedTuple):
    """Shares of a card's peak."""

    usual: float
    least: float
    most: float


def reach(
    kind: Measured, card: Card | None, precision: Precision, cases: Iterable[Published]
) -> Reach:
    """The share of its peak that a card usually reaches at such work, and where nine of ten others
    lie: the prediction interval of one more value of a log-normal distribution.

    ``card``: None where nothing is known of it but its peak. ``cases``: two or more of this kind.
    """
    cases = list(cases)
    if card is None:
        logs = [math.log(case.rate / _peak(case.on, case.precision)) for case in cases]
        return _interval(logs, 1.0)
    logs = [math.log(case.rate / _limit(kind, case.on, case.precision)) for case in cases]
    return _interval(logs, _limit(kind, card, precision) / _peak(card, precision))


def _interval(logs: list[float], factor: float) -> Reach:
    """Of shares of some limit, which is ``factor`` times the peak. No share is above the most that
    is published: a card of slow arithmetic and fast memory does not wait for its memory.
    """
    count = len(logs)
    t = _T[count - 2] if count - 2 < len(_T) else _T_OF_MANY
    middle, half = fmean(logs), t * stdev(logs) * math.sqrt(1 + 1 / count)
    most = max(case.rate / _peak(case.on, case.precision) for case in PUBLISHED)
    shares = (math.exp(log) * factor for log in (middle, middle - half, middle + half))
    usual, least, highest = shares
    return Reach(min(most, usual), min(most, least), min(1.0, highest))


def _limit(kind: Measured, card: Card, precision: Precision) -> float:
    """Operations a second, or 16-bit numbers a second from memory."""
    if kind == "convolution":
        return card.bandwidth_gb_s * 1e9 / (2 if precision in ("bf16", "fp16") else 4)
    return _peak(card, precision)


def _peak(card: Card, precision: Precision) -> float:
    peak = card.peak_flops(precision)
    assert peak is not None, f"{card.name} has no peak in {precision}"
    return peak


def of_kind(kind: Measured) -> list[Published]:
    return [case for case in PUBLISHED if case.kind == kind]


def _tokens(products: float, layers: int, width: int, length: int) -> float:
    """Operations for a sample of ``length`` tokens: 6 N + 12 L H Q T for each (PaLM, appendix B).
    ``products``: N, the parameters that are in products of matrices.
    """
    return (6 * products + 12 * layers * width * length) * length


_NVIDIA = "NVIDIA DeepLearningExamples, PyTorch/{}, README, {}"
_TIMM = "timm, results/benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv, July 2022"
_FMS = "IBM and PyTorch, fms-fsdp, README, March 2024"
_GPT2_124M = _tokens(124e6, 12, 768, 1024)
_LLAMA_7B, _LLAMA_13B = _tokens(6.607e9, 32, 4096, 4096), _tokens(12.852e9, 40, 5120, 4096)
_BERT = 308e6  # 24 layers and, for the masked tokens alone, the vocabulary

PUBLISHED: tuple[Published, ...] = (
    Published(
        name="GPT-2 124M, nanoGPT", kind="transformer", card="A100 40GB SXM", num_devices=8,
        parameters=124e6, flops=_GPT2_124M, samples_per_s=600_000 * 480 / (4 * 86_400),
        global_batch=480, batch_size=12,
        source="nanoGPT, README and config/train_gpt2.py, January 2023: 600,000 steps of 480 x "
        "1,024 tokens in about 4 days",
    ),
    Published(
        name="GPT-2 124M, llm.c", kind="transformer", card="A100 80GB SXM", num_devices=8,
        parameters=124e6, flops=_GPT2_124M, samples_per_s=10e9 / 1024 / 5_400,
        global_batch=512, batch_size=64,
        source="llm.c, discussion 481, May 2024: 10 billion tokens in about 90 minutes",
    ),
    Published(
        name="GPT-2 1558M, llm.c", kind="transformer", card="H100 SXM", num_devices=8,
        parameters=1558e6, flops=_tokens(1556e6, 48, 1600, 1024),
        samples_per_s=32_000 * 1024 / 86_400, global_batch=1024, batch_size=16,
        source="llm.c, discussion 677, July 2024: 32,000 steps of 2^20 tokens in 24 hours",
    ),
    Published(
        name="BERT-large, 128 tokens", kind="transformer", card="V100 32GB SXM", num_devices=8,
        parameters=336e6, flops=_tokens(_BERT, 24, 1024, 128), samples_per_s=1305.6,
        global_batch=65_536, batch_size=64, precision="fp16",
        source=_NVIDIA.format("LanguageModeling/BERT", "container 19.07, DGX-1 32 GB"),
    ),
    Published(
        name="BERT-large, 512 tokens", kind="transformer", card="V100 32GB SXM", num_devices=8,
        parameters=336e6, flops=_tokens(_BERT, 24, 1024, 512), samples_per_s=231.68,
        global_batch=32_768, batch_size=8, precision="fp16",
        source=_NVIDIA.format("LanguageModeling/BERT", "container 19.07, DGX-1 32 GB"),
    ),
    Published(
        name="Llama-2 7B, A100", kind="transformer", card="A100 80GB SXM", num_devices=128,
        parameters=6.738e9, flops=_LLAMA_7B, samples_per_s=3700 * 128 / 4096, strategy="fsdp",
        global_batch=256, batch_size=2, network="net400",
        source=f"{_FMS}: 3,700 tokens/s of each",
    ),
    Published(
        name="Llama-2 13B, A100", kind="transformer", card="A100 80GB SXM", num_devices=128,
        parameters=13.016e9, flops=_LLAMA_13B, samples_per_s=1800 * 128 / 4096, strategy="fsdp",
        global_batch=256, batch_size=2, network="net400",
        source=f"{_FMS}: 1,800 tokens/s of each",
    ),
    Published(
        name="Llama-2 7B, H100", kind="transformer", card="H100 SXM", num_devices=96,
        parameters=6.738e9, flops=_LLAMA_7B, samples_per_s=7500 * 96 / 4096, strategy="fsdp",
        global_batch=192, batch_size=2, network="net800",
        source=f"{_FMS}: 7,500 tokens/s of each",
    ),
    Published(
        name="Llama-2 13B, H100", kind="transformer", card="H100 SXM", num_devices=96,
        parameters=13.016e9, flops=_LLAMA_13B, samples_per_s=3800 * 96 / 4096, strategy="fsdp",
        global_batch=192, batch_size=2, network="net800",
        source=f"{_FMS}: 3,800 tokens/s of each",
    ),
    Published(
        name="Llama-2 70B, A100", kind="transformer", card="A100 80GB SXM", num_devices=128,
        parameters=68.98e9, flops=_tokens(68.71e9, 80, 8192, 4096),
        samples_per_s=380 * 128 / 4096, strategy="fsdp", global_batch=768, batch_size=6,
        network="net400", source=f"{_FMS}: 380 tokens/s of each",
    ),
    Published(
        name="Llama-3 8B", kind="transformer", card="A100 80GB SXM", num_devices=64,
        parameters=8.03e9, flops=_tokens(7.505e9, 32, 4096, 8192),
        samples_per_s=2904 * 64 / 8192, strategy="fsdp", global_batch=64, batch_size=1,
        network="net1600",
        source="torchtitan, docs/performance.md, 2024: 2,904 tokens/s of each; the network is "
        "assumed",
    ),
    Published(
        name="MPT-7B", kind="transformer", card="H100 SXM", num_devices=8,
        parameters=6.659e9, flops=_tokens(6.659e9, 32, 4096, 2048), samples_per_s=85_144 / 2048,
        strategy="fsdp", global_batch=48, batch_size=6,
        source="MosaicML, llm-foundry, scripts/train/benchmarking, 2023",
    ),
    Published(
        name="GPT-3 175B, ZeRO-3", kind="transformer", card="A100 80GB SXM", num_devices=384,
        parameters=174.6e9, flops=_tokens(174.6e9, 96, 12288, 2048),
        samples_per_s=300e9 / 2048 / (90 * 86_400), precision="fp16", strategy="fsdp",
        global_batch=1536, batch_size=4, network="net1600",
        source="Narayanan et al., arXiv:2104.04473, table 2, 2021: 300 billion tokens in 90 days",
    ),
    Published(
        name="ViT-B/16", kind="transformer", card="RTX 3090", num_devices=1, parameters=86.6e6,
        flops=6 * 17.58e9, samples_per_s=392.99, global_batch=192, batch_size=192,
        precision="fp16", source=_TIMM,
    ),
    Published(
        name="ViT-L/16", kind="transformer", card="RTX 3090", num_devices=1, parameters=304.3e6,
        flops=6 * 61.6e9, samples_per_s=117.2, global_batch=64, batch_size=64, precision="fp16",
        source=_TIMM,
    ),
    Published(
        name="ResNet-50, V100", kind="convolution", card="V100 16GB SXM", num_devices=8,
        parameters=25.6e6, flops=6 * 4.1e9, samples_per_s=8322, global_batch=2048, batch_size=256,
        precision="fp16",
        source=_NVIDIA.format("Classification/ConvNets/resnet50v1.5", "container 21.03, DGX-1"),
    ),
    Published(
        name="ResNet-50, A100", kind="convolution", card="A100 80GB SXM", num_devices=8,
        parameters=25.6e6, flops=6 * 4.1e9, samples_per_s=16_621, global_batch=2048,
        batch_size=256, precision="fp16",
        source=_NVIDIA.format("Classification/ConvNets/resnet50v1.5", "container 21.03, DGX A100"),
    ),
    Published(
        name="ResNet-50, RTX 3090", kind="convolution", card="RTX 3090", num_devices=1,
        parameters=25.6e6, flops=6 * 4.1e9, samples_per_s=1218.01, global_batch=512,
        batch_size=512, precision="fp16", source=_TIMM,
    ),
    Published(
        name="ResNet-152, RTX 3090", kind="convolution", card="RTX 3090", num_devices=1,
        parameters=60.2e6, flops=6 * 11.5e9, samples_per_s=501.44, global_batch=192,
        batch_size=192, precision="fp16", source=_TIMM,
    ),
)  # fmt: skip
