"""The turns of pairs that take tasks from shared counters: nothing deadlocks, and Linear-1 stays the lead ahead."""

import ctypes
import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moe.compiled_header import compile_header

NONE, LINEAR1, LINEAR2 = range(3)
TASKS = [(4, 16), (8, 8), (16, 4), (2, 14), (12, 14), (6, 2)]
SLOTS = 2  # tasks published to the warps of a pair and not finished
SOURCE = """
#include <deep_gemm/xstage/moe_task_schedule.hpp>
extern "C" uint32_t num_warmup_waves(uint32_t lead, uint32_t rows, uint32_t ring, uint32_t pairs, uint32_t l1, uint32_t l2) {
    return xstage::num_warmup_waves(lead, rows, ring, pairs, l1, l2);
}
#define ENTRY(l1, l2) \\
    using Turns_##l1##_##l2 = xstage::MoeTaskTurns<l1, l2>; \\
    extern "C" void start_##l1##_##l2(void* turns, uint32_t waves) { static_cast<Turns_##l1##_##l2*>(turns)->start(waves); } \\
    extern "C" uint32_t next_##l1##_##l2(void* turns) { return uint32_t(static_cast<Turns_##l1##_##l2*>(turns)->next()); } \\
    extern "C" void take_##l1##_##l2(void* turns, uint32_t phase) { \\
        static_cast<Turns_##l1##_##l2*>(turns)->take(xstage::Phase(phase)); \\
    } \\
    extern "C" void exhaust_##l1##_##l2(void* turns, uint32_t phase) { \\
        static_cast<Turns_##l1##_##l2*>(turns)->exhaust(xstage::Phase(phase)); \\
    }
"""


@dataclass(frozen=True)
class Case:
    """``num_domains`` parts of each row, with a counter each; pair p serves that of ``domain_of(p)`` first.

    Of two parts each has at least a third of the pairs: upstream's host hands out the SMs in balanced halves.
    """

    l1_tasks: int
    l2_tasks: int
    num_rows: int
    num_pairs: int
    lead: int
    num_domains: int = 1
    first_domain_pairs: int = 0

    def domain_of(self, pair):
        return 0 if self.num_domains == 1 or pair < self.first_domain_pairs else 1

    def tasks(self, phase):
        return self.l1_tasks if phase == LINEAR1 else self.l2_tasks


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    entries = "".join(f"ENTRY({l1}, {l2})\n" for l1, l2 in TASKS)
    return compile_header(SOURCE + entries, tmp_path_factory.mktemp("tasks"))


def warmup_waves(library, case, ring_rows=None):
    return library.num_warmup_waves(
        case.lead, case.num_rows, ring_rows or case.num_rows, case.num_pairs, case.l1_tasks, case.l2_tasks
    )


class Turns:
    """The compiled turns of one pair."""

    def __init__(self, library, case, num_waves):
        self._library, self._suffix = library, f"{case.l1_tasks}_{case.l2_tasks}"
        self._state = ctypes.create_string_buffer(16)
        self._call("start", num_waves)

    def _call(self, name, *values):
        return self._library[f"{name}_{self._suffix}"](self._state, *values)

    def next(self):
        return self._call("next")

    def take(self, phase):
        self._call("take", phase)

    def exhaust(self, phase):
        self._call("exhaust", phase)


