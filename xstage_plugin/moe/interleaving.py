"""Interleaving Linear-1 tiles between Linear-2 tiles: equations 12 to 16 of the paper, one function each.

``l1_per_l2`` is n1/n2, the Linear-1 tiles of a cycle over its Linear-2 tiles; tile shapes fix it.
"""

from __future__ import annotations

from xstage_plugin.moe.tiles import TileConfig, ceil_div


def l1_per_l2(tile: TileConfig, hidden: int, intermediate: int) -> float:
    """n1/n2: Linear-1 tiles a row over Linear-2 tiles a row."""
    return tile.l1_tiles_per_row(intermediate) / tile.l2_tiles_per_row(hidden)


def gap_wave_us(l2_mma_us: float) -> float:
    """G_wave = T_L2^mma. Equation 12, left."""
    return l2_mma_us


def gap_interleaved_us(l2_mma_us: float, l1_mma_us: float, ratio: float) -> float:
    """G_int = T_L2^mma + (n1/n2) T_L1^mma, averaged over a cycle. Equation 12, right."""
    return l2_mma_us + ratio * l1_mma_us


def overhead_interleaved_us(overhead_wave_us: float, l1_mma_us: float, ratio: float) -> float:
    """What interleaving leaves of the backpressure: [overhead_wave - (n1/n2) T_L1^mma]+. Equation 13."""
    return max(0.0, overhead_wave_us - ratio * l1_mma_us)


def interleaving_suffices(drain_us: float, floor_us: float, l2_mma_us: float, l1_mma_us: float, ratio: float) -> bool:
    """V <= R (T_iss^0 + T_L2^mma + (n1/n2) T_L1^mma), with drain_us = V/R. Equation 14 over one Linear-2 tile."""
    return drain_us - l2_mma_us - floor_us - ratio * l1_mma_us <= 0


def stall_us(span_us: float, cover_us: float) -> float:
    """Part of a tile's store span that reaches the tensor cores: [T_RS - T_cover^mma]+. Equation 15."""
    return max(0.0, span_us - cover_us)


def lead_knee_rows(block_n: int, num_sms: int, intermediate: int) -> int:
    """D_knee = ceil(b_n K_SM / (2 h_inter)), the least lead that does not starve Linear-2. Equation 16."""
    return ceil_div(block_n * num_sms, 2 * intermediate)
