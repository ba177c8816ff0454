"""What the samples of one attention case say: residuals, hiding ratios, floors and predictions. Pure, no GPU.

Counting: a residual is an arm's time over attention alone, both at one clock (clocked.py) and taken between neighbouring
samples and not between medians: the mean of both arms over one A B B A pair of trials, subtracted, and the median over the
pairs. Hiding ratio: equation 21 over those residuals. Speedups are given as timed and at one clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import harness
import numpy as np
from clocked import Sample, at_clock_us, median_mhz, timed_us
from harness import Arm

from xstage_plugin.attention.advisor import advise_attention
from xstage_plugin.attention.convergence import hiding_ratio
from xstage_plugin.attention.layout import UlyssesLayout
from xstage_plugin.attention.mode_choice import AUTO, choose_mode
from xstage_plugin.attention.mode_choice import FUSED as FUSED_MODE
from xstage_plugin.attention.workload import AttentionWorkload
from xstage_plugin.burst_gap.platform_model import PlatformModel

FAMILY = "ulysses"
ATTENTION = Arm("attention", FAMILY)
LAUNCHED, SENDER, FUSED = Arm("attention as launched", FAMILY), Arm("fused sender", FAMILY), Arm("fused", FAMILY)
OWN_FIRST, BY_OWNER = Arm("fused own first", FAMILY), Arm("fused by owner", FAMILY)
NCCL, COPY, FLASHINFER = Arm("serial nccl", FAMILY), Arm("serial copy", FAMILY), Arm("flashinfer", FAMILY)
SERIAL_ARMS, FUSED_ARMS = (NCCL, COPY, FLASHINFER), (SENDER, FUSED, OWN_FIRST, BY_OWNER)


@dataclass(frozen=True)
class Floor:
    """What neither path beats, microseconds: operations at the matrix rate, bytes that leave a rank at the drain rate."""

    matrix_us: float
    link_us: float

    @property
    def floor_us(self) -> float:
        return max(self.matrix_us, self.link_us)

    @property
    def bound(self) -> str:
        return "matrix" if self.matrix_us >= self.link_us else "link"


def operations(workload: AttentionWorkload) -> float:
    """Multiplications and additions of QK^T and PV on one rank."""
    return 4.0 * workload.seq_len**2 * workload.head_dim * workload.heads_per_rank * workload.batch


def physical_floor(workload: AttentionWorkload, platform: PlatformModel, bf16_tflops: float) -> Floor:
    """Floor of one rank, at the matrix rate measured beside the arms and the platform's drain rate."""
    return Floor(operations(workload) / bf16_tflops / 1e6, float(platform.drain_us(workload.remote_bytes)))


