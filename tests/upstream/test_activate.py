"""An activation before the first compile takes effect and can be proven; afterwards it is refused and nothing is changed."""

import importlib
import shutil
import sys

import pytest

from xstage_plugin.upstream import activate as activation
from xstage_plugin.upstream.activate import activate, active, ensure_active, prepare, prove, require_in_effect
from xstage_plugin.upstream.compiler_state import read_compiler_state
from xstage_plugin.upstream.errors import (
    AlreadyCompiledError,
    MismatchError,
    NotInEffectError,
    NotInstalledError,
    UnrunTargetError,
    UpstreamError,
)
from xstage_plugin.upstream.overlay import build_overlay, plan_overlay


def imported():
    return importlib.import_module("deep_gemm")


def forget(monkeypatch):
    monkeypatch.setattr(activation, "_active", None)


@pytest.mark.parametrize("first", ["nobody", "the program"])
def test_it_works_whether_or_not_the_library_is_imported(readable_world, first):
    if first == "the program":
        imported()
    made = ensure_active()
    assert active() is made
    assert imported()._C.given == [str(readable_world.package), str(made.library_root)]
    assert prove().in_effect


def test_the_proof_holds_before_and_after_the_first_compile(readable_world):
    made = ensure_active()
    assert (prove().in_effect, prove().compiled) == (True, False)
    imported()._C.compile()
    proof = require_in_effect()
    assert (proof.in_effect, proof.compiled) == (True, True)
    assert str(made.library_root) in proof.detail


def test_the_same_overlay_twice_is_once(readable_world):
    made = ensure_active()
    assert ensure_active() is made
    assert activate(imported(), prepare().overlay) is made
    assert len(imported()._C.given) == 2


def test_another_overlay_is_refused(readable_world):
    made = ensure_active()
    order = readable_world.patches / "ours/order.hpp"
    order.write_text(order.read_text() + "// changed\n")
    with pytest.raises(UpstreamError, match=r"is active in this process; start a new process"):
        activate(imported(), prepare().overlay)
    assert active() is made


def test_after_a_compile_it_is_refused_and_the_library_stays_as_it_was(readable_world):
    imported()._C.compile()
    with pytest.raises(AlreadyCompiledError, match=r"compiled a kernel already.*register\(\)"):
        ensure_active()
    assert imported()._C.given == [str(readable_world.package)]
    assert active() is None


def test_a_compile_from_the_overlay_itself_is_no_obstacle(readable_world, monkeypatch):
    made = ensure_active()
    imported()._C.compile()
    forget(monkeypatch)
    assert ensure_active() == made


def test_a_root_that_was_reset_after_a_compile_from_the_overlay_is_set_again(readable_world, monkeypatch):
    ensure_active()
    imported()._C.compile()
    imported()._C.init(str(readable_world.package), "")
    forget(monkeypatch)
    ensure_active()
    assert require_in_effect().in_effect


def test_a_root_that_somebody_resets_is_noticed(readable_world):
    ensure_active()
    imported()._C.init(str(readable_world.package), "/usr/local/cuda")
    with pytest.raises(NotInEffectError, match="start a new process"):
        require_in_effect()


def test_a_compile_from_stock_headers_is_noticed_even_where_the_root_is_ours(readable_world):
    made = ensure_active()
    library = imported()._C
    library.init(str(readable_world.package), "")
    library.compile()
    library.init(str(made.library_root), "")
    proof = prove()
    assert proof.in_effect is False
    assert "the folder that it compiles from" in proof.detail


def test_a_library_that_ignores_the_call_is_an_error_and_gets_its_root_back(readable_world):
    imported()._C.deaf = True
    with pytest.raises(NotInEffectError, match="did not take the overlay"):
        ensure_active()
    assert active() is None
    assert imported()._C.given[-1] == str(readable_world.package)


def test_a_library_that_cannot_be_read_is_taken_only_fresh(world, monkeypatch):
    made = ensure_active()
    assert made.library_root.is_dir()
    assert prove().in_effect is None
    forget(monkeypatch)
    with pytest.raises(AlreadyCompiledError, match=r"cannot tell.*before importing it"):
        ensure_active()


