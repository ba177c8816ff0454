"""What the samples of one attention-and-projection case say. Pure, no GPU.

Counting: speedups are over the stock kernel with its closing barrier and the projection behind it, the same path without flags.
Differences are paired as in ulysses_figures.py: both arms at one clock, the mean of each over an A B B A pair of trials,
subtracted, and the median over the pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import harness
import numpy as np
from clocked import Sample, at_clock_us, median_mhz, timed_us
from harness import Arm
from ulysses_figures import Floor, paired_residuals_us, physical_floor

from xstage_plugin.attention.workload import AttentionWorkload
from xstage_plugin.burst_gap.platform_model import PlatformModel

FAMILY = "projection"
ATTENTION, LAUNCHED = Arm("attention", FAMILY), Arm("attention as launched", FAMILY)
SILENT, FLAGGED = Arm("arriving as launched", FAMILY), Arm("arriving as launched, flags", FAMILY)
PROJECTION = Arm("projection", FAMILY)
NCCL, COPY = Arm("serial nccl", FAMILY), Arm("serial copy", FAMILY)
FUSED, ARRIVING = Arm("fused, barrier", FAMILY), Arm("arriving, barrier", FAMILY)
FLAGS = {1: Arm("flags, kernel waits", FAMILY), 2: Arm("flags, 2 parts", FAMILY), 4: Arm("flags, 4 parts", FAMILY)}
BY_OWNER = Arm("flags, kernel waits, by owner", FAMILY)
ALONE, SERIAL, STREAMED = (ATTENTION, LAUNCHED, SILENT, FLAGGED, PROJECTION), (NCCL, COPY), (*FLAGS.values(), BY_OWNER)
ARMS = (*ALONE, *SERIAL, FUSED, ARRIVING, *STREAMED)


def projection_operations(workload: AttentionWorkload) -> float:
    """Multiplications and additions of one rank's rows times a square weight of the model's width."""
    width = workload.heads_per_rank * workload.ranks * workload.head_dim
    return 2.0 * workload.batch * workload.seq_len / workload.ranks * width**2


def floor_of(workload: AttentionWorkload, platform: PlatformModel, bf16_tflops: float) -> Floor:
    """As :func:`ulysses_figures.physical_floor`, with the projection's operations."""
    attention = physical_floor(workload, platform, bf16_tflops)
    return Floor(attention.matrix_us + projection_operations(workload) / bf16_tflops / 1e6, attention.link_us)


def case_rows(
    arms: Sequence[Arm],
    samples: Mapping[str, Sequence[Sample]],
    failures: Mapping[str, Sequence[str]],
    floor_us: float,
) -> list[dict[str, Any]]:
    """The arms' rows.

    Rows hold what :func:`harness.arm_row` gives as timed, ``sm_mhz`` of every sample, ``at_clock_us`` (median at attention's
    clock) and ``speedup_at_clock``. Complete arms have ``over_serial`` too, the speedup over the faster serial arm at one
    clock; arms with flags ``over_fused_us``, their difference to the baseline, with its p10 and p90.
    """
    sound = {arm.name for arm in arms if not failures[arm.name] and samples[arm.name]}
    timed = {name: [timed_us(sample) for sample in found] for name, found in samples.items()}
    level = levels(samples, sound)
    baseline = timed[FUSED.name] if FUSED.name in sound else []
    middle = {name: float(np.median(values)) for name, values in level.items()}
    serial = min((middle[arm.name] for arm in SERIAL if arm.name in sound), default=None)
    rows = [harness.arm_row(arm, timed[arm.name], baseline, floor_us, failures[arm.name]) for arm in arms]
    for arm, row in zip(arms, rows, strict=True):
        row["sm_mhz"] = [round(median_mhz([sample])) for sample in samples[arm.name]]
        if arm.name not in sound:
            continue
        row["at_clock_us"] = harness.rounded(middle[arm.name])
        if serial and arm not in ALONE:
            row["over_serial"] = harness.rounded(serial / middle[arm.name])
        if FUSED.name not in sound:
            continue
        row["speedup_at_clock"] = harness.rounded(middle[FUSED.name] / middle[arm.name])
        if arm in STREAMED:
            row |= difference("over_fused", level[arm.name], level[FUSED.name])
    return rows


def flag_cost(samples: Mapping[str, Sequence[Sample]], failures: Mapping[str, Sequence[str]]) -> dict[str, Any] | None:
    """What raising the counters costs the announcing kernel, over local memory; None where a check failed.

    ``cost_us`` with p10 and p90, and ``share`` of the kernel without counters.
    """
    both = (SILENT.name, FLAGGED.name)
    if any(failures[name] or not samples[name] for name in both):
        return None
    level = levels(samples, set(both))
    found = difference("cost", level[FLAGGED.name], level[SILENT.name])
    return found | {"share": harness.rounded(found["cost_us"] / float(np.median(level[SILENT.name])))}


def levels(samples: Mapping[str, Sequence[Sample]], sound: set[str]) -> dict[str, list[float]]:
    """The samples of ``sound`` arms at one clock: attention's where it is among them, else that of all of them."""
    if not sound:
        return {}
    reference = samples[ATTENTION.name] if ATTENTION.name in sound else [one for name in sorted(sound) for one in samples[name]]
    mhz = median_mhz(reference)
    return {name: at_clock_us(samples[name], mhz) for name in sound}


def difference(name: str, samples: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Median, p10 and p90 of the paired differences, microseconds."""
    over = paired_residuals_us(samples, others)
    shares = {f"{name}_us": 0.5, f"{name}_p10_us": 0.1, f"{name}_p90_us": 0.9}
    return {key: harness.rounded(float(np.quantile(over, share))) for key, share in shares.items()}
