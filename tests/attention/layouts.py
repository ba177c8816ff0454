"""Ulysses layouts for property tests."""

from hypothesis import strategies as st

from xstage_plugin.attention.layout import UlyssesLayout


@st.composite
def layouts(draw, most_rows=9, most_ranks=5):
    ranks = draw(st.integers(1, most_ranks))
    rows = tuple(draw(st.lists(st.integers(0, most_rows), min_size=ranks, max_size=ranks)))
    heads = tuple(draw(st.lists(st.integers(1, 4), min_size=ranks, max_size=ranks)))
    shared = draw(st.integers(0 if sum(rows) else 1, 3))
    place = draw(st.sampled_from(("first", "last")))
    return UlyssesLayout(rows, heads, 8, draw(st.integers(1, 3)), None, shared, place)
