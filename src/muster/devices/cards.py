"""What the makers' data sheets say about their cards: memory, dense peaks, bandwidth, power.

Peaks are dense: those that a sheet gives "with sparsity" are halved. bf16 and fp16 are on matrix
units with fp32 accumulation; fp32 is outside matrix units, as torch computes it by default. None:
the card cannot, or the sheet does not say. These are the makers' figures and nobody reaches them;
nothing here was measured.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp32", "tf32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class Card:
    """``*_tflops``: 10^12 operations per second; ``bandwidth_gb_s``: of memory, 10^9 bytes."""

    name: str
    memory_gib: int
    fp32_tflops: float
    tf32_tflops: float | None
    bf16_tflops: float | None
    fp16_tflops: float
    bandwidth_gb_s: float
    power_w: int
    source: str

    def peak_flops(self, precision: Precision) -> float | None:
        """Dense peak in FLOP/s; None where it is not known."""
        value: float | None = getattr(self, f"{precision}_tflops")
        return None if value is None else value * 1e12


#: How a driver names the card, without its maker and brand and with blanks for hyphens (a regular
#: expression for the whole of it), and the figures: name, GiB, fp32, tf32, bf16, fp16 TFLOP/s,
#: GB/s, W, source.
_ROWS: tuple[tuple[object, ...], ...] = (
    (r"GB200", "GB200 (per GPU)", 186, 80.0, 1250.0, 2500.0, 2500.0, 8000.0, 1200,
     "NVIDIA GB200 NVL72 data sheet, divided by 72"),
    (r"B200", "B200 (HGX)", 180, 75.0, 1125.0, 2250.0, 2250.0, 7700.0, 1000,
     "NVIDIA HGX B200 data sheet, divided by 8"),
    (r"GH200 480GB", "GH200 96GB", 96, 67.0, 494.5, 989.5, 989.5, 4000.0, 900,
     "NVIDIA GH200 data sheet; the name counts the processor's 480 GB"),
    (r"GH200 144G HBM3e", "GH200 144GB", 144, 67.0, 494.5, 989.5, 989.5, 4900.0, 900,
     "NVIDIA GH200 data sheet"),
    (r"H200 NVL", "H200 NVL", 141, 60.0, 417.5, 835.5, 835.5, 4800.0, 600,
     "NVIDIA H200 data sheet"),
    (r"H200( SXM)?", "H200 SXM", 141, 67.0, 494.5, 989.5, 989.5, 4800.0, 700,
     "NVIDIA H200 data sheet"),
    (r"H100 NVL", "H100 NVL", 94, 60.0, 417.5, 835.5, 835.5, 3900.0, 400,
     "NVIDIA H100 data sheet"),
    (r"H100 PCIe", "H100 PCIe", 80, 51.0, 378.0, 756.0, 756.0, 2000.0, 350,
     "NVIDIA H100 data sheet"),
    (r"H100( SXM5?)?( 80GB)?( HBM3)?", "H100 SXM", 80, 67.0, 494.5, 989.5, 989.5, 3350.0, 700,
     "NVIDIA H100 data sheet"),
    (r"A100 (SXM4? 80GB|80GB SXM4?)", "A100 80GB SXM", 80, 19.5, 156.0, 312.0, 312.0, 2039.0, 400,
     "NVIDIA A100 data sheet"),
    (r"A100 (PCIe 80GB|80GB PCIe)", "A100 80GB PCIe", 80, 19.5, 156.0, 312.0, 312.0, 1935.0, 300,
     "NVIDIA A100 data sheet"),
    (r"A100 (SXM4? 40GB|40GB SXM4?)", "A100 40GB SXM", 40, 19.5, 156.0, 312.0, 312.0, 1555.0, 400,
     "NVIDIA A100 data sheet"),
    (r"A100 (PCIe 40GB|40GB PCIe)", "A100 40GB PCIe", 40, 19.5, 156.0, 312.0, 312.0, 1555.0, 250,
     "NVIDIA A100 data sheet"),
    (r"A30", "A30", 24, 10.3, 82.0, 165.0, 165.0, 933.0, 165, "NVIDIA A30 data sheet"),
    (r"A40", "A40", 48, 37.4, 74.8, 149.7, 149.7, 696.0, 300, "NVIDIA A40 data sheet"),
    (r"A10", "A10", 24, 31.2, 62.5, 125.0, 125.0, 600.0, 150, "NVIDIA A10 data sheet"),
    (r"A10G", "A10G", 24, 35.0, 35.0, 70.0, 70.0, 600.0, 300, "NVIDIA A10G data sheet"),
    (r"RTX A6000", "RTX A6000", 48, 38.7, 77.4, 154.8, 154.8, 768.0, 300,
     "NVIDIA RTX A6000 data sheet"),
    (r"RTX 6000 Ada( Generation)?", "RTX 6000 Ada", 48, 91.1, 182.1, 364.2, 364.2, 960.0, 300,
     "NVIDIA RTX 6000 Ada data sheet"),
    (r"L40S", "L40S", 48, 91.6, 183.0, 362.0, 362.0, 864.0, 350, "NVIDIA L40S data sheet"),
    (r"L40", "L40", 48, 90.5, 90.5, 181.0, 181.0, 864.0, 300, "NVIDIA L40 data sheet"),
    (r"L4", "L4", 24, 30.3, 60.0, 121.0, 121.0, 300.0, 72, "NVIDIA L4 data sheet"),
    (r"V100 SXM[23] 32GB", "V100 32GB SXM", 32, 15.7, None, None, 125.0, 900.0, 300,
     "NVIDIA V100 data sheet"),
    (r"V100 SXM2 16GB", "V100 16GB SXM", 16, 15.7, None, None, 125.0, 900.0, 300,
     "NVIDIA V100 data sheet"),
    (r"V100 PCIe 32GB", "V100 32GB PCIe", 32, 14.0, None, None, 112.0, 900.0, 250,
     "NVIDIA V100 data sheet"),
    (r"V100 PCIe( 16GB)?", "V100 PCIe", 16, 14.0, None, None, 112.0, 900.0, 250,
     "NVIDIA V100 data sheet"),
    (r"V100S( PCIe 32GB)?", "V100S", 32, 16.4, None, None, 130.0, 1134.0, 250,
     "NVIDIA V100S data sheet"),
    (r"T4", "T4", 16, 8.1, None, None, 65.0, 300.0, 70, "NVIDIA T4 data sheet"),
    (r"RTX 5090", "RTX 5090", 32, 104.8, 104.8, 209.5, 209.5, 1792.0, 575,
     "NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A"),
    (r"RTX 5080", "RTX 5080", 16, 56.3, 56.3, 112.6, 112.6, 960.0, 360,
     "NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A"),
    (r"RTX 4090", "RTX 4090", 24, 82.6, 82.6, 165.2, 165.2, 1008.0, 450,
     "NVIDIA Ada GPU architecture whitepaper, appendix A"),
    (r"RTX 4080", "RTX 4080", 16, 48.7, 48.7, 97.5, 97.5, 716.8, 320,
     "NVIDIA Ada GPU architecture whitepaper, appendix A"),
    (r"RTX 3090", "RTX 3090", 24, 35.6, 35.6, 71.0, 71.0, 936.0, 350,
     "NVIDIA GA102 whitepaper, appendix A"),
    (r"RTX 3080", "RTX 3080 10GB", 10, 29.8, 29.8, 59.5, 59.5, 760.0, 320,
     "NVIDIA GA102 whitepaper, appendix A"),
    (r"MI325X( OAM)?", "MI325X", 256, 163.4, 653.7, 1307.4, 1307.4, 6000.0, 1000,
     "AMD Instinct MI325X data sheet"),
    (r"MI300X( OAM)?", "MI300X", 192, 163.4, 653.7, 1307.4, 1307.4, 5300.0, 750,
     "AMD Instinct MI300X data sheet"),
    (r"MI250X", "MI250X (one die)", 64, 23.95, None, 191.5, 191.5, 1638.4, 280,
     "AMD Instinct MI250X data sheet, divided by 2: each die is a device"),
    (r"MI250", "MI250 (one die)", 64, 22.65, None, 181.0, 181.0, 1638.4, 280,
     "AMD Instinct MI250 data sheet, divided by 2: each die is a device"),
    (r"MI210", "MI210", 64, 22.6, None, 181.0, 181.0, 1638.4, 300,
     "AMD Instinct MI210 data sheet"),
)  # fmt: skip
#: Makers and brands that stand before the card's own name.
_BRANDS = frozenset({"nvidia", "tesla", "geforce", "amd", "instinct"})
#: A driver keeps some memory for itself, error correction in GDDR takes a sixteenth of it, and
#: makers count GB where drivers count GiB. What lies outside is another card, or a part of one.
_LEAST_MEMORY, _MOST_MEMORY = 0.88, 1.02

CARDS: tuple[Card, ...] = tuple(
    Card(**dict(zip(Card.__dataclass_fields__, row[1:], strict=True)))  # type: ignore[arg-type]
    for row in _ROWS
)


def find_card(driver_name: str, memory_mib: int | None = None) -> Card | None:
    """The card that a driver calls ``driver_name``; None for one that is not in the table.

    The whole name must match: what is cut from a card (MIG, vGPU), soldered differently or made
    for one customer has other figures. So has a card with another amount of memory
    (``memory_mib``: as the driver reports it).

    >>> find_card("NVIDIA A100-SXM4-80GB").bandwidth_gb_s
    2039.0
    >>> find_card("NVIDIA A100-SXM4-40GB MIG 3g.20gb") is None
    True
    >>> find_card("NVIDIA GeForce RTX 3080", memory_mib=12288) is None
    True
    """
    words = [word for word in re.split(r"[\s-]+", driver_name) if word]
    while words and words[0].lower() in _BRANDS:
        del words[0]
    name = " ".join(words)
    for row, card in zip(_ROWS, CARDS, strict=True):
        if re.fullmatch(str(row[0]), name, re.IGNORECASE):
            whole = card.memory_gib * 1024
            is_other = memory_mib is not None and not (
                _LEAST_MEMORY * whole <= memory_mib <= _MOST_MEMORY * whole
            )
            return None if is_other else card
    return None
