import itertools

import numpy as np
import pytest
from attention.layouts import layouts
from hypothesis import given
from hypothesis import strategies as st

from xstage_plugin.attention.launch_plan import Launch, fused_plan, serial_plan
from xstage_plugin.attention.layout import OWN_FIRST, OWN_LAST, Q_ORDERS, SEQUENCE, UlyssesLayout
from xstage_plugin.errors import InvalidInputError

POISON = -1


class Memory:
    """All ranks' output buffers as one rank maps them: its own first, almost twice round, one physical array behind it."""

    def __init__(self, layout):
        self.layout = layout
        self.physical = np.full((layout.ranks, *layout.span_shape[:3]), POISON)
        self.writes = np.zeros_like(self.physical)

    def store(self, first_rank, slot, element, rows, heads, values):
        owner = (first_rank + slot) % self.layout.ranks
        self.physical[owner, element, rows, heads] = values
        self.writes[owner, element, rows, heads] += 1

    def check(self):
        for rank, batch in itertools.product(range(self.layout.ranks), range(self.layout.batch)):
            local = [row for part in self.layout.local_ranges(rank) for row in part]
            tags = np.array([[tag(batch, row, head) for head in range(self.layout.total_heads)] for row in local])
            assert (self.physical[rank, batch, : len(local)] == tags.reshape(len(local), self.layout.total_heads)).all()
            assert (self.writes[rank, batch, : len(local)] == 1).all(), "a row was stored twice"
            assert (self.physical[rank, batch, len(local) :] == POISON).all(), "a store beyond the rank's rows"


def tag(batch, row, head):
    """What stands for the attention of one row and head."""
    return (batch * 1000 + row) * 100 + head


def q_of(layout, rank, order):
    """Tags of the rank's q, [B, rows, h], and the sequence position of each row."""
    rows = [row for part in layout.q_ranges(rank, order) for row in part]
    heads = range(layout.head_start(rank), layout.head_start(rank) + layout.heads[rank])
    tags = np.array([[[tag(b, row, head) for head in heads] for row in rows] for b in range(layout.batch)])
    return tags.reshape(layout.batch, len(rows), len(heads)), rows


def heads_of(layout, rank):
    return slice(layout.head_start(rank), layout.head_start(rank) + layout.heads[rank])


def run_fused(layout, rank, plan, memory):
    q, positions = q_of(layout, rank, plan.q_order)
    for launch in plan.launches:
        elements = range(layout.batch) if launch.element is None else (launch.element,)
        for element, i in itertools.product(elements, range(launch.slots)):
            rows = slice(launch.first_row + i * launch.rows, launch.first_row + (i + 1) * launch.rows)
            memory.store(
                plan.first_rank, launch.slot + i, element, slice(launch.rows), heads_of(layout, rank), q[element, rows]
            )
        yield launch, positions[launch.first_row : launch.first_row + launch.slots * launch.rows]


@given(layouts(), st.sampled_from(Q_ORDERS))
def test_fused_launches_store_every_row_to_its_owner_once(layout, order):
    memory = Memory(layout)
    for rank in range(layout.ranks):
        for launch, _ in run_fused(layout, rank, fused_plan(layout, rank, order), memory):
            assert launch.kv_rows == layout.seq_len
            assert launch.rows > 0
    memory.check()


@given(layouts(), st.sampled_from(Q_ORDERS))
def test_causal_launches_see_the_keys_up_to_their_last_row_and_start_where_the_mask_expects(layout, order):
    if layout.shared_rows:
        layout = UlyssesLayout((*layout.rows[:-1], layout.rows[-1] + 1), layout.heads, layout.head_dim, layout.batch)
    memory = Memory(layout)
    for rank in range(layout.ranks):
        for launch, positions in run_fused(layout, rank, fused_plan(layout, rank, order, causal=True), memory):
            # Aligned to the bottom right, row i sees kv_rows - rows + i + 1 keys: its own position and all before it.
            assert positions == [launch.kv_rows - launch.rows + i for i in range(launch.rows)]
    memory.check()


