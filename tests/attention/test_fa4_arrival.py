import hashlib
from importlib import metadata

import pytest

from xstage_plugin.attention import fa4_arrival
from xstage_plugin.attention.fa4_arrival import (
    FlashAttention4Arrival,
    generation_refusal,
    installed_refusal,
    refusal_of,
    require_awaits,
    require_counters,
)
from xstage_plugin.errors import InvalidInputError

FILE = "flash_attn/cute/flash_fwd.py"


@pytest.fixture
def release(tmp_path, monkeypatch):
    """A folder that holds version 1.0 of a package of one file, the only version that is known."""
    (tmp_path / FILE).parent.mkdir(parents=True)
    (tmp_path / FILE).write_bytes(b"as released")
    monkeypatch.setattr(fa4_arrival, "KNOWN_VERSIONS", {"1.0": {FILE: hashlib.sha256(b"as released").hexdigest()}})
    return tmp_path


def test_the_released_files_of_a_known_version_are_taken(release):
    assert refusal_of("1.0", release) == ""


def test_another_version_is_refused_with_the_known_ones(release):
    assert refusal_of("1.1", release) == "flash-attn-4 1.1 is not one that our kernels derive from; known: 1.0"


def test_an_edited_file_is_refused_by_name(release):
    (release / FILE).write_bytes(b"edited")
    assert refusal_of("1.0", release) == f"{FILE} is not the one of flash-attn-4 1.0; reinstall flash-attn-4==1.0"


def test_a_missing_file_is_refused_with_the_reason(release):
    (release / FILE).unlink()
    assert refusal_of("1.0", release).startswith(f"{FILE} of flash-attn-4 1.0 cannot be read (No such file or directory)")


def test_without_the_package_the_version_to_install_is_said(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    installed_refusal.cache_clear()
    monkeypatch.setattr(metadata, "distribution", missing)
    assert installed_refusal() == "flash-attn-4 is not installed; install flash-attn-4==4.0.0b36"
    installed_refusal.cache_clear()


def test_keys_that_are_never_announced_are_refused():
    with pytest.raises(InvalidInputError, match="longest_keys is 0; expected a length from 1 on, or None for no limit"):
        FlashAttention4Arrival(longest_keys=0)


@pytest.mark.parametrize("sms", [0, -1])
def test_a_kernel_on_no_sm_is_refused(sms):
    with pytest.raises(InvalidInputError, match=f"sms is {sms}; expected"):
        FlashAttention4Arrival(sms=sms)


def test_the_generation_that_was_run_has_a_kernel():
    assert generation_refusal(9, 0, allow_unrun=False) == ""


@pytest.mark.parametrize("minor", [0, 3])
def test_the_kernel_that_nobody_ran_is_refused_with_the_ways_to_allow_it(minor):
    assert generation_refusal(10, minor, allow_unrun=False) == (
        f"fa4-arrival is unrun on sm_10{minor}: compiled, and nobody ran it; it is used only with "
        "XSTAGE_ALLOW_UNRUN=1 or FlashAttention4Arrival(allow_unrun=True)"
    )
    assert generation_refusal(10, minor, allow_unrun=True) == ""


@pytest.mark.parametrize(("major", "minor"), [(8, 0), (11, 0), (12, 0)])
def test_a_generation_without_a_kernel_is_refused_with_those_that_have_one(major, minor):
    expected = f"fa4-arrival is written for sm_90 and sm_100; this GPU is sm_{major}{minor}, use fa4"
    assert generation_refusal(major, minor, allow_unrun=True) == expected


def counters(**changes):
    return {"out": (2, 300, 4, 128), "kv_rows": 600, "arrivals": (2, 4, 300), "dtype": "torch.int32", "stride": 1} | changes


def test_counters_are_as_long_as_the_rows_of_the_output_and_contiguous():
    require_counters(**counters())


def test_the_stride_of_a_single_row_does_not_matter():
    require_counters(**counters(out=(2, 1, 4, 128), arrivals=(2, 4, 1), stride=7))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"arrivals": (2, 300, 4)},
            r"arrivals are torch.int32 \[2, 300, 4\] with innermost stride 1; expected .*\[2, 4, 300\]",
        ),
        ({"dtype": "torch.int64"}, "arrivals are torch.int64 .* expected torch.int32"),
        ({"stride": 8}, "innermost stride 8; expected .* stride 1"),
        ({"kv_rows": 0}, "keys and values have no rows; expected at least 1"),
    ],
)
def test_what_a_kernel_could_not_announce_is_refused(change, message):
    with pytest.raises(InvalidInputError, match=message):
        require_counters(**counters(**change))


def awaited(**changes):
    return {"awaits": (2, 300), "dtype": "torch.int32", "stride": 1, "expected": 8, "queries": 2 * 300 * 4 * 128} | changes


@pytest.mark.parametrize("change", [{}, {"awaits": (2, 1), "stride": 7}, {"awaits": (2, 0)}, {"expected": 1}])
def test_a_kernel_awaits_counters_with_contiguous_rows(change):
    require_awaits(**awaited(**change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"awaits": (300,)}, r"awaits are torch.int32 \[300\] .* expected torch.int32 \[sequences, local rows\]"),
        ({"dtype": "torch.int64"}, "awaits are torch.int64 .* expected torch.int32"),
        ({"stride": 8}, "innermost stride 8; expected .* with stride 1"),
        ({"expected": 0}, "expected is 0 tiles of a row block; expected the number of heads"),
        ({"queries": 0}, "q has no rows or no heads; expected some where rows are awaited"),
    ],
)
def test_what_a_kernel_could_not_await_is_refused(change, message):
    with pytest.raises(InvalidInputError, match=message):
        require_awaits(**awaited(**change))