def qloop_us_per_kv_tile(attention_us: float, workload: AttentionWorkload, num_sms: int) -> float:
    """sigma of equation 20 from a measured call: its time over the Q-loops that one SM runs, and their KV tiles."""
    waves = -(-workload.output_tiles // num_sms)
    return attention_us / (waves * workload.kv_tiles)


def prediction(platform: PlatformModel, workload: AttentionWorkload, attention_us: float) -> dict[str, Any]:
    """Equations 18 to 20 with sigma from the measured attention: the residual to stand beside the measured one."""
    sigma = qloop_us_per_kv_tile(attention_us, workload, platform.device.num_sms)
    decision = advise_attention(platform, workload, qloop_us_per_kv_tile=sigma)
    numbers = {
        "qloop_us_per_kv_tile": sigma,
        "qloop_gap_us": decision.qloop_gap_us,
        "recovery_gap_us": decision.recovery_gap_us,
        "residual_us": decision.residual_us,
        "issue_us": decision.issue_us,
        "completion_coupled_residual_us": decision.completion_coupled_residual_us,
        "serial_exchange_us": decision.serial_exchange_us,
    }
    bounds = {"rate_bound_holds": decision.rate_bound_holds, "capacity_bound_holds": decision.capacity_bound_holds}
    rounded = {key: harness.rounded(value) for key, value in numbers.items()}
    return rounded | bounds | {"min_seq_len": decision.min_seq_len, "reason": decision.reason}


def auto_arm(platform: PlatformModel, workload: AttentionWorkload) -> str:
    """The arm that the package's ``auto`` runs, which knows the platform and no measured time."""
    heads = workload.heads_per_rank * workload.ranks
    layout = UlyssesLayout.even(workload.seq_len, heads, workload.head_dim, workload.ranks)
    choice = choose_mode(layout, AUTO, platform, platform.device.arch)
    return FUSED.name if choice.mode == FUSED_MODE else COPY.name


def paired_residuals_us(samples: Sequence[float], attention: Sequence[float]) -> list[float]:
    """One residual per A B B A pair of trials, in which a linear drift of the clock cancels."""
    over = np.subtract(samples, attention)
    return [float(value) for value in over[: over.size // 2 * 2].reshape(-1, 2).mean(axis=1)]


def case_rows(
    arms: Sequence[Arm],
    samples: Mapping[str, Sequence[Sample]],
    failures: Mapping[str, Sequence[str]],
    floor_us: float,
) -> tuple[list[dict[str, Any]], str | None]:
    """The arms' rows and the name of the baseline, the fastest serial arm (at one clock) that passed its checks.

    Rows hold what :func:`harness.arm_row` gives as timed, ``sm_mhz`` of every sample, and where attention alone passed its
    check too: ``at_clock_us`` (median at attention's clock), ``speedup_at_clock``, ``residual_us`` with its p10 and p90, and
    for fused arms ``hiding_nccl`` and ``hiding_copy``.
    """
    sound = {arm.name for arm in arms if not failures[arm.name] and samples[arm.name]}
    timed = {name: [timed_us(sample) for sample in found] for name, found in samples.items()}
    reference = samples[ATTENTION.name] if ATTENTION.name in sound else next((samples[name] for name in sound), None)
    level = {name: at_clock_us(samples[name], median_mhz(reference)) for name in sound} if reference else {}
    serial = [arm.name for arm in SERIAL_ARMS if arm.name in sound]
    best = min(serial, key=lambda name: float(np.median(level[name])), default=None)
    baseline = timed[best] if best else []
    rows = [harness.arm_row(arm, timed[arm.name], baseline, floor_us, failures[arm.name]) for arm in arms]
    for row in rows:
        row["sm_mhz"] = [round(median_mhz([sample])) for sample in samples[row["name"]]]
    if ATTENTION.name not in sound:
        return rows, best
    alone = float(np.median(level[ATTENTION.name]))
    residuals = {name: paired_residuals_us(level[name], level[ATTENTION.name]) for name in sound - {ATTENTION.name}}
    for row in rows:
        if row["name"] not in sound:
            continue
        middle = float(np.median(level[row["name"]]))
        row["at_clock_us"] = harness.rounded(middle)
        if best:
            row["speedup_at_clock"] = harness.rounded(float(np.median(level[best])) / middle)
        if row["name"] not in residuals:
            continue
        over = residuals[row["name"]]
        levels = {"residual_us": 0.5, "residual_p10_us": 0.1, "residual_p90_us": 0.9}
        row |= {key: harness.rounded(float(np.quantile(over, share))) for key, share in levels.items()}
        if row["name"] in {arm.name for arm in FUSED_ARMS}:
            row |= {f"hiding_{arm.name.split()[1]}": _hiding(over, residuals.get(arm.name), alone) for arm in (NCCL, COPY)}
    return rows, best


def _hiding(fused: Sequence[float], serial: Sequence[float] | None, alone_us: float) -> float | None:
    """Equation 21 over residuals; None where the serial arm failed or cost nothing over attention."""
    if serial is None:
        return None
    ratio = hiding_ratio(alone_us + float(np.median(fused)), alone_us, alone_us + float(np.median(serial)))
    return None if math.isnan(ratio) else harness.rounded(ratio)


def floor_document(floor: Floor) -> dict[str, Any]:
    numbers = {key: harness.rounded(value) for key, value in asdict(floor).items()}
    return numbers | {"floor_us": harness.rounded(floor.floor_us), "bound": floor.bound}
