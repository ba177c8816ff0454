"""The order of tiles in units, with a tail by ticket: what the kernel's table, its pairs and its ring rest on."""

import ctypes
import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moe.compiled_header import compile_header

UNIT_ROWS = 8
EXPERTS = 5
TILES = [(4, 16), (8, 2), (2, 6)]
TEMPLATES = [(*tiles, inner) for tiles in TILES for inner in (0, 1)]
PHASE, EXPERT, ROW_OFFSET, M_BLOCK, N_BLOCK, PAIRED = range(6)
LINEAR1, LINEAR2 = 1, 2
SOURCE = """
#include <initializer_list>
#include <deep_gemm/xstage/moe_unit_schedule.hpp>
namespace {
void put(uint32_t*& out, const xstage::UnitTile& unit) {
    const auto& tile = unit.tile;
    for (uint32_t value : {uint32_t(tile.phase), tile.expert_idx, tile.row_offset, tile.m_block_idx, tile.n_block_idx,
                           uint32_t(unit.is_paired)}) *out++ = value;
}
// The tiles of one instance and then the whole tail as this instance sees it; the number of the former.
template <typename Schedule>
uint32_t list_tiles(const uint32_t* counts, uint32_t instance, uint32_t num_instances, uint32_t lag, uint32_t* out) {
    const auto rows = [&](uint32_t expert) { return counts[expert]; };
    Schedule schedule;
    schedule.start(rows, instance, lag);
    uint32_t num_static = 0;
    for (auto tile = schedule.next(rows, num_instances); tile.tile.phase != xstage::Phase::None; ++ num_static) {
        put(out, tile);
        tile = schedule.next(rows, num_instances);
    }
    for (uint32_t position = 0;; ++ position) {
        const auto tile = schedule.next_of_tail(rows, position);
        put(out, tile);
        if (tile.tile.phase == xstage::Phase::None) return num_static;
    }
}
}
extern "C" uint32_t lag_of_lead(uint32_t lead, uint32_t unit, uint32_t most) { return xstage::lag_of_lead(lead, unit, most); }
#define ENTRY(l1, l2, inner) \\
    extern "C" uint32_t list_##l1##_##l2##_##inner(const uint32_t* counts, uint32_t instance, uint32_t num, uint32_t lag, \\
                                                   uint32_t* out) { \\
        return list_tiles<xstage::MoeUnitSchedule<l1, l2, EXPERTS, UNIT_ROWS, inner != 0>>(counts, instance, num, lag, out); \\
    }
"""


@dataclass(frozen=True)
class Case:
    l1_tiles: int
    l2_tiles: int
    rows_inner: int
    counts: tuple
    num_instances: int
    lag: int

    @property
    def num_tiles(self):
        return sum(self.counts) * (self.l1_tiles + self.l2_tiles)


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    entries = "".join(f"ENTRY({l1}, {l2}, {inner})\n" for l1, l2, inner in TEMPLATES)
    source = f"#define EXPERTS {EXPERTS}\n#define UNIT_ROWS {UNIT_ROWS}\n{SOURCE}{entries}"
    return compile_header(source, tmp_path_factory.mktemp("units"))


@pytest.fixture(scope="session")
def listed(library):
    """case -> (static tiles of every instance, the tail), where every instance must see the same tail."""

    def call(case):
        counts = np.array(case.counts, dtype=np.uint32)
        function = library[f"list_{case.l1_tiles}_{case.l2_tiles}_{case.rows_inner}"]
        static, tails = [], []
        for instance in range(case.num_instances):
            out = np.zeros((case.num_tiles + 1, 6), dtype=np.uint32)
            pointers = [ctypes.c_void_p(counts.ctypes.data), instance, case.num_instances, case.lag]
            num = function(*pointers, ctypes.c_void_p(out.ctypes.data))
            tail = out[num:]
            static.append(out[:num].tolist())
            tails.append(tail[: int(np.argmin(tail[:, PHASE]))].tolist())
        assert all(tail == tails[0] for tail in tails)
        return static, tails[0]

    return call


