"""The order of MegaMoE's tiles: the header against its Python text, what holds for every routing, and who waits for whom."""

import itertools
import subprocess
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xstage_plugin.errors import InvalidInputError
from xstage_plugin.moe import schedule_library
from xstage_plugin.moe.schedule_library import (
    CompilerError,
    HeaderError,
    NoCompilerError,
    ScheduleTemplate,
    compile_schedule,
    compile_schedules,
)
from xstage_plugin.moe.schedule_text import LARGEST_LEAD, Phase, Tile, tiles_of_instance
from xstage_plugin.moe.schedule_waits import DeadlockError, simulate

TILES = [(4, 16), (3, 5), (8, 2), (1, 1), (2, 32)]
WAVES = {1: (1,), 6: (1, 2, 3, 6)}
TEMPLATES = [ScheduleTemplate(*tiles, experts, wave) for tiles in TILES for experts in WAVES for wave in WAVES[experts]]
ROUTINGS = {
    "balanced": (3, 3, 3, 3, 3, 3),
    "empty experts": (0, 4, 0, 0, 1, 0),
    "one expert with everything": (0, 0, 0, 17, 0, 0),
    "one token": (0, 0, 1, 0, 0, 0),
    "no tokens": (0, 0, 0, 0, 0, 0),
    "hot and cold": (1, 0, 12, 1, 0, 2),
    "one local expert": (9,),
}
PHASE, EXPERT, ROW, M_BLOCK, N_BLOCK = range(5)


@dataclass(frozen=True)
class Case:
    template: ScheduleTemplate
    rows: tuple[int, ...]
    num_instances: int
    lead: int  # 0: expert wave

    @property
    def num_rows(self):
        return sum(self.rows)

    def tiles(self, phase):
        return self.template.l1_tiles if phase == Phase.LINEAR1 else self.template.l2_tiles


def text_orders(case):
    own = case.template
    return [
        np.array(list(tiles), dtype=np.uint32).reshape(-1, 5)
        for instance in range(case.num_instances)
        for tiles in [
            tiles_of_instance(
                case.rows, instance, case.num_instances, own.l1_tiles, own.l2_tiles, case.lead, own.experts_per_wave
            )
        ]
    ]


@pytest.fixture(scope="session")
def compiled():
    try:
        return compile_schedules(TEMPLATES)
    except NoCompilerError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session", params=["header", "text"])
def orders_of(request):
    """Orders of all instances, from the header and from the text: each statement below holds for both."""
    if request.param == "text":
        return text_orders
    compiled = request.getfixturevalue("compiled")
    return lambda case: compiled[case.template].orders(case.rows, case.num_instances, case.lead)


@st.composite
def cases(draw, waves=True, leads=True, tiles=TILES, most_instances=40, even=False):
    template = draw(st.sampled_from([template for template in TEMPLATES if (template.l1_tiles, template.l2_tiles) in tiles]))
    count = template.num_experts
    any_rows = st.lists(st.integers(0, 5), min_size=count, max_size=count)
    one_hot = st.builds(
        lambda place, rows: [rows if expert == place else 0 for expert in range(count)],
        st.integers(0, count - 1),
        st.integers(1, 30),
    )
    rows = tuple(draw(any_rows | one_hot | st.just([0] * count)))
    instances = draw(st.integers(1, most_instances)) * (2 if even else 1)
    choices = [st.just(0)] * waves + [st.integers(1, sum(rows) + 3), st.integers(1, 4), st.just(LARGEST_LEAD)] * leads
    return Case(template, rows, instances, draw(st.one_of(choices)))


every_routing = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def places(order, case, phase):
    """Where each tile of ``phase`` lies in its stream."""
    own = order[order[:, PHASE] == phase].astype(int)
    return own[:, ROW] * case.tiles(phase) + own[:, N_BLOCK]


# The header and its text


@pytest.mark.parametrize("name", ROUTINGS)
def test_the_text_is_the_header_tile_by_tile(compiled, name):
    rows = ROUTINGS[name]
    for template, num_instances in itertools.product(TEMPLATES, (1, 2, 7, 40)):
        if template.num_experts != len(rows):
            continue
        # the waves differ in lead 0 only
        leads = range(sum(rows) + 3) if template.experts_per_wave == 1 else (0, 1)
        for lead in leads:
            case = Case(template, rows, num_instances, lead)
            for header, text in zip(compiled[template].orders(rows, num_instances, lead), text_orders(case), strict=True):
                assert np.array_equal(header, text), case


