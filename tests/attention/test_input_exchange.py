import itertools

import numpy as np
from attention.layouts import layouts
from hypothesis import given

from xstage_plugin.attention.input_exchange import input_span_shape, transfers
from xstage_plugin.attention.layout import OWN_LAST


def rows_of(ranges):
    return [row for part in ranges for row in part]


@given(layouts())
def test_every_rank_gets_its_heads_of_every_row_once_and_in_the_order_that_attention_reads(layout):
    every = range(layout.ranks)
    for owner in every:
        wanted = (rows_of(layout.q_ranges(owner, OWN_LAST)), range(layout.seq_len), range(layout.seq_len))
        got = [np.full(len(rows), -1) for rows in wanted]
        for sender in every:
            local = np.array(rows_of(layout.local_ranges(sender)), dtype=int)
            for part in transfers(layout, sender, owner):
                assert len(local[part.rows]) > 0
                assert (got[part.which][part.target_rows] == -1).all(), "a row comes twice"
                got[part.which][part.target_rows] = local[part.rows]
                first, count = layout.kv_heads_of(owner)
                start = layout.head_start(owner)
                heads = (start, start + layout.heads[owner]) if part.which == 0 else (first, first + count)
                assert (part.heads.start, part.heads.stop) == heads
        for rows, expected in zip(got, wanted, strict=True):
            assert rows.tolist() == list(expected)


@given(layouts())
def test_one_buffer_size_holds_what_any_rank_gets(layout):
    def elements(owner):
        parts = itertools.chain.from_iterable(transfers(layout, sender, owner) for sender in range(layout.ranks))
        return (
            sum((p.rows.stop - p.rows.start) * (p.heads.stop - p.heads.start) for p in parts) * layout.batch * layout.head_dim
        )

    assert input_span_shape(layout) == (max(map(elements, range(layout.ranks))),)