@st.composite
def cases(draw):
    counts = draw(st.lists(st.integers(0, 20), min_size=EXPERTS, max_size=EXPERTS) | st.just([0] * EXPERTS))
    template = draw(st.sampled_from(TEMPLATES))
    return Case(*template, tuple(counts), 2 * draw(st.integers(1, 9)), draw(st.integers(0, 4)))


def chunks(case):
    """The one sequence, from its description: lists of (phase, expert, row offset, m, n, paired), and where the tail begins."""
    units = []
    for expert, count in enumerate(case.counts):
        units += [(expert, first, min(UNIT_ROWS, count - first)) for first in range(0, count, UNIT_ROWS)]
    order = []
    for k in range(len(units)):
        order.append((LINEAR1, k))
        if k >= case.lag and k + 1 < len(units):
            order.append((LINEAR2, k - case.lag))
    done = sum(phase == LINEAR2 for phase, _ in order)
    tail = [(LINEAR2, k) for k in range(done, len(units))]

    def tiles(phase, k):
        expert, first, height = units[k]
        width = case.l1_tiles if phase == LINEAR1 else case.l2_tiles
        offset = sum(case.counts[:expert])
        if not case.rows_inner:
            return [[phase, expert, offset, first + m, n, 0] for m in range(height) for n in range(width)]
        places = [(m, n) for n in range(width) for m in range(height)]
        pairs = [places[at : at + 2] for at in range(0, len(places), 2)]
        return [[phase, expert, offset, first + m, n, int(p[0][1] == p[1][1])] for p in pairs for m, n in p]

    return [tiles(*chunk) for chunk in order], [tiles(*chunk) for chunk in tail]


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def row(tile):
    return tile[ROW_OFFSET] + tile[M_BLOCK]


@given(cases())
def test_all_instances_deal_one_sequence_and_leave_its_end_to_the_tickets(listed, case):
    static, tail = listed(case)
    expected, expected_tail = map(flat, chunks(case))
    assert static == [expected[instance :: case.num_instances] for instance in range(case.num_instances)]
    assert tail == expected_tail


@given(cases())
def test_every_tile_comes_exactly_once(listed, case):
    static, tail = listed(case)
    got = [(tile[PHASE], tile[EXPERT], tile[M_BLOCK], tile[N_BLOCK]) for tile in flat(static) + tail]
    widths = {LINEAR1: case.l1_tiles, LINEAR2: case.l2_tiles}
    expected = {
        (phase, expert, m, n)
        for expert, count in enumerate(case.counts)
        for m in range(count)
        for phase, width in widths.items()
        for n in range(width)
    }
    assert len(got) == len(expected)
    assert set(got) == expected


def dealt(static, tail):
    """The sequence as it is dealt: first tiles of all instances, second tiles, ..., and the tail."""
    rounds = itertools.zip_longest(*static)
    return [tile for tiles in rounds for tile in tiles if tile is not None] + tail


@given(cases(), st.integers(0, 3))
def test_whatever_a_tile_waits_for_stands_before_it(listed, case, spare_rows):
    """Also for the place in a ring of lag + 1 units, and any larger one."""
    ring = UNIT_ROWS * (case.lag + 1) + spare_rows
    left = {LINEAR1: [case.l1_tiles] * sum(case.counts), LINEAR2: [case.l2_tiles] * sum(case.counts)}
    for tile in dealt(*listed(case)):
        if tile[PHASE] == LINEAR2:
            assert left[LINEAR1][row(tile)] == 0
        elif row(tile) >= ring:
            assert left[LINEAR2][row(tile) - ring] == 0
        left[tile[PHASE]][row(tile)] -= 1


def test_a_ring_of_fewer_units_would_not_do(listed):
    case = Case(4, 16, 1, (40, 0, 0, 0, 0), 4, 2)
    ring = UNIT_ROWS * (case.lag + 1) - 1
    left = [case.l2_tiles] * sum(case.counts)
    waits = []
    for tile in dealt(*listed(case)):
        if tile[PHASE] == LINEAR2:
            left[row(tile)] -= 1
        elif row(tile) >= ring:
            waits.append(left[row(tile) - ring] > 0)
    assert any(waits)