class Run:
    """All pairs of a rank whose rows all fit the ring, one atomic step at a time."""

    def __init__(self, library, case, num_waves):
        self.case = case
        self.turns = [Turns(library, case, num_waves) for _ in range(case.num_pairs)]
        self.counters = {phase: [0] * case.num_domains for phase in (LINEAR1, LINEAR2)}
        self.held = [None] * case.num_pairs  # a Linear-2 task that waits for its row
        self.slots = [[] for _ in range(case.num_pairs)]
        self.is_over = [False] * case.num_pairs
        self.finished = {phase: [0] * case.num_rows for phase in (LINEAR1, LINEAR2)}
        self.taken = {LINEAR1: 0, LINEAR2: 0}
        self.most_rows_ahead = 0.0

    def _limit(self, phase):
        return self.case.num_rows * self.case.tasks(phase) // self.case.num_domains

    def _take_from(self, phase, pair):
        """Row of the next task of the pair's own half or, where two waves are there, of the other; None where both are out."""
        case, own = self.case, self.case.domain_of(pair)
        steals = case.num_domains > 1 and case.num_rows * case.tasks(phase) >= 2 * case.num_pairs
        for domain in [own, 1 - own] if steals else [own]:
            place = self.counters[phase][domain]
            self.counters[phase][domain] += 1  # beyond the end too, as an atomic does
            if place < self._limit(phase):
                return place // (case.tasks(phase) // case.num_domains)
        return None

    def _is_row_taken(self, row):
        need = (row + 1) * (self.case.l1_tasks // self.case.num_domains)
        return all(count >= need for count in self.counters[LINEAR1])

    def can_schedule(self, pair):
        if self.is_over[pair]:
            return False
        return self._is_row_taken(self.held[pair]) if self.held[pair] is not None else len(self.slots[pair]) < SLOTS

    def schedule(self, pair):
        if self.held[pair] is not None:
            self.slots[pair].append((LINEAR2, self.held[pair]))
            self.held[pair] = None
            return
        turns = self.turns[pair]
        while (phase := turns.next()) != NONE:
            row = self._take_from(phase, pair)
            if row is None:
                turns.exhaust(phase)
                continue
            turns.take(phase)
            self.taken[phase] += 1
            ahead = self.taken[LINEAR1] / self.case.l1_tasks - self.taken[LINEAR2] / self.case.l2_tasks
            self.most_rows_ahead = max(self.most_rows_ahead, ahead)
            if phase == LINEAR1:
                self.slots[pair].append((phase, row))
            else:
                self.held[pair] = row
            return
        self.is_over[pair] = True

    def can_finish(self, pair):
        if not self.slots[pair]:
            return False
        phase, row = self.slots[pair][0]
        return phase == LINEAR1 or self.finished[LINEAR1][row] == self.case.l1_tasks

    def finish(self, pair):
        phase, row = self.slots[pair].pop(0)
        self.finished[phase][row] += 1

    def to_the_end(self, seed):
        """Random steps, for long stretches of a few pairs only; False where nothing can go on before all is done."""
        rng = random.Random(seed)
        pairs = range(self.case.num_pairs)
        awake = list(pairs)
        while True:
            if rng.random() < 0.05:
                awake = rng.sample(pairs, rng.randint(1, self.case.num_pairs))
            steps = [(self.schedule, pair) for pair in pairs if self.can_schedule(pair)]
            steps += [(self.finish, pair) for pair in pairs if self.can_finish(pair)]
            if not steps:
                return all(self.is_over)
            step, pair = rng.choice([step for step in steps if step[1] in awake] or steps)
            step(pair)


@st.composite
def cases(draw, domains=(1, 2)):
    l1_tasks, l2_tasks = draw(st.sampled_from(TASKS))
    num_pairs, num_domains = draw(st.integers(2, 12)), draw(st.sampled_from(domains))
    first = draw(st.integers(-(-num_pairs // 3), max(num_pairs * 2 // 3, -(-num_pairs // 3))))
    rows = draw(st.integers(1, 24))
    return Case(l1_tasks, l2_tasks, rows, num_pairs, draw(st.integers(1, 30)), num_domains, min(first, num_pairs - 1))


@settings(max_examples=150)
@given(cases(), st.integers(0, 2**32 - 1))
def test_every_task_runs_exactly_once_and_nothing_deadlocks(library, case, seed):
    num_waves = warmup_waves(library, case)
    if num_waves == 0:
        return  # upstream's own order
    run = Run(library, case, num_waves)
    assert run.to_the_end(seed)
    for phase in (LINEAR1, LINEAR2):
        assert run.finished[phase] == [case.tasks(phase)] * case.num_rows


@settings(max_examples=60)
@given(cases(domains=(1,)), st.integers(0, 2**32 - 1))
def test_linear1_is_ahead_by_the_waves_and_one_task_of_each_pair_at_most(library, case, seed):
    num_waves = warmup_waves(library, case)
    if num_waves == 0:
        return
    run = Run(library, case, num_waves)
    run.to_the_end(seed)
    assert run.most_rows_ahead <= (num_waves + 1) * case.num_pairs / case.l1_tasks


@pytest.mark.parametrize(
    ("case", "too_few"), [(Case(16, 4, 8, 4, lead=1), 2), (Case(12, 14, 10, 3, 1, num_domains=2, first_domain_pairs=1), 5)]
)
def test_fewer_waves_than_a_row_needs_deadlock(library, case, too_few):
    """What the least number of waves is for."""
    assert not all(Run(library, case, too_few).to_the_end(seed) for seed in range(60))
    assert all(Run(library, case, warmup_waves(library, case)).to_the_end(seed) for seed in range(60))


def test_both_phases_end_together_however_many_tasks_a_row_has(library):
    """Strictly in turn, Linear-1 would be over after a quarter of Linear-2, and nothing would stand between the rest."""
    case = Case(4, 16, 200, 8, lead=4)
    turns = Turns(library, case, warmup_waves(library, case))
    order = []
    for _ in range(200 * (4 + 16) // 8):
        order.append(turns.next())
        turns.take(order[-1])
    second_half = order[len(order) // 2 :]
    assert second_half.count(LINEAR1) / len(second_half) == pytest.approx(4 / 20, abs=0.03)


@pytest.mark.parametrize(
    ("change", "waves"),
    [
        ({}, 2),
        ({"lead": 0}, 0),
        ({"lead": 18}, 2),
        ({"lead": 19}, 3),
        ({"lead": 65535}, 7085),
        ({"num_rows": 799}, 2),
        ({"num_rows": 801}, 0),  # more rows than the ring holds
        ({"num_rows": 18}, 0),  # less than two waves of Linear-1
        ({"num_rows": 19}, 2),
        ({"l1_tasks": 24, "l2_tasks": 28}, 2),
        ({"l1_tasks": 24, "l2_tasks": 8}, 4),
    ],
)
def test_the_waves_follow_the_lead_where_it_can_be_honoured(library, change, waves):
    case = replace(Case(8, 16, 400, 74, lead=1), **change)
    assert warmup_waves(library, case, ring_rows=800) == waves
