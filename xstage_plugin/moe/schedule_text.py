"""The order of MegaMoE's tiles as Python text, for readers and for machines without a compiler.

The order that runs is ``deep_gemm/xstage/moe_schedule.hpp``; the tests hold this text against it tile by tile.

A row is an m-block of one local expert; rows are numbered over all experts, in expert order. A row has ``l1_tiles`` tiles of
Linear-1 and ``l2_tiles`` of Linear-2; tile ``k`` of a stream is tile ``k % tiles`` of row ``k // tiles``. An instance is a CTA.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

from xstage_plugin.checks import shown
from xstage_plugin.errors import InvalidInputError

# The word that carries the schedule to the kernel has 16 bits for the lead.
LARGEST_LEAD = 2**16 - 1
# Cursors have 32 bits.
MOST_TILES = 2**32 - 1


class Phase(IntEnum):
    LINEAR1 = 1
    LINEAR2 = 2


class Tile(NamedTuple):
    """One tile: its expert (local), its row over all experts and within the expert (``m_block``), its place in the row."""

    phase: Phase
    expert: int
    row: int
    m_block: int
    n_block: int


def tiles_of_instance(
    rows_per_expert: Sequence[int],
    instance: int,
    num_instances: int,
    l1_tiles: int,
    l2_tiles: int,
    lead: int,
    experts_per_wave: int,
) -> Iterator[Tile]:
    """The tiles that ``instance`` of ``num_instances`` visits, in order.

    Args:
        rows_per_expert: m-blocks of each local expert; 0 for one without tokens.
        l1_tiles, l2_tiles: tiles of a row.
        lead: rows by which Linear-1 runs ahead of Linear-2 (D of Algorithm 1); 0 for the expert wave.
        experts_per_wave: divides the number of experts; only the expert wave looks at it.

    Raises:
        InvalidInputError: a value is out of its range, or there are more tiles than a cursor of 32 bits can count.
    """
    rows = check_schedule(rows_per_expert, instance, num_instances, l1_tiles, l2_tiles, lead, experts_per_wave)
    if lead == 0:
        return _wave(rows, instance, num_instances, l1_tiles, l2_tiles, experts_per_wave)
    return _interleaved(rows, instance, num_instances, l1_tiles, l2_tiles, lead)


def _interleaved(rows: list[int], instance: int, num_instances: int, l1_tiles: int, l2_tiles: int, lead: int) -> Iterator[Tile]:
    """Algorithm 1 of the paper."""
    places = _places(rows)
    l1_end, l2_end = len(places) * l1_tiles, len(places) * l2_tiles
    l1 = l2 = instance
    while l1 < l1_end or l2 < l2_end:
        if l2 < l2_end and (l1 >= l1_end or l2 // l2_tiles + lead <= l1 // l1_tiles):
            yield _tile(Phase.LINEAR2, places, *divmod(l2, l2_tiles))
            l2 += num_instances
        else:
            yield _tile(Phase.LINEAR1, places, *divmod(l1, l1_tiles))
            l1 += num_instances


def _wave(rows: list[int], instance: int, num_instances: int, l1_tiles: int, l2_tiles: int, wave: int) -> Iterator[Tile]:
    """The original order: one list, Linear-1 and then Linear-2 of each wave, dealt to the instances in turn."""
    places = _places(rows)
    ends = [sum(rows[:expert]) for expert in range(0, len(rows) + 1, wave)]
    dealt = 0
    for first_row, end_row in pairwise(ends):
        for phase, tiles in ((Phase.LINEAR1, l1_tiles), (Phase.LINEAR2, l2_tiles)):
            for k in range((instance - dealt) % num_instances, (end_row - first_row) * tiles, num_instances):
                yield _tile(phase, places, first_row + k // tiles, k % tiles)
            dealt += (end_row - first_row) * tiles


def _places(rows: list[int]) -> list[tuple[int, int]]:
    """Expert and m-block of every row."""
    return [(expert, m_block) for expert, count in enumerate(rows) for m_block in range(count)]


def _tile(phase: Phase, places: list[tuple[int, int]], row: int, n_block: int) -> Tile:
    expert, m_block = places[row]
    return Tile(phase, expert, row, m_block, n_block)


def check_schedule(
    rows_per_expert: Sequence[int],
    instance: int,
    num_instances: int,
    l1_tiles: int,
    l2_tiles: int,
    lead: int,
    experts_per_wave: int,
) -> list[int]:
    """The rows as plain numbers, once every value is in its range.

    Raises:
        InvalidInputError: as :func:`tiles_of_instance`.
    """
    rows = [whole_number(f"rows of expert {expert}", value, 0, MOST_TILES) for expert, value in enumerate(rows_per_expert)]
    if not rows:
        raise InvalidInputError("rows_per_expert is empty; expected one count for each local expert")
    whole_number("num_instances", num_instances, 1, MOST_TILES)
    whole_number("instance", instance, 0, num_instances - 1)
    whole_number("l1_tiles", l1_tiles, 1, MOST_TILES)
    whole_number("l2_tiles", l2_tiles, 1, MOST_TILES)
    whole_number("lead", lead, 0, LARGEST_LEAD)
    whole_number("experts_per_wave", experts_per_wave, 1, len(rows))
    if len(rows) % experts_per_wave:
        raise InvalidInputError(f"experts_per_wave is {experts_per_wave}; expected a divisor of the {len(rows)} experts")
    if (tiles := sum(rows) * max(l1_tiles, l2_tiles)) + num_instances > MOST_TILES:
        raise InvalidInputError(f"{tiles} tiles for {num_instances} instances; expected at most {MOST_TILES} together")
    return rows


def whole_number(name: str, value: int, least: int, most: int) -> int:
    """``value``, also one of numpy's, as a plain number. Raises InvalidInputError unless it is from ``least`` to ``most``."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if not least <= number <= most:
        raise InvalidInputError(f"{name} is {shown(value)}; expected a whole number from {least} to {most}")
    return number
