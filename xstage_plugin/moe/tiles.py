"""Tile shapes of the MegaMoE kernels, and how long their mainloops take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xstage_plugin.bundled import bundled_folder
from xstage_plugin.burst_gap.device import DeviceSpec
from xstage_plugin.burst_gap.platform_model import PlatformModel
from xstage_plugin.checks import not_negative, positive, positive_int
from xstage_plugin.provenance import Origin, Source
from xstage_plugin.toml_table import Table

# Combine leaves the GPU as bfloat16.
COMBINE_BYTES = 2


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class TileConfig:
    """Output tile of one CTA, and who stores it.

    Attributes:
        block_m, block_n: rows (tokens) and columns of a tile.
        separate_epilogue: an own role stores while the tensor cores go on (SM100); otherwise the math warpgroups store
            themselves and nothing covers the issue (SM90).
    """

    block_m: int
    block_n: int
    separate_epilogue: bool

    def __post_init__(self) -> None:
        positive_int("block_m", self.block_m)
        positive_int("block_n", self.block_n)

    @classmethod
    def of_arch(cls, arch: str) -> TileConfig:
        """The tile that DeepGEMM's MegaMoE picks for large batches: 192 x 128 on sm_100, 128 x 256 on sm_90."""
        return cls(192, 128, True) if arch == "sm_100" else cls(128, 256, False)

    def l1_tiles_per_row(self, intermediate: int) -> int:
        return ceil_div(2 * intermediate, self.block_n)

    def l2_tiles_per_row(self, hidden: int) -> int:
        return ceil_div(hidden, self.block_n)

    @property
    def combine_tile_bytes(self) -> int:
        """V_t of a full tile whose tokens all live on other ranks."""
        return self.block_m * self.block_n * COMBINE_BYTES


@dataclass(frozen=True)
class TileTimes:
    """Mainloop times of one tile, microseconds, with their source.

    Attributes:
        l1_mma_us, l2_mma_us: T_L1^mma and T_L2^mma of section 4.2.
        staging_us: fixed part of the store span beside the issue floor (reading accumulators, conversion, addresses).
        origin: measured, paper or estimated.
    """

    l1_mma_us: float
    l2_mma_us: float
    staging_us: float
    origin: Origin

    def __post_init__(self) -> None:
        positive("l1_mma_us", self.l1_mma_us)
        positive("l2_mma_us", self.l2_mma_us)
        not_negative("staging_us", self.staging_us)


@dataclass(frozen=True)
class Table2Row:
    """One model of the paper's Table 2; medians in microseconds."""

    model: str
    span_wave_us: float
    span_interleaved_us: float
    l2_mma_us: float
    l1_mma_us: float


def paper_table2() -> dict[str, Table2Row]:
    """The paper's measured spans and mainloop times, by bundled shape."""
    table = Table.read(bundled_folder("models") / "paper_table2.toml", "a table of tile times")
    columns = ("span_wave_us", "span_interleaved_us", "l2_mma_us", "l1_mma_us")
    return {
        key: Table2Row(key, *(table.table(key).number(column) for column in columns))
        for key in table.keys()  # noqa: SIM118
    }


def tile_times(platform: PlatformModel, tile: TileConfig, hidden: int, intermediate: int, model: str | None) -> TileTimes:
    """The times published for the platform where they apply (one of the bundled models), else an estimate from operations.

    ``model`` is the name of a bundled shape, or None for any other.
    """
    if platform.published is None:
        return estimate_tile_times(platform.device, tile, hidden, intermediate, staging_us=0.0)
    rows = paper_table2()
    floor = float(platform.issue_floor_us(platform.device.num_sms, tile.combine_tile_bytes))
    # The interleaved spans sit on the floor, so what they hold beside T_iss^0 is the kernel's staging.
    staging = max(0.0, float(np.median([row.span_interleaved_us for row in rows.values()])) - floor)
    if model in rows:
        row = rows[model]
        return TileTimes(row.l1_mma_us, row.l2_mma_us, staging, Origin(Source.PAPER, "Table 2, medians"))
    return estimate_tile_times(platform.device, tile, hidden, intermediate, staging)


def estimate_tile_times(device: DeviceSpec, tile: TileConfig, hidden: int, intermediate: int, staging_us: float) -> TileTimes:
    """2 * block_m * block_n * k operations over one SM's share of the stated matrix rate; marked as an estimate."""
    per_k_us = 2.0 * tile.block_m * tile.block_n / device.moe_flops_per_us_and_sm()
    note = (
        f"{tile.block_m} x {tile.block_n} x k operations at {device.moe_efficiency:.1%} of "
        f"{device.fp8_tflops:g} TFLOP/s FP8 over {device.num_sms} SMs"
    )
    return TileTimes(per_k_us * hidden, per_k_us * intermediate, staging_us, Origin(Source.ESTIMATED, note))
