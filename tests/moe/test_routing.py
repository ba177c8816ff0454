"""Routing: the stated distributions, files of counts and of topk ids, and what is wrong with bad ones."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xstage_plugin.errors import InvalidInputError
from xstage_plugin.moe.routing import balanced_routing, read_routing, skewed_routing


@given(st.integers(1, 300), st.integers(1, 300), st.floats(0, 1e6))
def test_shares_sum_to_one_and_no_expert_gets_a_token_twice(experts, topk, skew):
    topk = min(topk, experts)
    shares = np.array(skewed_routing(experts, topk, skew).shares)
    assert shares.sum() == pytest.approx(1.0)
    assert shares.max() <= 1 / topk + 1e-9
    assert shares.min() >= 0


def test_without_skew_it_is_balanced_and_with_skew_it_follows_the_power_law():
    assert skewed_routing(64, 4, 0.0).shares == pytest.approx(balanced_routing(64).shares)
    shares = sorted(skewed_routing(64, 1, 0.5).shares, reverse=True)
    assert shares[3] / shares[0] == pytest.approx(4**-0.5)


def test_popular_experts_do_not_sit_on_one_rank():
    per_rank = np.array(skewed_routing(256, 8, 0.5).shares).reshape(8, 32).sum(axis=1)
    assert per_rank.max() < 1.6 * per_rank.mean()


def write(path, values):
    if path.suffix == ".npy":
        np.save(path, np.array(values))
    elif path.suffix == ".json":
        path.write_text(json.dumps(values))
    else:
        rows = values if isinstance(values[0], list) else [[value] for value in values]
        path.write_text("\n".join(", ".join(map(str, row)) for row in rows) + "\n")
    return path


@pytest.mark.parametrize("suffix", [".npy", ".json", ".txt", ".csv"])
def test_counts_and_ids_are_read_from_every_format(tmp_path, suffix):
    counts = read_routing(write(tmp_path / f"counts{suffix}", [1, 0, 3, 0]), 4, 2)
    assert counts.shares == (0.25, 0.0, 0.75, 0.0)
    ids = read_routing(write(tmp_path / f"ids{suffix}", [[0, 2], [2, -1], [3, 2]]), 4, 2)
    assert ids.shares == (0.2, 0.0, 0.6, 0.2)
    assert ids.used == pytest.approx(5 / 6)


def test_a_batch_of_padding_only_routes_nothing(tmp_path):
    routing = read_routing(write(tmp_path / "ids.json", [[-1, -1], [-1, -1], [-1, -1]]), 4, 2)
    assert (sum(routing.shares), routing.used) == (0.0, 0.0)


def test_a_count_that_no_token_could_give_alone_means_empty_slots(tmp_path):
    routing = read_routing(write(tmp_path / "counts.json", [10, 0, 0, 0]), 4, 2)
    assert routing.used == pytest.approx(0.5)


@pytest.mark.parametrize("suffix", [".txt", ".csv"])
def test_text_that_could_be_counts_or_ids_is_refused(tmp_path, suffix):
    for values, experts, topk in (([0, 1, 2, 3], 4, 1), ([[0, 1, 2, 3]], 4, 4)):
        with pytest.raises(InvalidInputError, match="could be counts or ids"):
            read_routing(write(tmp_path / f"either{suffix}", values), experts, topk)
    ids = read_routing(write(tmp_path / f"ids{suffix}", [0, 1, 2, 3, 3]), 4, 1)
    assert ids.shares == (0.2, 0.2, 0.2, 0.4)


def test_in_json_a_list_is_counts_and_a_list_of_lists_is_ids(tmp_path):
    assert read_routing(write(tmp_path / "counts.json", [0, 1, 2, 5]), 4, 1).shares == (0, 0.125, 0.25, 0.625)
    assert read_routing(write(tmp_path / "ids.json", [[0], [1], [2], [3]]), 4, 1).shares == (0.25, 0.25, 0.25, 0.25)
    assert read_routing(write(tmp_path / "one.json", [[0]]), 1, 1).shares == (1.0,)


BAD = {
    "a truth value": ([True, 1, 2, 3], "holds no list of numbers"),
    "a number beyond all sizes": ([10**40, 1, 2, 3], "number too large|is 1e"),
    "too few counts": ([1, 2, 3], "3 counts; expected one for each of 4"),
    "negative count": ([1, 2, 3, -4], "count of expert 3 is -4"),
    "NaN": ([1.0, 2.0, float("nan"), 4.0], "count of expert 2 is nan"),
    "id too large": ([[0, 4], [1, 2], [0, 1]], "id 4 of token 0 is outside -1 to 3"),
    "id below -1": ([[0, 1], [-2, 1], [0, 1]], "id -2 of token 1"),
    "id twice": ([[0, 1], [2, 2], [0, 1]], "token 1 names expert 2 twice"),
    "id not whole": ([[0.5, 1.0], [1.0, 2.0], [0.0, 1.0]], "not a whole number"),
    "another topk": ([[0, 1, 2], [1, 2, 3], [0, 1, 2]], r"shape \(3, 3\); expected \(tokens, 2\)"),
    "ragged": ([[0, 1], [1]], "unequal length"),
    "texts": (["a", "b"], "holds no list of numbers"),
    "empty": ([], "holds no list of numbers"),
    "an object": ({"counts": [1]}, "holds no list of numbers"),
    "three dimensions": ([[[1]]], "holds no list of numbers"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_routing_is_refused_with_its_place(tmp_path, case):
    values, reason = BAD[case]
    with pytest.raises(InvalidInputError, match=reason):
        read_routing(write(tmp_path / "routing.json", values), 4, 2)


def test_files_that_hold_no_numbers_are_refused(tmp_path):
    (tmp_path / "words.txt").write_text("1 2\nthree 4\n")
    (tmp_path / "broken.npy").write_bytes(b"not numpy")
    np.savez(tmp_path / "archive.npz", a=np.ones(4))
    (tmp_path / "archive.npz").rename(tmp_path / "archive.npy")
    (tmp_path / "gaps.csv").write_text("0,,1\n")
    (tmp_path / "broken.json").write_text("[1, 2")
    (tmp_path / "empty.txt").write_text("\n")
    for name, reason in (
        ("words.txt", "line 2"),
        ("broken.npy", "not a numpy array"),
        ("broken.json", "not JSON"),
        ("empty.txt", "holds no list"),
        ("archive.npy", "not a numpy array|holds no list"),
        ("gaps.csv", "line 1"),
        ("none.npy", "no such file"),
        ("none.txt", "no such file"),
        (".", "is a directory"),
    ):
        with pytest.raises(InvalidInputError, match=reason):
            read_routing(tmp_path / name, 4, 2)
