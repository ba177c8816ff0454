"""Piggybacked output stores of attention: equations 17 to 21 of the paper, one function each. Times in microseconds."""

from __future__ import annotations

import math


def completion_coupled_exposure_us(drain_us: float, completion_latency_us: float, cover_us: float) -> float:
    """Exposed time of one aligned burst if the issuer had to wait for remote visibility: [V/R + T_lat - T_cover]+ (17)."""
    return max(0.0, drain_us + completion_latency_us - cover_us)


def issue_backpressure_us(drain_us: float, qloop_gap_us: float, floor_us: float) -> float:
    """Backpressure after a full Q-loop: [V/R - G_Qloop - T_iss^0]+ (18)."""
    return max(0.0, drain_us - qloop_gap_us - floor_us)


def critical_path_stall_us(backpressure_us: float, qk_us: float) -> float:
    """What double buffering does not cover: [backpressure - G_QK]+ (19)."""
    return max(0.0, backpressure_us - qk_us)


def min_seq_len(recovery_gap_us: float, qloop_us_per_kv_tile: float, block_n: int) -> int:
    """M*_ub = b_n ceil(G* / sigma): from this length on no drain-induced stall is left (20)."""
    # The division may land a rounding error above a whole number of tiles.
    return block_n * max(1, math.ceil(recovery_gap_us / qloop_us_per_kv_tile - 1e-9))


def hiding_ratio(fused_us: float, attention_us: float, serial_us: float) -> float:
    """H = 1 - (T_fused - T_FA) / (T_serial - T_FA); NaN where serial costs nothing over attention (21)."""
    exposed = serial_us - attention_us
    return 1 - (fused_us - attention_us) / exposed if exposed > 0 else math.nan
