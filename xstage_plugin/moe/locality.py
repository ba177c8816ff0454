"""What speaks against interleaving: weights and activations of both layers in flight at once, against the L2 cache."""

from __future__ import annotations

from dataclasses import dataclass

from xstage_plugin.burst_gap.device import DeviceSpec
from xstage_plugin.burst_gap.units import MIB
from xstage_plugin.moe.tiles import TileConfig
from xstage_plugin.moe.workload import MoeWorkload, RankLoad

# Time lost where the working set no longer fits: the worst that was seen is 0.94x in the paper (section 5.2.1) and
# 0.95x on two H200s (benchmarks/results/moe_interleave_prototype_h200_pair.json). An estimate, and stated as one.
LOCALITY_PENALTY = 0.06


@dataclass(frozen=True)
class Locality:
    """Bytes that the SMs reread while they run, under both schedules, and what that costs.

    Attributes:
        working_set_wave_bytes: weights of the experts and inputs of the rows in flight, of the larger of the two layers.
        working_set_interleaved_bytes: those of both layers, and the activations between the two streams.
        l2_bytes: the cache they have to fit.
        cost: estimated share of time lost to interleaving (0 or LOCALITY_PENALTY).
    """

    working_set_wave_bytes: float
    working_set_interleaved_bytes: float
    l2_bytes: float
    cost: float


def locality(
    workload: MoeWorkload, tile: TileConfig, load: RankLoad, device: DeviceSpec, lead_rows: int, weight_bits: int
) -> Locality:
    """Working sets of the busiest rank. A stream keeps num_sms tiles in flight, so the weights of as many experts as
    those tiles' rows touch; weights have ``weight_bits``, activations between the layers 8 bits."""
    w2_bytes = workload.hidden * workload.intermediate * weight_bits / 8
    w1_bytes = 2 * w2_bytes
    l1_tiles, l2_tiles = tile.l1_tiles_per_row(workload.intermediate), tile.l2_tiles_per_row(workload.hidden)
    l1 = w1_bytes * _experts_in_flight(device, l1_tiles, load)
    l1 += _rows_in_flight(device, l1_tiles, load) * tile.block_m * workload.hidden
    l2 = w2_bytes * _experts_in_flight(device, l2_tiles, load)
    l2 += _rows_in_flight(device, l2_tiles, load) * tile.block_m * workload.intermediate
    between = min(lead_rows, load.rows) * tile.block_m * workload.intermediate
    l2_bytes = device.l2_mib * MIB
    interleaved = l1 + l2 + between
    return Locality(max(l1, l2), interleaved, l2_bytes, LOCALITY_PENALTY if interleaved > l2_bytes else 0.0)


def _experts_in_flight(device: DeviceSpec, tiles_per_row: int, load: RankLoad) -> float:
    if not load.rows:
        return 0.0
    rows_per_expert = load.rows / load.active_experts
    return min(load.active_experts, _rows_in_flight(device, tiles_per_row, load) / rows_per_expert + 1)


def _rows_in_flight(device: DeviceSpec, tiles_per_row: int, load: RankLoad) -> float:
    return min(load.rows, device.num_sms / tiles_per_row)
