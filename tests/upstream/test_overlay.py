"""An overlay is exactly its plan: our headers in their places, links for the rest, whole or absent, however many build it."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from xstage_plugin.upstream import overlay as overlay_module
from xstage_plugin.upstream.errors import HeaderError, MismatchError, OverlayError, TargetRefusedError
from xstage_plugin.upstream.overlay import (
    MANIFEST,
    build_overlay,
    clean,
    find_overlay,
    overlay_fault,
    overlays_folder,
    plan_overlay,
)
from xstage_plugin.upstream.pins import load_pin

BUILDER = """
import sys, time
from pathlib import Path
from xstage_plugin.upstream.overlay import build_overlay, overlay_fault, plan_overlay
from xstage_plugin.upstream.pins import load_pin
name, patches, include, go = sys.argv[1:]
plan = plan_overlay(load_pin(name, Path(patches)), Path(include), Path(patches))
print("ready", flush=True)
while not Path(go).exists():
    time.sleep(0.001)
overlay = build_overlay(plan)
print(overlay.root, overlay.built_now, overlay_fault(overlay.root, plan))
"""


def plan(world):
    return plan_overlay(world.pin, world.include)


@pytest.fixture
def built(world):
    return build_overlay(plan(world))


def test_our_headers_stand_in_their_places_and_the_original_under_its_other_name(world, built):
    scheduler = built.include_root / "deep_gemm/scheduler"
    assert (scheduler / "mega_moe.cuh").read_bytes() == (world.patches / "ours/mega_moe.cuh").read_bytes()
    assert (scheduler / "mega_moe.upstream.cuh").resolve() == (world.include / "deep_gemm/scheduler/mega_moe.cuh").resolve()
    assert (built.include_root / "deep_gemm/xstage/order.hpp").is_file()


def test_everything_else_is_linked_by_the_folder(world, built):
    for path in ("cutlass", "deep_gemm/impls", "deep_gemm/layout", "deep_gemm/scheduler/other.cuh"):
        assert (built.include_root / path).is_symlink()
        assert (built.include_root / path).resolve() == (world.include / path).resolve()
    for path in ("", "deep_gemm", "deep_gemm/scheduler", "deep_gemm/xstage", "deep_gemm/scheduler/mega_moe.cuh"):
        assert not (built.include_root / path).is_symlink()


def test_the_installed_tree_is_not_touched(world):
    def content():
        return {path: path.read_bytes() for path in world.site.rglob("*") if path.is_file()}

    before = content()
    build_overlay(plan(world))
    clean()
    assert content() == before


def test_it_lies_in_the_users_cache_under_the_pins_name_and_a_hash(world, built):
    assert built.root.parent == world.cache / "xstage-plugin/overlays"
    assert built.root.name.startswith("fake-gemm-1.0-")


def test_building_twice_is_building_once(world, built):
    stamp = built.root.stat().st_mtime_ns
    again = build_overlay(plan(world))
    assert (again.root, again.built_now, built.built_now) == (built.root, False, True)
    assert built.root.stat().st_mtime_ns == stamp


def test_another_header_of_ours_is_another_overlay(world, built):
    order = world.patches / "ours/order.hpp"
    order.write_text(order.read_text() + "// changed\n")
    assert find_overlay(plan(world)) is None
    assert build_overlay(plan(world)).root != built.root


def test_another_place_of_the_same_package_is_another_overlay(world, built, tmp_path):
    moved = world.site.rename(tmp_path / "moved")
    assert build_overlay(plan_overlay(world.pin, moved / "deep_gemm/include")).root != built.root


@pytest.mark.parametrize(
    "damage",
    [
        lambda root: (root / "include/deep_gemm/scheduler/mega_moe.cuh").write_text("edited"),
        lambda root: (root / "include/deep_gemm/xstage/order.hpp").unlink(),
        lambda root: (root / "include/cutlass").unlink(),
        lambda root: (root / "include/deep_gemm/stray.cuh").write_text(""),
        lambda root: (root / MANIFEST).unlink(),
        lambda root: (root / MANIFEST).write_text("[]"),
    ],
    ids=["edited", "header gone", "link gone", "stray file", "no manifest", "another manifest"],
)
def test_a_damaged_overlay_is_never_used_and_is_built_again(world, built, damage):
    damage(built.root)
    assert find_overlay(built.plan) is None
    assert build_overlay(built.plan).built_now
    assert overlay_fault(built.root, built.plan) is None
    assert [path.name for path in overlays_folder().iterdir() if path.name != ".lock"] == [built.root.name]


def test_an_overlay_whose_package_is_gone_is_not_used(world, built, tmp_path):
    world.site.rename(tmp_path / "gone")
    assert find_overlay(built.plan) is None


@pytest.mark.parametrize("broken", [False, True], ids=["nothing there", "a broken one there"])
def test_eight_processes_build_one_overlay(world, tmp_path, broken):
    wanted = plan(world)
    if broken:
        (overlays_folder() / wanted.name / "include").mkdir(parents=True)
    go = tmp_path / "go"
    command = [sys.executable, "-c", BUILDER, world.name, str(world.patches), str(world.include), str(go)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(8)]
    for rank in ranks:
        assert rank.stdout.readline() == "ready\n"
    seen = []
    watcher = threading.Thread(target=lambda: seen.extend(_watch(ranks, wanted)))
    go.touch()
    watcher.start()
    answers = [rank.communicate(timeout=60)[0].split() for rank in ranks]
    watcher.join()
    assert {(answer[0], answer[2]) for answer in answers} == {(str(overlays_folder() / wanted.name), "None")}
    assert [answer[1] for answer in answers].count("True") == 1
    assert seen == []
    assert sorted(path.name for path in overlays_folder().iterdir()) == [".lock", wanted.name]


def _watch(ranks, wanted):
    """What is wrong with the overlay at any moment at which it can be found by its manifest."""
    while any(rank.poll() is None for rank in ranks):
        root = overlays_folder() / wanted.name
        if (root / MANIFEST).exists() and (fault := overlay_fault(root, wanted)):
            yield fault
        time.sleep(0.0005)


def test_a_tree_that_is_not_the_pinned_one_gets_no_overlay(world):
    (world.include / "deep_gemm/layout/rooms.cuh").write_text("edited")
    with pytest.raises(MismatchError, match=r"rooms\.cuh"):
        plan(world)
    assert not world.cache.exists()


def test_a_target_that_is_not_ready_gets_no_overlay(world):
    what = 'kind = "wheel"\npackage = "fake-gemm"\nversion = "2.0"\n'
    world.write_pin("fake-gemm-2.0", what, 'status = "not yet"\nreason = "it differs"', shadow=False)
    with pytest.raises(TargetRefusedError, match="it differs"):
        plan_overlay(load_pin("fake-gemm-2.0", world.patches), world.include)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('#include "deep_gemm/a.cuh"\n', "is refused by DeepGEMM's compiler"),
        ("#include <deep_gemm/nowhere.cuh>\n", "neither upstream nor the pin brings"),
    ],
)
def test_a_header_of_ours_that_would_not_hash_is_refused_before_it_is_placed(world, text, message):
    (world.patches / "ours/order.hpp").write_text(text)
    with pytest.raises(HeaderError, match=message):
        plan(world)


def test_a_file_of_upstream_where_a_header_of_ours_goes_is_refused(world):
    (world.include / "deep_gemm/xstage").mkdir()
    (world.include / "deep_gemm/xstage/order.hpp").write_text("theirs")
    with pytest.raises(OverlayError, match=r"order\.hpp: exists upstream"):
        plan(world)


@pytest.mark.parametrize("cache", ["/proc", "a file"])
def test_a_cache_that_cannot_be_written_is_one_line_with_the_variable(world, tmp_path, monkeypatch, cache):
    if cache == "a file":
        cache = str(tmp_path / "file")
        Path(cache).write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    with pytest.raises(OverlayError, match=r"cannot be written.*XDG_CACHE_HOME") as caught:
        build_overlay(plan(world))
    assert "\n" not in str(caught.value)


def test_an_overlay_that_lies_there_is_used_without_a_write(world, built, monkeypatch):
    def refuse(*_, **__):
        raise OSError("read-only")

    for name in ("mkdir", "write_text", "write_bytes", "symlink_to"):
        monkeypatch.setattr(Path, name, refuse)
    monkeypatch.setattr(overlay_module, "_locked", refuse)
    assert not build_overlay(built.plan).built_now


def test_a_cache_path_that_the_compiler_command_would_split_is_refused(world, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "my cache"))
    with pytest.raises(OverlayError, match="blank or a shell character"):
        build_overlay(plan(world))


def test_a_relative_cache_path_is_ignored_as_xdg_says(world, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert overlays_folder() == tmp_path / "home/.cache/xstage-plugin/overlays"


def test_clean_removes_what_it_made_and_nothing_else(world, built, tmp_path):
    folder = overlays_folder()
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / MANIFEST).write_text(json.dumps(built.plan.manifest()))
    (folder / "link").symlink_to(precious)
    (folder / "mine").mkdir()
    (folder / "note.txt").write_text("mine")
    (folder / ".building-empty").mkdir()
    abandoned = folder / ".building-half"
    (abandoned / "include").mkdir(parents=True)
    (abandoned / MANIFEST).write_text(json.dumps(built.plan.manifest()))
    cleaned = clean()
    assert set(cleaned.removed) == {built.root, abandoned, folder / ".building-empty"}
    assert set(cleaned.kept) == {folder / "link", folder / "mine", folder / "note.txt"}
    assert (precious / MANIFEST).exists()
    assert (world.include / "cutlass/cutlass.h").exists()
    assert clean().removed == ()


def test_clean_keeps_the_overlay_in_use(world, built):
    assert clean(in_use=built.root).kept == (built.root,)
    assert overlay_fault(built.root, built.plan) is None


def test_clean_of_nothing_is_nothing(world):
    assert clean().removed == ()
    assert not world.cache.exists()