@given(cases())
def test_a_pair_shares_the_weights_of_neighbouring_rows_or_both_know_that_it_does_not(listed, case):
    static, tail = listed(case)
    pairs = [pair for first, second in zip(static[::2], static[1::2], strict=True) for pair in zip(first, second, strict=True)]
    pairs += list(zip(tail[::2], tail[1::2], strict=True))
    for first, second in pairs:
        assert first[:ROW_OFFSET] == second[:ROW_OFFSET]
        same_weights = first[N_BLOCK] == second[N_BLOCK] and first[M_BLOCK] + 1 == second[M_BLOCK]
        assert first[PAIRED] == second[PAIRED] == int(bool(case.rows_inner) and same_weights)


@settings(max_examples=60)
@given(cases(), st.randoms(use_true_random=False))
def test_the_tables_hold_the_static_tiles_and_take_the_whole_tail(listed, case, random):
    """Of the size that upstream reserves for that many tiles, at any order of tickets."""
    static, tail = listed(case)
    capacity = -(-case.num_tiles // case.num_instances) + 2
    held = [len(tiles) for tiles in static[::2]]
    assert held == [len(tiles) for tiles in static[1::2]]
    assert max(held) + 2 <= capacity
    left = len(tail) // 2
    asking = list(range(len(held)))
    while asking and left:
        pair = random.choice(asking)
        if held[pair] + 1 < capacity:
            held[pair] += 1
            left -= 1
        else:
            asking.remove(pair)
    assert left == 0


@settings(max_examples=60)
@given(cases(), st.randoms(use_true_random=False), st.integers(1, 3))
def test_nothing_deadlocks_at_any_speeds_with_a_ring_that_just_holds_the_lag(listed, case, random, depth):
    """Each instance loads up to ``depth`` tiles ahead; rows arrive in order, each once the row that had its place is read."""
    static, tail = listed(case)
    ring, num_rows = UNIT_ROWS * (case.lag + 1), sum(case.counts)
    tickets = [list(pair) for pair in zip(tail[::2], tail[1::2], strict=True)]
    queues = [list(tiles) for tiles in static]
    l1_left, l2_left = [case.l1_tiles] * num_rows, [case.l2_tiles] * num_rows
    loaded = [[] for _ in queues]
    arrived = 0

    def can_load(tile):
        return row(tile) < arrived if tile[PHASE] == LINEAR1 else l1_left[row(tile)] == 0

    def can_run(tile):
        return tile[PHASE] == LINEAR2 or row(tile) < ring or l2_left[row(tile) - ring] == 0

    def moves():
        """(kind, instance) of everything that may happen next."""
        if arrived < num_rows and (arrived < ring or l1_left[arrived - ring] == 0):
            yield "arrive", 0
        for instance, queue in enumerate(queues):
            if not queue and tickets and instance % 2 == 0:
                yield "ticket", instance
            if queue and len(loaded[instance]) < depth and can_load(queue[0]):
                yield "load", instance
            if loaded[instance] and can_run(loaded[instance][0]):
                yield "run", instance

    favoured = random.randrange(len(queues))
    while possible := list(moves()):
        kind, instance = random.choice([move for move in possible if move[1] == favoured] or possible)
        if random.random() < 0.1:
            favoured = random.randrange(len(queues))
        if kind == "arrive":
            arrived += 1
        elif kind == "ticket":
            for queue, tile in zip(queues[instance : instance + 2], tickets.pop(0), strict=True):
                queue.append(tile)
        elif kind == "load":
            loaded[instance].append(queues[instance].pop(0))
        else:
            tile = loaded[instance].pop(0)
            (l1_left if tile[PHASE] == LINEAR1 else l2_left)[row(tile)] -= 1
    assert not any(l1_left)
    assert not any(l2_left)


@pytest.mark.parametrize(
    ("lead_rows", "most_units", "lag"),
    [(1, 1, 0), (8, 9, 0), (9, 9, 1), (16, 9, 1), (17, 9, 2), (72, 9, 8), (73, 9, 8), (65535, 62, 61), (65535, 9000, 8191)],
)
def test_a_lead_is_rounded_up_to_units_and_cut_at_what_may_be_under_way(library, lead_rows, most_units, lag):
    assert library.lag_of_lead(lead_rows, UNIT_ROWS, most_units) == lag
    assert (lag + 1) <= most_units
