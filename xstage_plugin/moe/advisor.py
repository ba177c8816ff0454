"""Which MegaMoE schedule to run, and why: section 4.2 over a platform model and a workload. Pure, no GPU."""

from __future__ import annotations

from dataclasses import dataclass

from xstage_plugin.burst_gap.platform_model import PlatformModel
from xstage_plugin.errors import InvalidInputError
from xstage_plugin.moe.interleaving import (
    gap_interleaved_us,
    gap_wave_us,
    interleaving_suffices,
    l1_per_l2,
    lead_knee_rows,
    overhead_interleaved_us,
    stall_us,
)
from xstage_plugin.moe.locality import Locality, locality
from xstage_plugin.moe.tiles import TileConfig, TileTimes, tile_times
from xstage_plugin.moe.workload import MoeWorkload, RankLoad, busiest_rank

WAVE, INTERLEAVED = "wave", "interleaved"
# A predicted gain below this is inside the model's own error and does not move anybody off the stock schedule.
LEAST_GAIN = 0.01


@dataclass(frozen=True)
class ScheduleDecision:
    """A schedule and everything it was decided on. Times in microseconds per Linear-2 tile.

    Attributes:
        schedule: ``wave`` (the original) or ``interleaved``.
        lead_rows: D for Algorithm 1, None under ``wave``.
        lead_knee_rows: D_knee (16).
        producers: K_act, CTAs whose Linear-2 bursts may align.
        burst_bytes: remote bytes of one Linear-2 tile, per producer.
        drain_us: V/R of an aligned burst.
        gap_wave_us, gap_interleaved_us: natural gaps (12).
        overhead_wave_us, overhead_interleaved_us: backpressure (4, 13).
        interleaving_suffices: equation 14.
        capacity_bound_holds: second bound of equation 10, for bursts of all producers that end together.
        span_wave_us, span_interleaved_us: predicted store span of a tile.
        stall_wave_us, stall_interleaved_us: part of it that reaches the tensor cores (15).
        predicted_speedup: tile time under wave over tile time under interleaved, whatever is picked: with the locality cost,
            and with the rows of the lead as a tail that is not interleaved.
        locality: weight working sets against the L2 cache.
        load: work of the busiest rank.
        tile, times: tile shape and mainloop times used.
        reason: one sentence.
        sources: where each group of numbers comes from.
        notes: what the reader should know of their limits.
    """

    schedule: str
    lead_rows: int | None
    lead_knee_rows: int
    producers: int
    burst_bytes: float
    drain_us: float
    gap_wave_us: float
    gap_interleaved_us: float
    overhead_wave_us: float
    overhead_interleaved_us: float
    interleaving_suffices: bool
    capacity_bound_holds: bool
    span_wave_us: float
    span_interleaved_us: float
    stall_wave_us: float
    stall_interleaved_us: float
    predicted_speedup: float
    locality: Locality
    load: RankLoad
    tile: TileConfig
    times: TileTimes
    reason: str
    sources: dict[str, str]
    notes: tuple[str, ...]