@every_routing
@given(cases())
def test_the_text_is_the_header_for_any_routing(compiled, case):
    header = compiled[case.template].orders(case.rows, case.num_instances, case.lead)
    assert all(np.array_equal(*pair) for pair in zip(header, text_orders(case), strict=True))


def test_both_agree_on_the_largest_lead(compiled):
    assert {schedule.largest_lead for schedule in compiled.values()} == {LARGEST_LEAD}


# What holds for every routing, in both


@every_routing
@given(cases())
def test_every_tile_comes_exactly_once_over_all_instances(orders_of, case):
    row_places = [(expert, m_block) for expert, count in enumerate(case.rows) for m_block in range(count)]
    expected = {
        (phase, expert, row, m_block, n_block)
        for row, (expert, m_block) in enumerate(row_places)
        for phase in Phase
        for n_block in range(case.tiles(phase))
    }
    got = [tuple(tile) for order in orders_of(case) for tile in order.tolist()]
    assert len(got) == len(expected)
    assert set(got) == expected


@every_routing
@given(cases())
def test_each_stream_ascends(orders_of, case):
    for instance, order in enumerate(orders_of(case)):
        for phase in Phase:
            stream = places(order, case, phase)
            assert (np.diff(stream) > 0).all()
            if case.lead > 0:  # the wave's strides carry over from one stream to the other
                assert stream.tolist() == list(range(instance, case.num_rows * case.tiles(phase), case.num_instances))


@every_routing
@given(cases())
def test_an_instance_owes_no_linear1_tile_of_a_row_when_it_turns_to_the_rows_linear2(orders_of, case):
    """Why nothing deadlocks: whoever blocks a row is itself blocked on a lower row only, if at all."""
    for order in orders_of(case):
        is_l2 = order[:, PHASE] == Phase.LINEAR2
        rows = order[:, ROW].astype(int)
        owed = np.where(is_l2, case.num_rows, rows)
        lowest_still_owed = np.minimum.accumulate(owed[::-1])[::-1]
        assert (rows[is_l2] < lowest_still_owed[is_l2]).all()


@every_routing
@given(cases(waves=False))
def test_algorithm_1_takes_linear2_as_soon_as_the_lead_allows_and_never_before(orders_of, case):
    for order in orders_of(case):
        is_l2 = order[:, PHASE] == Phase.LINEAR2
        next_row = {}
        for phase, far in ((Phase.LINEAR1, 2 * LARGEST_LEAD), (Phase.LINEAR2, 3 * LARGEST_LEAD)):
            rows = np.where(order[:, PHASE] == phase, order[:, ROW].astype(int), far)
            next_row[phase] = np.minimum.accumulate(rows[::-1])[::-1]
        assert np.array_equal(is_l2, next_row[Phase.LINEAR2] + case.lead <= next_row[Phase.LINEAR1])


@every_routing
@given(cases(waves=False), st.integers(0, 3))
def test_a_lead_beyond_the_end_is_all_of_linear1_and_then_all_of_linear2(orders_of, case, beyond):
    for order in orders_of(replace(case, lead=min(max(case.num_rows, 1) + beyond, LARGEST_LEAD))):
        assert (np.diff(order[:, PHASE].astype(int)) >= 0).all()