@given(layouts(), st.sampled_from(Q_ORDERS), st.booleans())
def test_serial_attention_fills_its_scratch_once_and_the_copies_deliver_it(layout, order, causal):
    causal = causal and not layout.shared_rows
    memory = Memory(layout)
    for rank in range(layout.ranks):
        plan = serial_plan(layout, rank, order, causal)
        q, positions = q_of(layout, rank, order)
        scratch = np.full_like(q, POISON)
        for launch in plan.launches:
            rows = slice(launch.first_row, launch.first_row + launch.rows)
            assert (scratch[:, rows] == POISON).all()
            scratch[:, rows] = q[:, rows]
            if causal:
                assert positions[rows] == [launch.kv_rows - launch.rows + i for i in range(launch.rows)]
        for copy, i, b in itertools.product(plan.copies, range(max(layout.ranks, 1)), range(layout.batch)):
            if i < copy.slots:
                first = copy.first_row + i * copy.rows
                target = slice(copy.local_row, copy.local_row + copy.rows)
                values = scratch[b, first : first + copy.rows]
                memory.store(plan.first_rank, copy.slot + i, b, target, heads_of(layout, rank), values)
    memory.check()


@pytest.mark.parametrize("order", [OWN_LAST, OWN_FIRST])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_equal_shards_are_one_launch_in_any_delivery_order(ranks, order):
    layout = UlyssesLayout.even(128 * ranks, ranks, 128, ranks, shared_rows=0)
    for rank in range(ranks):
        plan = fused_plan(layout, rank, order)
        element = None if ranks == 1 else 0
        assert plan.launches == (Launch(0, 128, 0, ranks, element, 128 * ranks, head_by_head=ranks > 1),)
        assert plan.first_rank == rank + (order == OWN_LAST)


@pytest.mark.parametrize(
    ("rows", "batch", "order", "expected"),
    [
        # rows, slots and element of each launch on rank 0
        ((4, 4), 1, SEQUENCE, [(4, 2, 0)]),
        ((4, 4), 2, SEQUENCE, [(4, 2, 0), (4, 2, 1)]),
        ((4, 4), 3, SEQUENCE, [(4, 1, None), (4, 1, None)]),  # fewer launches with the sequences as batch
        ((5, 4, 4), 1, SEQUENCE, [(5, 1, None), (4, 2, 0)]),
        ((5, 4, 4), 1, OWN_LAST, [(4, 2, 0), (5, 1, None)]),
        ((1, 0), 1, SEQUENCE, [(1, 1, None)]),
        ((3, 0, 3), 1, SEQUENCE, [(3, 1, None), (3, 1, None)]),  # a rank without rows leaves a gap in the slots
    ],
)
def test_launches_are_as_few_as_rows_and_batch_allow(rows, batch, order, expected):
    plan = fused_plan(UlyssesLayout(rows, (1,) * len(rows), 64, batch), 0, order)
    assert [(launch.rows, launch.slots, launch.element) for launch in plan.launches] == expected


@pytest.mark.parametrize(
    ("layout", "causal", "expected"),
    [
        (UlyssesLayout((4, 4), (2, 2), 64), False, [True]),
        (UlyssesLayout((4, 4), (2, 2), 64, 2), False, [True, True]),
        (UlyssesLayout((4, 4), (2, 2), 64, kv_heads=2), False, [False]),  # two heads share their keys already
        (UlyssesLayout((5, 4), (2, 2), 64), False, [False, False]),  # one destination a launch
        (UlyssesLayout((4, 4), (2, 2), 64), True, [False, False]),
        (UlyssesLayout((4, 4), (2, 2), 64, 3), False, [False, False]),
    ],
)
def test_a_head_serves_all_destinations_in_turn_where_a_launch_has_several_and_heads_keys_of_their_own(
    layout, causal, expected
):
    assert [launch.head_by_head for launch in fused_plan(layout, 0, OWN_LAST, causal).launches] == expected
    assert not any(launch.head_by_head for launch in fused_plan(layout, 0, OWN_LAST, causal, head_by_head=False).launches)


def test_q_is_gathered_only_where_shared_rows_come_in_sequence_order():
    shared = UlyssesLayout((4, 4), (1, 1), 64, shared_rows=2)
    assert fused_plan(shared, 1, SEQUENCE).gathers
    assert fused_plan(shared, 1, SEQUENCE).q_order == OWN_LAST
    assert not fused_plan(shared, 1, OWN_LAST).gathers
    assert not fused_plan(UlyssesLayout((4, 4), (1, 1), 64), 1, SEQUENCE).gathers


@pytest.mark.parametrize("plan", [fused_plan, serial_plan])
def test_causal_attention_with_shared_rows_is_refused(plan):
    with pytest.raises(InvalidInputError, match="causal attention with 2 shared rows; expected none"):
        plan(UlyssesLayout((4, 4), (1, 1), 64, shared_rows=2), 0, OWN_LAST, causal=True)