def test_a_module_from_another_place_is_refused(readable_world, tmp_path):
    overlay = prepare().overlay
    shutil.copytree(readable_world.package, tmp_path / "other/deep_gemm")
    sys.path.insert(0, str(tmp_path / "other"))
    try:
        with pytest.raises(MismatchError, match="the overlay is for"):
            activate(imported(), overlay)
    finally:
        sys.path.remove(str(tmp_path / "other"))


def test_an_overlay_that_changed_since_it_was_built_is_refused(readable_world):
    overlay = build_overlay(plan_overlay(readable_world.pin, readable_world.include))
    (overlay.include_root / "cutlass").unlink()
    with pytest.raises(MismatchError, match="xstage overlay build"):
        activate(imported(), overlay)


def test_a_library_that_does_not_import_says_why(world):
    (world.package / "__init__.py").write_text("raise OSError('libtorch is another one\\nmore')")
    with pytest.raises(NotInstalledError, match=r"does not import \(libtorch is another one\)"):
        ensure_active()


def test_a_tree_that_carries_our_change_itself_needs_no_overlay(world):
    scheduler = world.include / "deep_gemm/scheduler"
    (scheduler / "mega_moe.cuh").rename(scheduler / "mega_moe.upstream.cuh")
    shutil.copy(world.patches / "ours/mega_moe.cuh", scheduler / "mega_moe.cuh")
    (world.include / "deep_gemm/xstage").mkdir()
    shutil.copy(world.patches / "ours/order.hpp", world.include / "deep_gemm/xstage")
    made = ensure_active()
    assert made.in_place
    assert made.library_root == world.package.resolve()
    assert not world.cache.exists()


def test_what_nobody_ran_is_refused_with_the_reason_and_the_way_to_use_it(readable_world):
    readable_world.make_unrun()
    with pytest.raises(
        UnrunTargetError,
        match=r"fake-gemm-1\.0 is unrun: nobody ran it; .* XSTAGE_ALLOW_UNRUN=1 or register\(allow_unrun=True\)$",
    ) as caught:
        ensure_active()
    assert "\n" not in str(caught.value)
    assert "deep_gemm" not in sys.modules
    with pytest.raises(UnrunTargetError):
        activate(imported(), prepare().overlay, fresh=True)
    assert active() is None


@pytest.mark.parametrize(("variable", "allowed"), [("1", True), ("0", False), ("", False)])
def test_the_environment_may_allow_what_nobody_ran(readable_world, monkeypatch, variable, allowed):
    readable_world.make_unrun()
    monkeypatch.setenv("XSTAGE_ALLOW_UNRUN", variable)
    if allowed:
        assert ensure_active().pin.name == readable_world.name
        assert prove().in_effect
    else:
        with pytest.raises(UnrunTargetError):
            ensure_active()


def test_a_caller_may_allow_what_nobody_ran(readable_world):
    readable_world.make_unrun()
    assert ensure_active(allow_unrun=True) is active()


def test_a_library_that_calls_its_search_for_cuda_by_the_newer_name_is_taken(readable_world):
    package = readable_world.package / "__init__.py"
    package.write_text(package.read_text().replace("_find_cuda_home", "find_cuda_home"))
    ensure_active()
    assert prove().in_effect


def test_before_an_activation_nothing_is_in_effect(world):
    assert prove().in_effect is False


def test_a_state_that_cannot_be_read_has_a_reason(readable_world):
    state = read_compiler_state(readable_world.package, readable_world.pin.host)
    assert (state.compiled, state.library_root) == (None, None)
    assert "is loaded in this process" in state.reason
    assert read_compiler_state(readable_world.package, None).reason


def test_a_stripped_library_still_shows_its_root(readable_world):
    strip = shutil.which("strip")
    if strip is None:
        pytest.skip("needs strip")
    import subprocess

    subprocess.run([strip, readable_world.package / "_C.so"], check=True)
    imported()
    state = read_compiler_state(readable_world.package, readable_world.pin.host)
    assert state.compiled is None
    assert state.library_root == str(readable_world.package)
    assert "stripped" in state.reason
