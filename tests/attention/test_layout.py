from itertools import pairwise

import pytest
from attention.layouts import layouts
from hypothesis import given
from hypothesis import strategies as st

from xstage_plugin.attention.layout import OWN_FIRST, OWN_LAST, Q_ORDERS, SEQUENCE, UlyssesLayout
from xstage_plugin.errors import InvalidInputError


@given(layouts())
def test_every_row_and_head_has_one_owner_and_shared_rows_have_all_of_them(layout):
    owners = {}
    for rank in range(layout.ranks):
        for part in layout.local_ranges(rank):
            for row in part:
                owners.setdefault(row, []).append(rank)
    everyone = list(range(layout.ranks))
    assert sorted(owners) == list(range(layout.seq_len))
    for row, found in owners.items():
        assert found == everyone if row in layout.shared_range() else len(found) == 1
    heads = [head for rank in everyone for head in range(layout.head_start(rank), layout.head_start(rank) + layout.heads[rank])]
    assert heads == list(range(layout.total_heads))


@given(layouts())
def test_local_rows_are_the_sequence_in_order_wherever_the_shared_rows_stand(layout):
    for rank in range(layout.ranks):
        positions = [row for part in layout.local_ranges(rank) for row in part]
        assert positions == sorted(positions)
        assert len(positions) == layout.local_rows(rank) == layout.out_shape(rank)[1]
        assert layout.local_rows(rank) <= layout.span_shape[1]


@given(layouts(), st.sampled_from((OWN_LAST, OWN_FIRST)))
def test_delivery_order_is_every_ranks_local_rows_in_a_rotation_with_the_own_ones_at_an_end(layout, order):
    for rank in range(layout.ranks):
        served = layout.delivery_ranks(rank, order)
        assert sorted(served) == list(range(layout.ranks))
        assert served[-1 if order == OWN_LAST else 0] == rank
        assert all((b - a) % layout.ranks == 1 % layout.ranks for a, b in pairwise(served))
        q = [row for part in layout.q_ranges(rank, order) for row in part]
        assert len(q) == layout.delivery_rows == layout.q_rows(order)
        for owner in range(layout.ranks):
            start = layout.delivery_start(rank, owner, order)
            local = [row for part in layout.local_ranges(owner) for row in part]
            assert q[start : start + layout.local_rows(owner)] == local


@given(layouts())
def test_no_two_ranks_start_at_one_peer(layout):
    for order in (OWN_LAST, OWN_FIRST):
        assert len({layout.delivery_ranks(rank, order)[0] for rank in range(layout.ranks)}) == layout.ranks


@given(st.integers(1, 200), st.integers(1, 5), st.integers(0, 20), st.integers(0, 7))
def test_an_even_layout_differs_by_at_most_one_row_and_one_head(seq_len, ranks, more_heads, shared):
    shared = min(shared, seq_len)
    layout = UlyssesLayout.even(seq_len, ranks + more_heads, 64, ranks, shared_rows=shared)
    assert layout.seq_len == seq_len
    assert layout.total_heads == ranks + more_heads
    assert max(layout.rows) - min(layout.rows) <= 1
    assert max(layout.heads) - min(layout.heads) <= 1
    assert list(layout.rows) == sorted(layout.rows, reverse=True)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "expected"),
    [
        ((2, 2), 4, [(0, 2), (2, 2)]),
        ((2, 2), 2, [(0, 1), (1, 1)]),
        ((2, 2), 1, [(0, 1), (0, 1)]),  # fewer than ranks: both need the one
        ((4, 4, 4, 4), 2, [(0, 1), (0, 1), (1, 1), (1, 1)]),
        ((3, 2), 5, [(0, 3), (3, 2)]),
        ((3, 2), 1, [(0, 1), (0, 1)]),
        ((4, 2), 3, [(0, 2), (2, 1)]),
        ((20, 20), 8, [(0, 4), (4, 4)]),
    ],
)
def test_a_rank_needs_the_kv_heads_of_its_query_heads(heads, kv_heads, expected):
    layout = UlyssesLayout((1,) * len(heads), heads, 64, kv_heads=kv_heads)
    assert [layout.kv_heads_of(rank) for rank in range(layout.ranks)] == expected


@pytest.mark.parametrize(("heads", "kv_heads", "rank"), [((3, 3), 3, 0), ((3, 1), 2, 0), ((1, 3), 2, 1)])
def test_kv_heads_that_serve_unequally_many_query_heads_of_a_rank_are_refused(heads, kv_heads, rank):
    with pytest.raises(InvalidInputError, match=f"of rank {rank} use 2 of {kv_heads} key/value heads unevenly"):
        UlyssesLayout((4, 4), heads, 64, kv_heads=kv_heads).kv_heads_of(rank)


GOOD = {"rows": (4, 4), "heads": (2, 2), "head_dim": 64}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [4, 4]}, "rows is .*expected a tuple with one entry a rank"),
        ({"rows": ()}, "expected a tuple with one entry a rank"),
        ({"rows": (4,)}, "rows has 1 entries and heads 2"),
        ({"rows": (4, -1)}, "rows of rank 1 is -1"),
        ({"heads": (2, 0)}, "heads of rank 1 is 0"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"batch": 0}, "batch is 0"),
        ({"rows": (0, 0)}, "the layout has no rows"),
        ({"shared_rows": -1}, "shared_rows is -1"),
        ({"shared_at": "middle"}, "unknown place of the shared rows 'middle'"),
        ({"kv_heads": 3}, "kv_heads is 3; expected a divisor of the 4 query heads"),
        ({"kv_heads": 0}, "kv_heads is 0"),
    ],
)
def test_a_layout_that_cannot_be_is_one_line(change, message):
    with pytest.raises(InvalidInputError, match=message) as error:
        UlyssesLayout(**(GOOD | change))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 1, 64, 2), "heads is 1; expected at least one for each of the 2 ranks"),
        ((0, 4, 64, 2), "seq_len is 0"),
        ((8, 4, 64, 0), "ranks is 0"),
    ],
)
def test_an_even_layout_that_cannot_be_is_one_line(arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        UlyssesLayout.even(*arguments)
    with pytest.raises(InvalidInputError, match="shared_rows is 9; expected at most the 8 rows"):
        UlyssesLayout.even(8, 4, 64, 2, shared_rows=9)


def test_an_unknown_order_lists_the_known_ones():
    with pytest.raises(InvalidInputError, match="unknown order of query rows 'delivery'"):
        UlyssesLayout(**GOOD).q_rows("delivery")
    assert Q_ORDERS == (SEQUENCE, OWN_LAST, OWN_FIRST)
