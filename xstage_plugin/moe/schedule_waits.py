"""What the instances of MegaMoE wait for under a given order of tiles: a simulation of the dependencies alone.

Every instance has two roles. The loader takes the tiles in order; it waits until the tile's input is there (Linear-1: the
row's tokens have arrived; Linear-2: all Linear-1 tiles of the row are done) and then loads it. The math role takes the loaded
tiles in order, each for its own time. The loader may turn to a tile at most ``depth`` places ahead of the math role.

Links, caches and the store span of Combine are not in it. Tiles begin in the order of time, so a cost that depends on what
other instances did before can be added where a tile begins.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xstage_plugin.checks import LARGEST_COUNT, not_negative, positive
from xstage_plugin.errors import InvalidInputError, XStageError
from xstage_plugin.moe.schedule_text import Phase, whole_number

MOST_BLOCKED_SHOWN = 4


@dataclass(frozen=True)
class BlockedTile:
    """A Linear-2 tile whose row never gets complete.

    Attributes:
        instance, position: whose tile it is, and its place in that instance's order.
        row: row of the tile, over all experts.
        num_done: Linear-1 tiles of the row that are done.
        owed_by: instances whose order still holds Linear-1 tiles of the row; none where no order ever held them.
    """

    instance: int
    position: int
    row: int
    num_done: int
    owed_by: tuple[int, ...]


class DeadlockError(XStageError):
    """No instance can go on. ``blocked`` holds one tile for each instance that is not through."""

    def __init__(self, blocked: Sequence[BlockedTile], l1_tiles: int) -> None:
        self.blocked = tuple(blocked)
        lines = [
            f"instance {tile.instance} waits at its tile {tile.position} for row {tile.row} "
            f"({tile.num_done} of {l1_tiles} Linear-1 tiles done, {_owed(tile.owed_by)})"
            for tile in self.blocked[:MOST_BLOCKED_SHOWN]
        ]
        if more := len(self.blocked) - len(lines):
            lines.append(f"{more} more")
        super().__init__(f"the order of tiles deadlocks: {'; '.join(lines)}")


@dataclass(frozen=True)
class SimulatedRun:
    """When every tile ran, microseconds from the start.

    Attributes:
        begin_us, finish_us: of the math role, one array an instance, in its order.
        l1_wait_us, l2_wait_us: how long the math role of each instance stood idle before tiles of that phase.
    """

    begin_us: tuple[npt.NDArray[np.float64], ...]
    finish_us: tuple[npt.NDArray[np.float64], ...]
    l1_wait_us: npt.NDArray[np.float64]
    l2_wait_us: npt.NDArray[np.float64]

    @property
    def wait_us(self) -> npt.NDArray[np.float64]:
        """Idle time of each instance between its start and its last tile."""
        return self.l1_wait_us + self.l2_wait_us

    @property
    def total_us(self) -> float:
        """When the last tile is done; 0 for no tiles."""
        return max((float(finish[-1]) for finish in self.finish_us if finish.size), default=0.0)


def simulate(
    orders: Sequence[npt.ArrayLike],
    l1_tiles: int,
    l1_us: float,
    l2_us: float,
    arrival_us: float | Sequence[float] | npt.NDArray[np.float64] = 0.0,
    depth: int = 1,
    load_us: float = 0.0,
    slowness: float | Sequence[float | npt.ArrayLike] = 1.0,
) -> SimulatedRun:
    """Runs the instances of ``orders`` until all are through.

    Args:
        orders: tiles of each instance, as ``tiles_of_instance`` or ``CompiledSchedule.orders`` give them.
        l1_tiles: Linear-1 tiles of a row, all of which its Linear-2 tiles need.
        l1_us, l2_us: time of the math role for a tile.
        arrival_us: when the tokens of each row are there; one number for all rows, or one for each.
        depth: places that the loader may be ahead of the math role; 0 where one role does both.
        load_us: time of the loader for a tile whose input is there.
        slowness: factor on the math role's times; one number for all, one for each instance, or one for each of its tiles.

    Raises:
        InvalidInputError: a value is out of its range, or there is not one for each row, instance or tile.
        DeadlockError: the instances wait for each other, or for a Linear-1 tile that is in no order.
    """
    whole_number("l1_tiles", l1_tiles, 1, LARGEST_COUNT)
    whole_number("depth", depth, 0, LARGEST_COUNT)
    not_negative("load_us", load_us)
    tiles = [_tiles(instance, order) for instance, order in enumerate(orders)]
    num_rows = max((int(order[:, 2].max()) + 1 for order in tiles if order.size), default=0)
    arrival = _each("arrival_us", arrival_us, num_rows, least=0.0).tolist()
    tile_us = _tile_times(tiles, positive("l1_us", l1_us), positive("l2_us", l2_us), slowness)

    is_l1 = [(order[:, 0] == Phase.LINEAR1).tolist() for order in tiles]
    rows = [order[:, 2].tolist() for order in tiles]
    begin: list[list[float]] = [[] for _ in tiles]
    finish: list[list[float]] = [[] for _ in tiles]
    loaded = [0.0] * len(tiles)  # when each loader was done with the tile before
    owed = [l1_tiles] * num_rows  # Linear-1 tiles of each row that are not done
    complete = [0.0] * num_rows
    parked: defaultdict[int, list[int]] = defaultdict(list)  # by row: instances whose loader waits for it
    queue: list[tuple[float, int]] = []  # begin of each instance's next tile

    def load_next(instance: int) -> None:
        done = finish[instance]
        place = len(done)
        if place == len(rows[instance]):
            return
        row = rows[instance][place]
        if is_l1[instance][place]:
            ready = arrival[row]
        elif owed[row] > 0:
            parked[row].append(instance)
            return
        else:
            ready = complete[row]
        slot = done[place - 1 - depth] if place > depth else 0.0
        loaded[instance] = max(ready, slot, loaded[instance]) + load_us
        heapq.heappush(queue, (max(loaded[instance], done[-1] if done else 0.0), instance))

    for instance in range(len(tiles)):
        load_next(instance)
    while queue:
        now, instance = heapq.heappop(queue)
        place = len(finish[instance])
        end = now + tile_us[instance][place]
        begin[instance].append(now)
        finish[instance].append(end)
        load_next(instance)
        if is_l1[instance][place]:
            row = rows[instance][place]
            owed[row] -= 1
            complete[row] = max(complete[row], end)
            if owed[row] == 0:
                for waiting in parked.pop(row, ()):
                    load_next(waiting)
    if parked:
        blocked = [
            BlockedTile(waiting, len(finish[waiting]), row, l1_tiles - owed[row], _owing(tiles, finish, row))
            for row, instances in parked.items()
            for waiting in instances
        ]
        raise DeadlockError(sorted(blocked, key=lambda tile: tile.instance), l1_tiles)
    return _result(tiles, begin, finish)


def _result(tiles: Sequence[npt.NDArray[np.int64]], begin: list[list[float]], finish: list[list[float]]) -> SimulatedRun:
    begins = tuple(np.array(times, dtype=np.float64) for times in begin)
    finishes = tuple(np.array(times, dtype=np.float64) for times in finish)
    waits = [start - np.concatenate([[0.0], end])[: start.size] for start, end in zip(begins, finishes, strict=True)]
    by_phase = [
        np.array([wait[order[:, 0] == phase].sum() for wait, order in zip(waits, tiles, strict=True)], dtype=np.float64)
        for phase in Phase
    ]
    return SimulatedRun(begins, finishes, by_phase[0], by_phase[1])


def _tiles(instance: int, order: npt.ArrayLike) -> npt.NDArray[np.int64]:
    tiles = np.asarray(order, dtype=np.int64)
    if tiles.size == 0:
        return np.empty((0, 5), dtype=np.int64)
    if tiles.ndim != 2 or tiles.shape[1] != 5 or not np.isin(tiles[:, 0], list(Phase)).all() or tiles.min() < 0:
        raise InvalidInputError(f"order of instance {instance}: not a list of tiles (phase, expert, row, m_block, n_block)")
    return tiles


def _tile_times(
    tiles: Sequence[npt.NDArray[np.int64]], l1_us: float, l2_us: float, slowness: float | Sequence[float | npt.ArrayLike]
) -> list[list[float]]:
    factors = [slowness] * len(tiles) if isinstance(slowness, (int, float)) else list(slowness)
    if len(factors) != len(tiles):
        raise InvalidInputError(f"slowness: {len(factors)} values; expected one for each of {len(tiles)} instances")
    return [
        (np.where(order[:, 0] == Phase.LINEAR1, l1_us, l2_us) * _each("slowness", factor, len(order), least=1e-9)).tolist()
        for order, factor in zip(tiles, factors, strict=True)
    ]


def _each(name: str, value: npt.ArrayLike, count: int, least: float) -> npt.NDArray[np.float64]:
    """``value`` as ``count`` finite numbers of at least ``least``."""
    numbers = np.asarray(value, dtype=np.float64)
    if numbers.ndim > 1 or (numbers.ndim == 1 and numbers.size != count):
        raise InvalidInputError(f"{name}: {numbers.size} values; expected one, or {count}")
    if not (np.isfinite(numbers) & (numbers >= least)).all():
        raise InvalidInputError(f"{name}: holds a value that is not a finite number of at least {least:g}")
    return np.broadcast_to(numbers, count)


def _owing(tiles: Sequence[npt.NDArray[np.int64]], finish: list[list[float]], row: int) -> tuple[int, ...]:
    """Instances whose order still holds Linear-1 tiles of ``row``."""
    rest = [order[len(done) :] for order, done in zip(tiles, finish, strict=True)]
    return tuple(
        instance for instance, order in enumerate(rest) if ((order[:, 0] == Phase.LINEAR1) & (order[:, 2] == row)).any()
    )


def _owed(instances: tuple[int, ...]) -> str:
    if not instances:
        return "the rest in no order"
    shown = ", ".join(map(str, instances[:MOST_BLOCKED_SHOWN])) + (", ..." if len(instances) > MOST_BLOCKED_SHOWN else "")
    return f"the rest owed by instance {shown}"