@every_routing
@given(cases(leads=False))
def test_the_wave_runs_one_index_through_both_streams_of_all_waves(orders_of, case):
    """The original, in its own terms: an index that strides through a stream and takes what it overshot to the next."""
    wave = case.template.experts_per_wave
    for instance, order in enumerate(orders_of(case)):
        expected, block_idx, offset = [], instance, 0
        for first in range(0, len(case.rows), wave):
            rows_of_wave = sum(case.rows[first : first + wave])
            for phase in Phase:
                while block_idx < rows_of_wave * case.tiles(phase):
                    expected.append((phase, offset + block_idx // case.tiles(phase), block_idx % case.tiles(phase)))
                    block_idx += case.num_instances
                block_idx -= rows_of_wave * case.tiles(phase)
            offset += rows_of_wave
        assert order[:, [PHASE, ROW, N_BLOCK]].tolist() == [list(tile) for tile in expected]


@every_routing
@given(cases(tiles=[(4, 16), (8, 2), (2, 32)], even=True, most_instances=20))
def test_a_pair_stays_on_one_row_side_by_side(orders_of, case):
    orders = [order.astype(int) for order in orders_of(case)]
    for first, second in zip(orders[::2], orders[1::2], strict=True):
        assert np.array_equal(first[:, :N_BLOCK], second[:, :N_BLOCK])
        assert (first[:, N_BLOCK] + 1 == second[:, N_BLOCK]).all()


# Starvation: in lockstep, every instance at its k-th tile in step k


def is_late(order, complete, is_lead_rule):
    """Whether each Linear-2 tile of ``order`` comes no later than the last Linear-1 tile of its row."""
    steps = np.arange(len(order))
    l1_left = steps < np.max(np.nonzero(order[:, PHASE] == Phase.LINEAR1)[0], initial=-1)
    asked = (order[:, PHASE] == Phase.LINEAR2) & (l1_left == is_lead_rule)
    return complete[order[asked, ROW].astype(int)] >= steps[asked]


def starves(case, orders, is_lead_rule=True):
    """Whether a Linear-2 tile is emitted before, or with, a Linear-1 tile of its row.

    By the lead rule, or (``is_lead_rule`` False) by an instance that has no Linear-1 tile left.
    """
    complete = np.full(case.num_rows, -1)
    for order in orders:
        l1 = np.nonzero(order[:, PHASE] == Phase.LINEAR1)[0]
        np.maximum.at(complete, order[l1, ROW].astype(int), l1)
    return any(is_late(order, complete, is_lead_rule).any() for order in orders)


def ceil_div(a, b):
    return -(-a // b)


@every_routing
@given(cases(waves=False, most_instances=24), st.integers(0, 2))
def test_in_lockstep_linear2_does_not_starve_if_the_lead_covers_the_skew(orders_of, case, more):
    """Two instances are at most one Linear-1 tile apart, so their cursors differ by less than 2 G.

    Where a row has no more Linear-1 tiles than Linear-2 tiles, G - 1 is enough.
    """
    l1_tiles, l2_tiles = case.template.l1_tiles, case.template.l2_tiles
    skew = case.num_instances - 1 if l1_tiles <= l2_tiles else 2 * case.num_instances - 1
    case = replace(case, lead=1 + ceil_div(skew, l1_tiles) + more)
    assert not starves(case, orders_of(case))


COUNTEREXAMPLES = {
    # tiles, instances, rows, lead
    "the knee itself": ((4, 16), 3, 2, ceil_div(3, 4)),
    "the knee itself, odd tiles": ((3, 5), 2, 2, ceil_div(2, 3)),
    "the smaller skew, with more Linear-1 tiles than Linear-2 tiles": ((8, 2), 39, 30, 1 + ceil_div(38, 8)),
}


@pytest.mark.parametrize("name", COUNTEREXAMPLES)
def test_in_lockstep_less_than_that_starves(orders_of, name):
    tiles, num_instances, rows, lead = COUNTEREXAMPLES[name]
    case = Case(ScheduleTemplate(*tiles, 1, 1), (rows,), num_instances, lead)
    assert starves(case, orders_of(case))


def test_no_lead_keeps_an_instance_without_linear1_tiles_from_waiting(orders_of):
    for lead in (1, 2, 10, LARGEST_LEAD):
        case = Case(ScheduleTemplate(4, 16, 1, 1), (1,), 3, lead)
        assert starves(case, orders_of(case), is_lead_rule=False)


# Waits


@st.composite
def speeds(draw):
    return draw(st.integers(0, 2**32 - 1)), draw(st.integers(1, 4)), draw(st.sampled_from([0.0, 0.3, 5.0]))


@every_routing
@given(cases(most_instances=16), speeds())
def test_nothing_deadlocks_at_any_speeds_and_nothing_begins_before_its_input(orders_of, case, speed):
    seed, depth, load_us = speed
    rng = np.random.default_rng(seed)
    orders = orders_of(case)
    slowness = [rng.uniform(0.1, 3.0, len(order)) * rng.choice([1.0, 20.0]) for order in orders]
    arrival = rng.uniform(0.0, 60.0, case.num_rows)
    run = simulate(orders, case.template.l1_tiles, 4.0, 1.5, arrival, depth, load_us, slowness)

    complete = np.zeros(case.num_rows)
    for order, finish in zip(orders, run.finish_us, strict=True):
        is_l1 = order[:, PHASE] == Phase.LINEAR1
        np.maximum.at(complete, order[is_l1, ROW].astype(int), finish[is_l1])
    for order, begin, finish, factor in zip(orders, run.begin_us, run.finish_us, slowness, strict=True):
        is_l1, rows = order[:, PHASE] == Phase.LINEAR1, order[:, ROW].astype(int)
        assert finish == pytest.approx(begin + np.where(is_l1, 4.0, 1.5) * factor)
        assert (begin[1:] >= finish[:-1]).all()
        assert (begin >= np.where(is_l1, arrival[rows], complete[rows]) + load_us).all()


def relaxed(case, orders, tile_us, arrival, depth, load_us):
    """Finish times as the least solution of the waits' inequalities, by iteration."""
    finish = [np.zeros(len(order)) for order in orders]
    for _ in range(sum(map(len, orders)) + 1):
        complete = np.zeros(case.num_rows)
        for order, ends in zip(orders, finish, strict=True):
            for tile, end in zip(order, ends, strict=True):
                if tile[PHASE] == Phase.LINEAR1:
                    complete[tile[ROW]] = max(complete[tile[ROW]], end)
        before = [ends.copy() for ends in finish]
        for order, ends, times in zip(orders, finish, tile_us, strict=True):
            loaded = 0.0
            for k, tile in enumerate(order):
                ready = arrival[tile[ROW]] if tile[PHASE] == Phase.LINEAR1 else complete[tile[ROW]]
                slot = ends[k - 1 - depth] if k - 1 - depth >= 0 else 0.0
                loaded = max(loaded, slot, ready) + load_us
                ends[k] = max(loaded, ends[k - 1] if k else 0.0) + times[k]
        if all(np.array_equal(*pair) for pair in zip(before, finish, strict=True)):
            return finish
    raise AssertionError("no solution")


@settings(max_examples=25, deadline=None)
@given(cases(most_instances=5, tiles=[(3, 5), (1, 1), (8, 2)]), speeds())
def test_the_simulated_times_solve_the_waits(case, speed):
    case = replace(case, rows=tuple(min(count, 3) for count in case.rows))
    seed, depth, load_us = speed
    rng = np.random.default_rng(seed)
    orders = text_orders(case)
    slowness = [rng.uniform(0.1, 3.0, len(order)) for order in orders]
    arrival = rng.uniform(0.0, 20.0, case.num_rows)
    run = simulate(orders, case.template.l1_tiles, 4.0, 1.5, arrival, depth, load_us, slowness)
    tile_us = [
        np.where(order[:, PHASE] == Phase.LINEAR1, 4.0, 1.5) * factor for order, factor in zip(orders, slowness, strict=True)
    ]
    for got, expected in zip(run.finish_us, relaxed(case, orders, tile_us, arrival, depth, load_us), strict=True):
        assert got == pytest.approx(expected)


L1 = [Tile(Phase.LINEAR1, 0, row, row, 0) for row in range(4)]
L2 = [Tile(Phase.LINEAR2, 0, row, row, 0) for row in range(4)]


def test_waits_are_counted_by_phase():
    run = simulate([[L1[0], L2[0]], [L2[0], L1[1]]], 1, 4.0, 1.0, arrival_us=[2.0, 9.0])
    assert run.begin_us[0].tolist() == [2.0, 6.0]
    assert run.begin_us[1].tolist() == [6.0, 9.0]
    assert run.l1_wait_us.tolist() == [2.0, 2.0]
    assert run.l2_wait_us.tolist() == [0.0, 6.0]
    assert run.wait_us.tolist() == [2.0, 8.0]
    assert run.total_us == 13.0


def test_a_loader_that_may_run_ahead_hides_its_loads():
    serial = [simulate([L1], 1, 4.0, 1.0, depth=0, load_us=load_us).total_us for load_us in (0.0, 3.0)]
    ahead = [simulate([L1], 1, 4.0, 1.0, depth=1, load_us=load_us).total_us for load_us in (0.0, 3.0)]
    assert (serial, ahead) == ([16.0, 28.0], [16.0, 19.0])


def test_more_places_ahead_let_a_long_tile_hide_more_loads():
    totals = [simulate([L1], 1, 1.0, 1.0, depth=depth, load_us=3.0, slowness=[[20, 1, 1, 1]]).total_us for depth in (1, 2, 3)]
    assert totals == [30.0, 27.0, 26.0]


def test_no_instances_and_no_tiles_take_no_time():
    assert simulate([], 1, 1.0, 1.0).total_us == 0.0
    run = simulate([[], []], 1, 1.0, 1.0)
    assert (run.total_us, run.wait_us.tolist()) == (0.0, [0.0, 0.0])


def test_a_deadlock_names_the_tile_and_the_row_it_waits_for():
    with pytest.raises(DeadlockError, match=r"instance 0 waits at its tile 1 for row 1 .0 of 1 .*owed by instance 1") as stop:
        simulate([[L1[2], L2[1], L1[0]], [L2[0], L1[1]], [L1[3], L2[3]]], 1, 4.0, 1.0)
    got = [(tile.instance, tile.position, tile.row, tile.num_done, tile.owed_by) for tile in stop.value.blocked]
    assert got == [(0, 1, 1, 0, (1,)), (1, 0, 0, 0, (0,))]


def test_a_tile_that_no_order_holds_is_a_deadlock_too():
    with pytest.raises(DeadlockError, match=r"row 0 .1 of 2 Linear-1 tiles done, the rest in no order"):
        simulate([[L1[0], L2[0]]], 2, 4.0, 1.0)


def test_linear2_in_front_of_its_own_row_deadlocks():
    """What a lead of 0 would mean in Algorithm 1, and why 0 can name the wave."""
    with pytest.raises(DeadlockError):
        simulate([[L2[0], L1[0]]], 1, 4.0, 1.0)


BAD_WAITS = {
    "tile time 0": ({"l1_us": 0.0}, "l1_us is 0"),
    "tile time NaN": ({"l2_us": float("nan")}, "l2_us is nan"),
    "no tiles a row": ({"l1_tiles": 0}, "l1_tiles is 0"),
    "negative depth": ({"depth": -1}, "depth is -1"),
    "depth not whole": ({"depth": 1.5}, "depth is 1.5"),
    "negative load": ({"load_us": -1.0}, "load_us is -1"),
    "arrivals of other rows": ({"arrival_us": [0.0, 0.0, 0.0]}, "arrival_us: 3 values; expected one, or 2"),
    "never arrives": ({"arrival_us": float("inf")}, "arrival_us: holds a value"),
    "speeds of other instances": ({"slowness": [1.0, 1.0]}, "slowness: 2 values; expected one for each of 1"),
    "speeds of other tiles": ({"slowness": [[1.0, 1.0, 1.0]]}, "slowness: 3 values; expected one, or 2"),
    "stands still": ({"slowness": [0.0]}, "slowness: holds a value"),
    "no order": ({"orders": [[1, 2, 3]]}, "order of instance 0: not a list of tiles"),
    "no phase": ({"orders": [[(3, 0, 0, 0, 0)]]}, "order of instance 0: not a list of tiles"),
}


@pytest.mark.parametrize("name", BAD_WAITS)
def test_bad_input_of_the_simulator_is_refused(name):
    values, reason = BAD_WAITS[name]
    with pytest.raises(InvalidInputError, match=reason):
        simulate(**{"orders": [[L1[0], L1[1]]], "l1_tiles": 1, "l1_us": 4.0, "l2_us": 1.0} | values)


# Bad input and missing compilers

GOOD = {
    "rows_per_expert": (1, 0, 2, 0),
    "instance": 0,
    "num_instances": 2,
    "l1_tiles": 4,
    "l2_tiles": 16,
    "lead": 1,
    "experts_per_wave": 2,
}
BAD = {
    "no experts": ({"rows_per_expert": ()}, "rows_per_expert is empty"),
    "negative rows": ({"rows_per_expert": (1, -1, 2, 0)}, "rows of expert 1 is -1"),
    "rows not whole": ({"rows_per_expert": (1, 0.5, 2, 0)}, "rows of expert 1 is 0.5"),
    "no instances": ({"num_instances": 0}, "num_instances is 0"),
    "instance beyond the last": ({"instance": 2}, "instance is 2; expected a whole number from 0 to 1"),
    "no tiles": ({"l2_tiles": 0}, "l2_tiles is 0"),
    "negative lead": ({"lead": -1}, "lead is -1"),
    "a truth value": ({"lead": True}, "lead is True"),
    "a lead that the word cannot hold": ({"lead": 2**16}, "lead is 65536; expected a whole number from 0 to 65535"),
    "wave of no experts": ({"experts_per_wave": 0}, "experts_per_wave is 0"),
    "wave of too many experts": ({"experts_per_wave": 5}, "experts_per_wave is 5"),
    "wave that does not divide": ({"experts_per_wave": 3}, "expected a divisor of the 4 experts"),
    "more tiles than a cursor counts": ({"rows_per_expert": (2**30, 0, 0, 0)}, "expected at most 4294967295 together"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_schedule_is_refused_before_the_first_tile(name):
    values, reason = BAD[name]
    with pytest.raises(InvalidInputError, match=reason):
        tiles_of_instance(**GOOD | values)


def test_numpy_counts_are_counts():
    assert list(tiles_of_instance(**GOOD)) == list(tiles_of_instance(**GOOD | {"rows_per_expert": np.array([1, 0, 2, 0])}))


def test_the_library_refuses_what_the_text_refuses(compiled):
    schedule = compiled[ScheduleTemplate(4, 16, 6, 2)]
    for rows, num_instances, lead, reason in (
        ((1, 2, 3), 2, 0, "3 counts of rows; expected one for each of 6 experts"),
        ((1, 2, 3, 4, 5, -6), 2, 0, "rows of expert 5 is -6"),
        ((1,) * 6, 0, 0, "num_instances is 0"),
        ((1,) * 6, 2, 2**16, "lead is 65536"),
        ((2**30,) * 6, 2, 0, "together"),
    ):
        with pytest.raises(InvalidInputError, match=reason):
            schedule.orders(rows, num_instances, lead)
    with pytest.raises(InvalidInputError, match="instance is 2"):
        schedule.order((1,) * 6, 2, 2, 0)
    with pytest.raises(InvalidInputError, match="experts_per_wave is 4; expected a divisor of the 6 experts"):
        ScheduleTemplate(4, 16, 6, 4)


def test_one_order_is_the_same_as_among_all(compiled):
    schedule = compiled[ScheduleTemplate(4, 16, 6, 2)]
    rows = ROUTINGS["hot and cold"]
    for instance, order in enumerate(schedule.orders(rows, 7, 3)):
        assert np.array_equal(schedule.order(rows, instance, 7, 3), order)


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoCompilerError, match=r"looked for g\+\+, c\+\+, clang\+\+; install g\+\+, or"):
        compile_schedule(TEMPLATES[0])
    with pytest.raises(NoCompilerError, match="looked for no-such-compiler"):
        compile_schedules(TEMPLATES[:1], compiler="no-such-compiler")


def test_a_compiler_that_refuses_or_writes_nothing_is_named(tmp_path):
    for script, reason in (
        ("echo 'fatal error: no such file' >&2; exit 1", "no such file"),
        ("exit 7", "exit code 7"),
        ("", "No such file"),
    ):
        compiler = tmp_path / "compiler"
        compiler.write_text(f"#!/bin/sh\ncat > {tmp_path}/source\n{script}\n")
        compiler.chmod(0o755)
        with pytest.raises(CompilerError, match=reason):
            compile_schedules(TEMPLATES[:1], compiler=str(compiler), folder=tmp_path)
    assert not list(tmp_path.glob("build-*"))


def test_a_library_is_compiled_once_for_its_values(compiled, tmp_path, monkeypatch):
    calls = []
    run = subprocess.run
    monkeypatch.setattr(schedule_library.subprocess, "run", lambda *args, **values: calls.append(args) or run(*args, **values))
    one, other = TEMPLATES[0], TEMPLATES[5]
    for templates in ([one], [one], [other], [one, one]):
        compile_schedules(templates, folder=tmp_path)
    assert len(calls) == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_of_another_user_is_not_trusted(compiled, tmp_path, monkeypatch):
    monkeypatch.setattr(schedule_library.tempfile, "gettempdir", lambda: str(tmp_path))
    own = schedule_library._own_folder()
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o777)
    assert schedule_library._own_folder() != own
    own.rmdir()
    own.symlink_to(tmp_path)
    assert schedule_library._own_folder() != own


def test_a_header_that_breaks_its_contract_is_caught(compiled):
    for code, reason in ((-1, "more tiles than the instance can have"), (-2, "rows of an expert beyond the last")):
        broken = replace(compiled[TEMPLATES[0]], _list_tiles=lambda *_, code=code: code)
        with pytest.raises(HeaderError, match=reason):
            broken.orders((1,), 1, 1)


def test_importing_compiles_nothing_and_needs_no_torch():
    code = (
        "import sys, subprocess; subprocess.Popen = None; "
        "import xstage_plugin.moe.schedule_library, xstage_plugin.moe.schedule_waits; "
        "assert not {'torch', 'cuda'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