def advise_moe(
    platform: PlatformModel,
    workload: MoeWorkload,
    *,
    tile: TileConfig | None = None,
    times: TileTimes | None = None,
    weight_bits: int = 8,
) -> ScheduleDecision:
    """Choose the schedule for ``workload`` on ``platform``.

    Args:
        platform: the calibrated or bundled model.
        workload: shape, ranks, tokens and routing; the busiest rank decides.
        tile: tile shape; default: upstream's for the platform's architecture.
        times: mainloop times; default: Table 2 on the paper's platform, otherwise estimated.
        weight_bits: 8 (FP8) or 4 (FP4), for the weight working set.

    Raises:
        InvalidInputError: ``weight_bits`` is neither 4 nor 8.
    """
    if weight_bits not in (4, 8):
        raise InvalidInputError(f"weight bits is {weight_bits}; expected 4 or 8")
    device = platform.device
    tile = tile or TileConfig.of_arch(device.arch)
    times = times or tile_times(platform, tile, workload.hidden, workload.intermediate, workload.model)
    load = busiest_rank(workload, tile)
    ratio = l1_per_l2(tile, workload.hidden, workload.intermediate)
    knee = lead_knee_rows(tile.block_n, device.num_sms, workload.intermediate)
    producers = max(1, min(device.num_sms, load.rows * tile.l2_tiles_per_row(workload.hidden)))
    burst_bytes = tile.combine_tile_bytes * workload.remote_fraction * load.row_fill
    drain = floor = overhead_wave = 0.0
    capacity_ok = True
    if burst_bytes > 0:
        capacity_ok = bool(platform.design_test(producers, burst_bytes, 0.0).capacity_bound_holds)
        drain = float(platform.drain_us(producers * burst_bytes))
        floor = float(platform.issue_floor_us(producers, burst_bytes))
        overhead_wave = float(platform.overhead_us(producers, burst_bytes, gap_wave_us(times.l2_mma_us)))
    overhead_int = overhead_interleaved_us(overhead_wave, times.l1_mma_us, ratio)
    span_wave, span_int = _spans(tile, times, drain, floor, overhead_wave, overhead_int, ratio)
    stall_wave, stall_int = _stalls(tile, times, span_wave, span_int, ratio)
    place = locality(workload, tile, load, device, knee, weight_bits)
    compute = ratio * times.l1_mma_us + times.l2_mma_us
    # The last rows of Linear-2, as many as the lead, have no Linear-1 left to go between them.
    tail = min(1.0, knee / load.rows) if load.rows else 1.0
    mixed = (1 - tail) * stall_int + tail * stall_wave
    speedup = (compute + stall_wave) / ((compute + mixed) * (1 + place.cost))
    case = _Case(workload, load, knee, times, ratio, drain, floor, overhead_int, stall_wave, stall_int, speedup, place, compute)
    schedule, reason = _decide(case)
    return ScheduleDecision(
        schedule=schedule,
        lead_rows=knee if schedule == INTERLEAVED else None,
        lead_knee_rows=knee,
        producers=producers,
        burst_bytes=burst_bytes,
        drain_us=drain,
        gap_wave_us=gap_wave_us(times.l2_mma_us),
        gap_interleaved_us=gap_interleaved_us(times.l2_mma_us, times.l1_mma_us, ratio),
        overhead_wave_us=overhead_wave,
        overhead_interleaved_us=overhead_int,
        interleaving_suffices=interleaving_suffices(drain, floor, times.l2_mma_us, times.l1_mma_us, ratio),
        capacity_bound_holds=capacity_ok,
        span_wave_us=span_wave,
        span_interleaved_us=span_int,
        stall_wave_us=stall_wave,
        stall_interleaved_us=stall_int,
        predicted_speedup=speedup,
        locality=place,
        load=load,
        tile=tile,
        times=times,
        reason=reason,
        sources={
            "drain_rate": str(platform.drain_rate_origin),
            "issue_floor": str(platform.issue_floor.origin),
            "capacity": str(platform.capacity.origin),
            "tile_times": str(times.origin),
            "device": str(device.origin),
            "routing": workload.routing.label,
            "locality_cost": "estimated: the worst seen, 0.94x in the paper and 0.95x on two H200s",
        },
        notes=_notes(platform, workload, tile, producers, burst_bytes, capacity_ok),
    )


def _spans(
    tile: TileConfig,
    times: TileTimes,
    drain: float,
    floor: float,
    overhead_wave: float,
    overhead_int: float,
    ratio: float,
) -> tuple[float, float]:
    """Store span T_RS of one tile under (wave, interleaved).

    A separate epilogue stores on while the mainloop runs, so its own gap under wave is zero and its span V/R when the
    path is saturated; inserted Linear-1 tiles are the only time in which it stores nothing. Math warpgroups that store
    themselves have the mainloop as their gap, and equation 3 applies as it stands.
    """
    if not drain:
        return times.staging_us, times.staging_us
    at_floor = floor + times.staging_us
    if tile.separate_epilogue:
        return max(at_floor, drain), max(at_floor, drain - ratio * times.l1_mma_us)
    return at_floor + overhead_wave, at_floor + overhead_int


def _stalls(tile: TileConfig, times: TileTimes, span_wave: float, span_int: float, ratio: float) -> tuple[float, float]:
    """Equation 15 under (wave, interleaved). Interleaved, n1/n2 of the Linear-2 tiles (at most all) are followed by a
    Linear-1 mainloop and the rest by a Linear-2 one, as section 4.2 says of mixed cycles."""
    if not tile.separate_epilogue:
        return stall_us(span_wave, 0.0), stall_us(span_int, 0.0)
    followed = min(1.0, ratio)
    interleaved = followed * stall_us(span_int, times.l1_mma_us) + (1 - followed) * stall_us(span_int, times.l2_mma_us)
    return stall_us(span_wave, times.l2_mma_us), interleaved


