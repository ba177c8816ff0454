import hashlib
from importlib import metadata

import pytest

from xstage_plugin.attention import fa4_arrival
from xstage_plugin.attention.fa4_arrival import (
    FlashAttention4Arrival,
    generation_refusal,
    installed_refusal,
    refusal_of,
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
