"""A tree that is not the pinned one is refused by name, and a header that the run-time compiler would refuse is found first."""

import pytest

from xstage_plugin.upstream.check import (
    FileState,
    choose_pin,
    compare,
    hashed_includes,
    include_faults,
    require_match,
    unlisted_names,
)
from xstage_plugin.upstream.errors import MismatchError, NotInstalledError, TargetRefusedError, UnknownVersionError
from xstage_plugin.upstream.find import Installed, probe_installed
from xstage_plugin.upstream.pins import load_pins


def choose(world):
    pins = load_pins(world.patches)
    (installed,) = probe_installed(pins.values())
    return choose_pin(installed, pins)


def test_the_pinned_tree_matches(world):
    assert {check.state for check in require_match(world.pin, world.include)} == {FileState.MATCHES}
    assert choose(world).name == world.name


def test_an_edited_file_is_named(world):
    (world.include / "deep_gemm/layout/rooms.cuh").write_text("edited")
    with pytest.raises(MismatchError, match=r"deep_gemm/layout/rooms\.cuh is not the pinned file"):
        require_match(world.pin, world.include)


def test_missing_files_are_named_and_counted(world, tmp_path):
    with pytest.raises(MismatchError, match=r"mega_moe\.cuh is missing and 1 more"):
        require_match(world.pin, tmp_path / "nowhere")


def test_an_unpinned_file_does_not_matter(world):
    (world.include / "cutlass/cutlass.h").write_text("another CUTLASS")
    require_match(world.pin, world.include)


def test_a_pinned_host_library_counts_on_the_machine_that_it_is_pinned_for(world, monkeypatch):
    path = world.patches / world.name / "pin.toml"
    path.write_text(path.read_text().replace("flags_offset = 40", f'flags_offset = 40\nsha256 = {{ abc = "{"0" * 64}" }}'))
    (world.package / "_C.so").write_bytes(b"host")
    require_match(world.pin, world.include)
    monkeypatch.setattr("platform.machine", lambda: "abc")
    with pytest.raises(MismatchError, match=r"_C\.so is not the pinned file"):
        require_match(world.pin, world.include)


def test_an_unknown_version_lists_the_known_ones(world):
    world.write_pin(
        "fake-gemm-2.0", 'kind = "wheel"\npackage = "fake-gemm"\nversion = "2.0"\n', 'status = "not yet"\nreason = "r"', False
    )
    world.release("3.0")
    with pytest.raises(
        UnknownVersionError, match=r"fake-gemm 3\.0 has no pin; known: fake-gemm-1\.0, fake-gemm-2\.0 \(not yet\)"
    ):
        choose(world)


def test_a_known_version_without_a_shadow_header_says_why(world):
    status = 'status = "not yet"\nreason = "its scheduler differs"'
    world.write_pin("fake-gemm-2.0", 'kind = "wheel"\npackage = "fake-gemm"\nversion = "2.0"\n', status, shadow=False)
    world.release("2.0")
    with pytest.raises(TargetRefusedError, match=r"fake-gemm-2\.0 is known and not supported yet: its scheduler differs"):
        choose(world)


def test_a_source_build_is_known_by_its_headers(world):
    world.write_source_pin()
    for info in world.site.glob("*.dist-info/METADATA"):
        info.unlink()
    assert choose(world).name == "fake-source"
    (world.include / "deep_gemm/layout/rooms.cuh").write_text("another commit")
    with pytest.raises(UnknownVersionError, match=r"has the headers of no pin; known: fake-gemm-1\.0, fake-source"):
        choose(world)


def test_nothing_installed_lists_the_known_ones(world):
    with pytest.raises(NotInstalledError, match=r"not there; known: fake-gemm-1\.0"):
        choose_pin(Installed("deep_gemm", reason="not there"), load_pins(world.patches))


def test_a_tree_that_carries_our_change_itself_is_told_apart(world):
    scheduler = world.include / "deep_gemm/scheduler"
    (scheduler / "mega_moe.cuh").rename(scheduler / "mega_moe.upstream.cuh")
    (scheduler / "mega_moe.cuh").write_bytes((world.patches / "ours/mega_moe.cuh").read_bytes())
    assert compare(world.pin, world.include, world.patches)[0].state is FileState.DIFFERS  # our other header is not there
    (world.include / "deep_gemm/xstage").mkdir()
    (world.include / "deep_gemm/xstage/order.hpp").write_bytes((world.patches / "ours/order.hpp").read_bytes())
    assert compare(world.pin, world.include, world.patches)[0].state is FileState.APPLIED


@pytest.mark.parametrize(
    ("line", "fine"),
    [
        ("#include <deep_gemm/a.cuh>", True),
        ("#include <cstdint>", True),
        ('#include "deep_gemm/a.cuh"', False),
        ("# include <cstdint>", False),
        ("#include  <cstdint>", False),
        ("#include <cstdint >", False),
        ('// not #include "a.h" but the other form', False),
        ("// an include without a sign", True),
    ],
)
def test_the_run_time_compiler_takes_one_form_of_include_even_in_comments(line, fine):
    assert (include_faults(f"#pragma once\n{line}\n") == ()) == fine


def test_only_paths_under_deep_gemm_are_hashed():
    assert hashed_includes("#include <cstdint>\n#include <deep_gemm/a.cuh>\n#include <xstage/b.hpp>\n") == ("deep_gemm/a.cuh",)


def test_a_name_of_upstream_that_the_pin_does_not_list_is_found():
    upstream = ["struct Walk { int next_room(); int hidden; };  // a word in a comment"]
    ours = '#include <Walk>\nstruct Mine : Walk { int f() { return next_room() + hidden; } };  // comment\nauto s = "word";'
    assert unlisted_names(ours, upstream, ["Walk", "next_room"]) == {"hidden"}
    assert unlisted_names(ours, upstream, ["Walk", "next_room", "hidden"]) == set()
    assert unlisted_names(ours, upstream, ["Walk", "next_room"], own=["int hidden = 0;"]) == set()
