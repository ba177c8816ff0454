"""The GPU behind a platform model: what the advisor needs to know of it beside its links."""

from __future__ import annotations

from dataclasses import dataclass

from xstage_plugin.checks import fraction, positive, positive_int, shown
from xstage_plugin.errors import InvalidInputError
from xstage_plugin.provenance import Origin

ARCHITECTURES = ("sm_90", "sm_100")


@dataclass(frozen=True)
class DeviceSpec:
    """One GPU.

    Attributes:
        name: as the driver reports it.
        arch: ``sm_90`` or ``sm_100``; it selects the upstream kernel's tile shape.
        num_sms: streaming multiprocessors.
        l2_mib: L2 cache.
        fp8_tflops, bf16_tflops: dense matrix rates of the datasheet.
        moe_efficiency: share of the FP8 rate that the MegaMoE mainloops reach.
        attention_efficiency: share of the BF16 rate that FlashAttention's forward reaches.
        origin: where the two efficiencies come from.
    """

    name: str
    arch: str
    num_sms: int
    l2_mib: float
    fp8_tflops: float
    bf16_tflops: float
    moe_efficiency: float
    attention_efficiency: float
    origin: Origin

    def __post_init__(self) -> None:
        if self.arch not in ARCHITECTURES:
            raise InvalidInputError(f"arch is {shown(self.arch)}; expected one of {', '.join(ARCHITECTURES)}")
        positive_int("num_sms", self.num_sms)
        for name in ("l2_mib", "fp8_tflops", "bf16_tflops"):
            positive(name, getattr(self, name))
        fraction("moe_efficiency", self.moe_efficiency)
        fraction("attention_efficiency", self.attention_efficiency)

    def moe_flops_per_us_and_sm(self) -> float:
        """Operations a microsecond that one SM does in a MegaMoE mainloop (an estimate)."""
        return self.fp8_tflops * 1e6 * self.moe_efficiency / self.num_sms

    def attention_flops_per_us_and_sm(self) -> float:
        """Operations a microsecond that one SM does in FlashAttention's forward (an estimate)."""
        return self.bf16_tflops * 1e6 * self.attention_efficiency / self.num_sms
