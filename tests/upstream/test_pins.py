"""Pins: the shipped ones are whole, and a broken one is one line that names the file and the key."""

import re

import pytest

from xstage_plugin.errors import InvalidInputError
from xstage_plugin.upstream.check import hashed_includes, include_faults
from xstage_plugin.upstream.errors import HeaderError
from xstage_plugin.upstream.pins import Role, Status, load_pin, load_pins, read_pin, source_bytes, source_path

SHIPPED = load_pins()
SOURCES = sorted({added.source for pin in SHIPPED.values() for added in pin.ours})


def test_every_target_of_deepgemm_is_pinned():
    assert {"sgl-deep-gemm-0.1.3", "sgl-deep-gemm-0.2.5", "deep-gemm-7f2a703"} <= set(SHIPPED)


@pytest.mark.parametrize("pin", SHIPPED.values(), ids=str)
def test_a_shipped_pin_hashes_what_it_shadows_and_relies_on(pin):
    assert {pinned.role for pinned in pin.files} >= {Role.SHADOWED, Role.RELIED_ON}
    assert all(re.fullmatch(r"[0-9a-f]{64}", pinned.sha256) for pinned in pin.files)
    assert pin.why
    assert set(pin.arch) <= {"sm_90", "sm_100"}


@pytest.mark.parametrize("pin", SHIPPED.values(), ids=str)
def test_a_target_is_ready_or_says_why_not(pin):
    assert pin.has_overlay == bool(pin.shadows) == (pin.schedule_word_byte is not None)
    assert bool(pin.reason) != pin.ready
    assert "\n" not in pin.reason


@pytest.mark.parametrize(
    ("name", "status", "word_byte"),
    [
        ("sgl-deep-gemm-0.1.3", Status.READY, 28),
        ("deep-gemm-7f2a703", Status.UNRUN, 28),
        ("sgl-deep-gemm-0.2.5", Status.UNRUN, 12),
    ],
)
def test_what_was_run_and_where_its_kernels_read_the_schedule(name, status, word_byte):
    assert SHIPPED[name].status is status
    assert SHIPPED[name].schedule_word_byte == word_byte


def test_the_wheel_and_the_submodule_take_the_same_shadow_header():
    wheel, submodule = SHIPPED["sgl-deep-gemm-0.1.3"], SHIPPED["deep-gemm-7f2a703"]
    assert wheel.shadows == submodule.shadows
    assert set(wheel.additions) >= set(submodule.additions)
    assert set(submodule.names) <= set(wheel.names)  # the wheel has a patch as well


@pytest.mark.parametrize("source", SOURCES)
def test_every_header_of_ours_is_there_and_hashable(source):
    if not source_path(source).exists():
        pytest.skip(f"{source} is not written yet")
    text = source_bytes(source).decode()
    assert include_faults(text) == ()
    brought = {added.path for pin in SHIPPED.values() for added in pin.ours}
    brought |= {shadow.original_as for pin in SHIPPED.values() for shadow in pin.shadows}
    own = [path for path in hashed_includes(text) if "xstage" in path or "upstream" in path]
    assert set(own) <= brought


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("xstage-pin/1", "xstage-pin/9", "'schema' is 'xstage-pin/9'"),
        ('name = "fake', 'name = "other', "expected the folder's"),
        ('kind = "wheel"', 'kind = "egg"', "expected one of wheel, submodule"),
        ('version = "1.0"\n', "", "'version' is missing"),
        ('status = "ready"', 'status = "not yet"', "'reason' is missing"),
        ('status = "ready"', 'status = "not yet"\nreason = "later"', "status and shadows disagree"),
        ('status = "ready"', 'status = "unrun"', "'reason' is missing"),
        ('status = "ready"', 'status = "tried"', "expected one of ready, unrun, not yet"),
        ("[schedule_word]\nfirst_byte = 12\n", "", "expected [schedule_word] exactly where there is [[shadow]]"),
        ("first_byte = 12", "first_byte = 13", "'first_byte' is 13; expected a multiple of 4"),
        ("first_byte = 12", "first_byte = -4", "'first_byte' is -4; expected a multiple of 4"),
        ('role = "relied on"', 'role = "liked"', "expected one of shadowed, patched, relied on"),
        ('role = "relied on"', 'role = "shadowed"', "not the paths of [[shadow]]"),
        ('path = "deep_gemm/layout/rooms.cuh"', 'path = "../rooms.cuh"', "expected a relative path"),
        ('path = "deep_gemm/layout/rooms.cuh"', 'path = "/rooms.cuh"', "expected a relative path"),
        ('path = "deep_gemm/layout/rooms.cuh"', 'path = "deep_gemm/scheduler/mega_moe.cuh"', "stands twice"),
        ('source = "patches/ours/order.hpp"', 'source = "else/order.hpp"', "below patches/ or xstage_plugin/"),
        ('names = ["Walk", "next_room"]', 'names = ["Walk", "Walk"]', "none twice"),
        ('sha256 = "', 'sha256 = "x', "expected a SHA-256 in hex"),
    ],
)
def test_a_broken_pin_is_one_line_with_the_key(world, old, new, message):
    path = world.patches / world.name / "pin.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1) if "scheduler" not in new else text.replace(old, new))
    with pytest.raises(InvalidInputError, match=re.escape(message)) as caught:
        read_pin(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_target_suggests_the_near_ones(world):
    with pytest.raises(InvalidInputError, match=r"fake-gemm-1\.1.*did you mean fake-gemm-1\.0"):
        load_pin("fake-gemm-1.1", world.patches)


def test_a_missing_header_of_ours_is_named(world):
    with pytest.raises(HeaderError, match=r"nothing\.hpp"):
        source_bytes("patches/nothing.hpp", world.patches)
