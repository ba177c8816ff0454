"""One configuration of the probe kernel, and the limits that it must keep to."""

from __future__ import annotations

from dataclasses import dataclass

from xstage_plugin.burst_gap.platform_model import STORES
from xstage_plugin.checks import not_negative, positive_int
from xstage_plugin.errors import InvalidInputError

SLOT_ALIGNMENT_BYTES = 512  # of a burst: 32 words, so that no warp is split and each stamp stands in every burst
MAX_THREADS = 512
NUM_SAMPLES = 256  # per producer; of a longer launch the last ones are kept


@dataclass(frozen=True)
class ProbeConfig:
    """One configuration. ``num_bursts`` holds for isolated bursts, the times for periodic ones; the chunk for ``bulk``.

    Attributes:
        gap_us: requested time without stores after each burst; the achieved one is period - issue.
        window_us: what is measured, after ``warmup_us``; then all go on storing for ``cooldown_us``.
        num_slots: a producer's region holds that many bursts, visited in rotation.

    Raises:
        InvalidInputError: a value is out of range; the message names it.
    """

    num_producers: int
    burst_bytes: int
    gap_us: float = 0.0
    isolated: bool = False
    store: str = "st.v4"
    num_threads: int = 256
    window_us: float = 3000.0
    warmup_us: float = 500.0
    cooldown_us: float = 200.0
    num_bursts: int = 40
    num_slots: int = 4
    bulk_chunk_bytes: int = 16384

    def __post_init__(self) -> None:
        for name in ("num_producers", "burst_bytes", "num_threads", "num_bursts", "num_slots", "bulk_chunk_bytes"):
            positive_int(name, getattr(self, name))
        for name in ("gap_us", "window_us", "warmup_us", "cooldown_us"):
            if not_negative(name, getattr(self, name)) > 1e6:
                raise InvalidInputError(f"{name} is {getattr(self, name):g}; expected at most 1e6 (a second)")
        if self.store not in STORES:
            raise InvalidInputError(f"store is {self.store!r}; expected one of {', '.join(STORES)}")
        if self.burst_bytes % SLOT_ALIGNMENT_BYTES or self.burst_bytes >= 2**31:
            raise InvalidInputError(
                f"burst_bytes is {self.burst_bytes}; expected a multiple of {SLOT_ALIGNMENT_BYTES} below 2 GiB"
            )
        if self.num_threads % 32 or self.num_threads > MAX_THREADS:
            raise InvalidInputError(f"num_threads is {self.num_threads}; expected whole warps, at most {MAX_THREADS}")
        if self.bulk_chunk_bytes % 16 or self.bulk_chunk_bytes >= 2**20:
            raise InvalidInputError(f"bulk_chunk_bytes is {self.bulk_chunk_bytes}; expected a multiple of 16 below 1 MiB")
        if self.isolated and not 4 <= self.num_bursts <= NUM_SAMPLES:
            raise InvalidInputError(f"num_bursts is {self.num_bursts}; expected 4 to {NUM_SAMPLES}")

    @property
    def burst_total_bytes(self) -> int:
        """V: what all producers write in one burst."""
        return self.num_producers * self.burst_bytes

    def region_bytes(self, num_destinations: int = 1) -> int:
        """Bytes that this configuration occupies at each of its destinations."""
        return -(-self.num_producers // num_destinations) * self.num_slots * self.burst_bytes

    @property
    def planned_us(self) -> float:
        """How long a launch takes if nothing goes wrong, apart from the bursts themselves."""
        if self.isolated:
            return self.num_bursts * self.gap_us
        return self.warmup_us + self.window_us + self.cooldown_us

    def __str__(self) -> str:
        mode = "isolated" if self.isolated else "periodic"
        return f"{mode} {self.store}, K = {self.num_producers}, burst_bytes = {self.burst_bytes}, gap_us = {self.gap_us:g}"
