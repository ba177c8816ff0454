"""The status says for every target what is installed, what differs, and what the overlay is at."""

import json

import pytest

from xstage_plugin.upstream.activate import ensure_active, prepare
from xstage_plugin.upstream.report import status_document


def target(name="fake-gemm-1.0"):
    document = status_document()
    json.dumps(document)
    return next(entry for entry in document["targets"] if entry["target"] == name)


def test_it_follows_the_overlay_from_ready_to_active(readable_world):
    first = target()
    assert (first["installed_version"], first["matches"], first["overlay_built"], first["active"]) == (
        "1.0",
        True,
        False,
        False,
    )
    assert first["verdict"] == "ready, overlay not built yet"
    prepare()
    assert target()["verdict"] == "ready, overlay built"
    ensure_active()
    assert target()["active"]
    assert target()["verdict"].startswith("active: it has compiled nothing yet")
    assert status_document()["verdict"].startswith("fake-gemm-1.0: active")


def test_what_nobody_ran_is_built_and_shown_as_such(readable_world):
    readable_world.make_unrun()
    why = "unrun: nobody ran it; it is used only with XSTAGE_ALLOW_UNRUN=1 or register(allow_unrun=True)"
    assert (target()["status"], target()["verdict"]) == ("unrun", f"overlay not built yet; {why}")
    prepare()
    assert target()["verdict"] == f"overlay built; {why}"
    ensure_active(allow_unrun=True)
    assert target()["verdict"].startswith("active: ")


def test_the_command_line_builds_what_nobody_ran_and_says_so(world, run):
    world.make_unrun()
    code, out, _ = run("overlay", "build")
    assert code == 0
    assert "unrun: nobody ran it; it is used only with XSTAGE_ALLOW_UNRUN=1" in out
    built = json.loads(run("overlay", "build", "--json")[1])
    assert (built["status"], built["built_now"]) == ("unrun", False)


def test_a_file_that_differs_is_named(world):
    (world.include / "deep_gemm/layout/rooms.cuh").write_text("edited")
    assert target()["differing_files"] == ["deep_gemm/layout/rooms.cuh"]
    assert target()["verdict"] == "refused: deep_gemm/layout/rooms.cuh differs; the stock library still works"


def test_an_unknown_version_names_itself_and_the_known_ones(world):
    world.release("9.9")
    assert "fake-gemm 9.9" in target()["verdict"]
    assert status_document()["verdict"].startswith("no known target is installed (fake-gemm 9.9")
    assert "known: fake-gemm-1.0" in status_document()["verdict"]


def test_nothing_installed_is_said(world, monkeypatch):
    monkeypatch.setattr("sys.path", [entry for entry in __import__("sys").path if entry != str(world.site)])
    assert target()["verdict"] == "deep_gemm is not installed (package fake-gemm)"


def test_a_missing_header_of_ours_is_a_verdict_and_no_error(world):
    (world.patches / "ours/order.hpp").unlink()
    assert "our header cannot be read" in target()["verdict"]


@pytest.mark.parametrize("cache", ["/proc", "/a b"])
def test_a_cache_that_does_not_work_is_no_error(world, monkeypatch, cache):
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    assert target()["matches"]
    assert not target()["overlay_built"]