@dataclass(frozen=True)
class _Case:
    """What the choice rests on; times in microseconds per Linear-2 tile."""

    workload: MoeWorkload
    load: RankLoad
    knee: int
    times: TileTimes
    ratio: float
    drain: float
    floor: float
    overhead_int: float
    stall_wave: float
    stall_int: float
    speedup: float
    place: Locality
    compute: float


def _decide(case: _Case) -> tuple[str, str]:
    """The schedule and its reason in one sentence, each sentence under the condition that it states."""
    saved = case.stall_wave - case.stall_int
    l1_us, l2_us = case.ratio * case.times.l1_mma_us, case.times.l2_mma_us
    if case.workload.ranks == 1:
        return WAVE, "one rank: no Combine store leaves the GPU"
    if not case.load.rows:
        return WAVE, "no token is routed: there is nothing to order"
    if case.load.rows <= case.knee:
        return WAVE, (
            f"the busiest rank has {case.load.rows} rows, too few for a lead of {case.knee}: Linear-2 would only be a tail"
        )
    if case.drain <= case.floor + case.times.staging_us:
        return WAVE, (
            f"a burst drains in {case.drain:.2f} us, within the {case.floor + case.times.staging_us:.2f} us that a tile's "
            "stores take by themselves: the link is not what holds the tile up"
        )
    if saved <= 0:
        if case.drain <= case.floor + l2_us:
            return WAVE, (
                f"the Linear-2 mainloop of {l2_us:.1f} us and {case.floor:.1f} us of issue cover the drain of a burst, "
                f"{case.drain:.1f} us: there is no backpressure to remove"
            )
        return WAVE, f"interleaving would not shorten the stall of {case.stall_wave:.1f} us a tile ({case.stall_int:.1f} us)"
    if case.speedup < 1 + LEAST_GAIN and case.place.cost and saved >= LEAST_GAIN * case.compute:
        return WAVE, (
            f"interleaving would save {saved:.1f} us of {case.compute + case.stall_wave:.1f} us a tile, but its working set of "
            f"{case.place.working_set_interleaved_bytes / 1e6:.1f} MB exceeds the L2 cache of "
            f"{case.place.l2_bytes / 1e6:.1f} MB, which costs {case.place.cost:.0%}"
        )
    if case.speedup < 1 + LEAST_GAIN:
        # Without the locality cost: what is saved is too little already.
        gain = case.speedup * (1 + case.place.cost) - 1
        return WAVE, (
            f"interleaving would save {saved:.2f} us of {case.compute + case.stall_wave:.1f} us a tile, but not in the last "
            f"{case.knee} of {case.load.rows} rows: {gain:.1%} over all, under the {LEAST_GAIN:.0%} that is worth it"
        )
    cost = f", {case.place.cost:.0%} of locality cost included" if case.place.cost else ""
    rest = (
        f"; {case.overhead_int:.1f} us of backpressure remain, only smaller bursts would remove them (14)"
        if case.overhead_int > 0
        else ""
    )
    return INTERLEAVED, (
        f"a burst drains in {case.drain:.1f} us but Linear-2 lasts {l2_us:.1f} us; {l1_us:.1f} us of Linear-1 a tile cut the "
        f"stall from {case.stall_wave:.1f} to {case.stall_int:.1f} us ({case.speedup:.2f}x{cost}){rest}"
    )


def _notes(
    platform: PlatformModel,
    workload: MoeWorkload,
    tile: TileConfig,
    producers: int,
    burst_bytes: float,
    capacity_ok: bool,
) -> tuple[str, ...]:
    notes = platform.outside(producers, burst_bytes) if burst_bytes > 0 else ()
    if not capacity_ok:
        wait = float(platform.isolated_overhead_us(producers, burst_bytes))
        notes += (
            f"an aligned burst exceeds the capacity: if all {producers} tiles ended together, each would wait {wait:.1f} us "
            "more; persistent CTAs drift apart, and the stall above assumes that they do",
        )
    if workload.ranks > platform.num_gpus:
        notes += (f"the platform was measured on {platform.num_gpus} GPUs; {workload.ranks} ranks store to more peers",)
    tiles = tile.l2_tiles_per_row(workload.hidden)
    if tile.separate_epilogue and tiles % 2:
        notes += (f"hidden {workload.hidden} gives {tiles} Linear-2 tiles a row; the SM100 kernel takes only even numbers",)
    if platform.store == "bulk":
        notes += ("MegaMoE scatters with 16-byte stores; this platform was measured with bulk stores",)
    if workload.model == "dit-moe" and platform.published is not None:
        notes += ("the paper's tile times fit dit-moe-swapped, not dit-moe",)
    return notes
