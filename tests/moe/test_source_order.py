"""Which rank's token fills a row of an expert: the header's answer against taking turns one token at a time."""

import ctypes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moe.compiled_header import compile_header

RANKS = (1, 2, 3, 8, 72)
SOURCE = "#include <deep_gemm/xstage/source_order.hpp>\n" + "".join(
    f"""extern "C" void find_{ranks}(const uint32_t* counts, uint32_t slot, uint32_t* out) {{
    const auto source = xstage::find_source<{ranks}>([&](uint32_t rank_idx) {{ return counts[rank_idx]; }}, slot);
    out[0] = source.rank_idx, out[1] = source.token_idx;
}}
"""
    for ranks in RANKS
)


@pytest.fixture(scope="session")
def find(tmp_path_factory):
    library = compile_header(SOURCE, tmp_path_factory.mktemp("source_order"))

    def sources(counts):
        given_counts, out = (ctypes.c_uint32 * len(counts))(*counts), (ctypes.c_uint32 * 2)()
        found = []
        for slot in range(sum(counts)):
            library[f"find_{len(counts)}"](given_counts, slot, out)
            found.append((out[0], out[1]))
        return found

    return sources


def turns(counts):
    """Every rank's token 0, every rank's token 1, and so on, without the ranks that have run out."""
    return [(rank, token) for token in range(max(counts, default=0)) for rank, count in enumerate(counts) if token < count]


@pytest.mark.parametrize(
    "counts",
    [
        (5,),
        (4, 4),
        (0, 7),
        (7, 0),
        (1, 100),
        (0, 0, 1),
        (3, 0, 9),
        (1, 1, 1, 1, 1, 1, 1, 40),
        (0,) * 71 + (3,),
        tuple(range(72)),
    ],
    ids=str,
)
def test_ranks_take_turns_until_they_run_out(find, counts):
    assert find(counts) == turns(counts)


@settings(max_examples=100)
@given(st.sampled_from(RANKS).flatmap(lambda ranks: st.lists(st.integers(0, 30), min_size=ranks, max_size=ranks)))
def test_every_token_of_every_rank_fills_exactly_one_row(find, counts):
    assert find(tuple(counts)) == turns(counts)
