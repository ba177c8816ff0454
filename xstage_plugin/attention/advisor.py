"""Whether output tiles should go straight to their owner, and why: section 4.3 over a platform model. Pure, no GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from xstage_plugin.attention.convergence import (
    completion_coupled_exposure_us,
    critical_path_stall_us,
    issue_backpressure_us,
    min_seq_len,
)
from xstage_plugin.attention.workload import AttentionWorkload
from xstage_plugin.burst_gap.platform_model import PlatformModel
from xstage_plugin.checks import positive
from xstage_plugin.provenance import Origin, Source

PIGGYBACK, SERIAL = "piggyback", "serial"


@dataclass(frozen=True)
class AttentionDecision:
    """An action and everything it was decided on. Times in microseconds, for one rank and one layer.

    Attributes:
        action: ``piggyback`` (tiles are stored to their owner from the epilogue) or ``serial`` (exchange afterwards).
        min_seq_len: M*_ub, tokens, for all SMs storing at once (20).
        producers: CTAs whose bursts may align, the smaller of SMs and output tiles.
        burst_bytes: V of an aligned burst, all of it remote (worst case).
        peak_outstanding_bytes: q_peak^0 (6).
        recovery_gap_us: G* (5) at ``producers``.
        qloop_gap_us: G_Qloop(M), the gap that one Q-loop supplies.
        rate_bound_holds, capacity_bound_holds: equation 10.
        residual_us: drain-induced time over attention alone, E_drain (18, 19) and what single bursts above the capacity
            wait for their own drain (7), summed over the waves of tiles, each with the tiles of it that are for other ranks.
            CTAs of a wave count as aligned; over many waves they drift apart, and the residual stays below this.
        issue_us: issue instructions without backpressure, over the same waves.
        completion_coupled_residual_us: the counterfactual without post-issue progress, E^cc (17), over the same waves.
        serial_exchange_us: the same bytes as a copy at the drain rate, the least a serial exchange can take.
        reason: one sentence.
        sources: where each group of numbers comes from.
        notes: what the reader should know of their limits.
    """

    action: str
    min_seq_len: int
    producers: int
    burst_bytes: float
    peak_outstanding_bytes: float
    recovery_gap_us: float
    qloop_gap_us: float
    rate_bound_holds: bool
    capacity_bound_holds: bool
    residual_us: float
    issue_us: float
    completion_coupled_residual_us: float
    serial_exchange_us: float
    reason: str
    sources: dict[str, str]
    notes: tuple[str, ...]


def advise_attention(
    platform: PlatformModel, workload: AttentionWorkload, *, qloop_us_per_kv_tile: float | None = None
) -> AttentionDecision:
    """Choose how the output of ``workload`` reaches its owners on ``platform``.

    Args:
        platform: the calibrated or bundled model.
        workload: lengths, heads and ranks.
        qloop_us_per_kv_tile: sigma, time of a Q-loop per KV tile; default: the paper's on its platform (scaled with the
            head dimension), otherwise estimated from operations.

    Raises:
        InvalidInputError: ``qloop_us_per_kv_tile`` is not finite and above 0.
    """
    sigma, origin = _qloop(platform, workload, qloop_us_per_kv_tile)
    num_sms = platform.device.num_sms
    # With one rank nothing is remote; a sequence shorter than a tile sends what it has.
    tile_bytes = workload.tile_bytes if workload.ranks > 1 else 0
    producers = min(num_sms, workload.output_tiles)
    gap = sigma * workload.kv_tiles
    burst_bytes = float(platform.burst_total_bytes(producers, tile_bytes))
    recovery = float(platform.recovery_gap_us(producers, tile_bytes)) if tile_bytes else 0.0
    alone = float(platform.isolated_overhead_us(producers, tile_bytes)) if tile_bytes else 0.0
    rate_ok, capacity_ok = gap >= recovery, alone == 0
    # One QK^T step is half of the work of a KV tile.
    qk = sigma / 2
    residual, issue, coupled = _over_waves(platform, workload, gap, qk)
    serial = float(platform.drain_us(workload.remote_bytes))
    least = min_seq_len(float(platform.recovery_gap_us(num_sms, workload.tile_bytes)), sigma, workload.block_n)
    action, reason = _decide(workload, gap, recovery, residual, issue, serial, rate_ok, capacity_ok)
    return AttentionDecision(
        action=action,
        min_seq_len=least,
        producers=producers,
        burst_bytes=burst_bytes,
        peak_outstanding_bytes=float(platform.peak_outstanding_bytes(producers, tile_bytes)) if tile_bytes else 0.0,
        recovery_gap_us=recovery,
        qloop_gap_us=gap,
        rate_bound_holds=rate_ok,
        capacity_bound_holds=capacity_ok,
        residual_us=residual,
        issue_us=issue,
        completion_coupled_residual_us=coupled,
        serial_exchange_us=serial,
        reason=reason,
        sources={
            "drain_rate": str(platform.drain_rate_origin),
            "issue_floor": str(platform.issue_floor.origin),
            "capacity": str(platform.capacity.origin),
            "completion_latency": str(platform.completion_latency_origin),
            "qloop": str(origin),
        },
        notes=(platform.outside(producers, tile_bytes) if tile_bytes else ()) + _platform_notes(platform, workload.ranks),
    )


def _over_waves(
    platform: PlatformModel, workload: AttentionWorkload, gap_us: float, qk_us: float
) -> tuple[float, float, float]:
    """Drain-induced stall, issue and E^cc of all waves, microseconds; the storing CTAs of a wave store at one moment."""
    stall = issue = coupled = 0.0
    for remote, waves in Counter(workload.remote_tiles_of_waves(platform.device.num_sms)).items():
        if not remote:
            continue
        floor = float(platform.issue_floor_us(remote, workload.tile_bytes))
        drain = float(platform.drain_us(platform.burst_total_bytes(remote, workload.tile_bytes)))
        alone = float(platform.isolated_overhead_us(remote, workload.tile_bytes))
        stall += waves * critical_path_stall_us(max(issue_backpressure_us(drain, gap_us, floor), alone), qk_us)
        issue += waves * floor
        coupled += waves * completion_coupled_exposure_us(drain, platform.completion_latency_us, qk_us)
    return stall, issue, coupled


def _platform_notes(platform: PlatformModel, ranks: int) -> tuple[str, ...]:
    notes: tuple[str, ...] = ()
    if platform.store != "bulk" and platform.published is None:
        notes += ("FlashAttention stores its tiles in bulk; this platform was measured with 16-byte stores",)
    if ranks > platform.num_gpus:
        notes += (f"the platform was measured on {platform.num_gpus} GPUs; {ranks} ranks store to more peers",)
    return notes


def _qloop(platform: PlatformModel, workload: AttentionWorkload, given: float | None) -> tuple[float, Origin]:
    """sigma in microseconds per KV tile of one output tile, and its source."""
    if given is not None:
        return positive("qloop_us_per_kv_tile", given), Origin(Source.GIVEN, f"{given:g} us per KV tile")
    published = platform.published
    if published is not None and (workload.block_m, workload.block_n) == (128, 128):
        sigma = published.qloop_us_per_kv_tile * workload.head_dim / published.qloop_head_dim
        scaled = "" if workload.head_dim == published.qloop_head_dim else f", scaled to head dimension {workload.head_dim}"
        source = Source.ESTIMATED if scaled else published.origin.source
        return sigma, Origin(source, f"{published.qloop_us_per_kv_tile:g} us per KV tile, {published.origin.note}{scaled}")
    operations = 4.0 * workload.block_m * workload.block_n * workload.head_dim
    device = platform.device
    sigma = operations / device.attention_flops_per_us_and_sm()
    note = (
        f"{sigma:.2f} us per KV tile, from operations at {device.attention_efficiency:.1%} of "
        f"{device.bf16_tflops:g} TFLOP/s BF16 over {device.num_sms} SMs"
    )
    return sigma, Origin(Source.ESTIMATED, note)


def _decide(
    workload: AttentionWorkload,
    gap: float,
    recovery: float,
    residual: float,
    issue: float,
    serial: float,
    rate_ok: bool,
    capacity_ok: bool,
) -> tuple[str, str]:
    if workload.ranks == 1:
        return SERIAL, "one rank: there is nothing to exchange"
    if rate_ok and capacity_ok:
        return PIGGYBACK, (
            f"a Q-loop of {gap:.3g} us is longer than the {recovery:.3g} us in which an aligned burst recovers, and the burst "
            "fits the outstanding capacity: both bounds hold"
        )
    broken = " and ".join(name for name, ok in (("the rate bound", rate_ok), ("the capacity bound", capacity_ok)) if not ok)
    fails = f"{broken} fail" if " and " in broken else f"{broken} fails"
    if residual + issue < serial:
        return PIGGYBACK, (
            f"{fails} in the worst aligned case, but the predicted cost of {residual + issue:.3g} us (residual and issue) "
            f"stays below the {serial:.3g} us that the exchange alone takes at the drain rate"
        )
    return SERIAL, (
        f"{fails}, and the predicted cost of {residual + issue:.3g} us (residual and issue) is not below the {serial:.3g} us "
        "of an exchange at the drain rate"
    )
