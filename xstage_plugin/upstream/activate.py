"""Point an imported DeepGEMM at the overlay, before its first compile, and prove that it went there.

``init`` of its host library sets two include folders: the one that it hashes, at once, and the one that it compiles from, which
the compiler copies into its flags when it is made, at the first compile. After that a change would hash ours and compile the
stock header, under our name. So an activation after the first compile is refused.
"""

from __future__ import annotations

import importlib
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from xstage_plugin.upstream.check import choose_pin, is_applied_in_place, require_match, require_run
from xstage_plugin.upstream.compiler_state import CompilerState, read_compiler_state
from xstage_plugin.upstream.errors import (
    AlreadyCompiledError,
    MismatchError,
    NotInEffectError,
    NotInstalledError,
    UpstreamError,
)
from xstage_plugin.upstream.find import Installed, module_root, probe_installed
from xstage_plugin.upstream.overlay import Overlay, build_overlay, overlay_fault, plan_overlay
from xstage_plugin.upstream.pins import INCLUDE, Pin, load_pins

IMPORT_NAME = "deep_gemm"


@dataclass(frozen=True)
class Prepared:
    """What an activation will use. ``overlay`` is None where the source tree itself carries our change."""

    installed: Installed
    pin: Pin
    overlay: Overlay | None


@dataclass(frozen=True)
class Activation:
    """The library root that this process's DeepGEMM compiles from. ``in_place``: its own, changed by ``build_tools``."""

    pin: Pin
    package_root: Path
    library_root: Path
    in_place: bool = False


@dataclass(frozen=True)
class Proof:
    """Whether the activation is in effect. None: nothing here can tell. ``detail`` says what was seen."""

    in_effect: bool | None
    compiled: bool | None
    detail: str


_active: Activation | None = None
_lock = threading.RLock()


def active() -> Activation | None:
    """The activation of this process, None before there is one."""
    return _active


def prepare() -> Prepared:
    """Find the installed library, check it against its pin, and build its overlay. Does not import the library.

    Raises:
        UpstreamError: not installed, unknown version, known and refused, mismatch, or the cache cannot be written.
    """
    pins = load_pins()
    installed = next(entry for entry in probe_installed(pins.values()) if entry.import_name == IMPORT_NAME)
    pin = choose_pin(installed, pins)
    assert installed.include_root is not None  # choose_pin refused it otherwise
    if is_applied_in_place(require_match(pin, installed.include_root)):
        return Prepared(installed, pin, None)
    return Prepared(installed, pin, build_overlay(plan_overlay(pin, installed.include_root)))


def ensure_active(allow_unrun: bool = False) -> Activation:
    """:func:`prepare`, import the library if nobody has, :func:`activate`. Call it before the first kernel of this process.

    ``allow_unrun``, or XSTAGE_ALLOW_UNRUN=1: also a target whose kernels nobody ever ran.

    Raises:
        UpstreamError: as :func:`prepare` and :func:`activate`.
        NotInstalledError: it is installed and does not import.
    """
    with _lock:
        if _active is not None:
            return _active
        prepared = prepare()
        require_run(prepared.pin, allow_unrun)
        fresh = IMPORT_NAME not in sys.modules
        try:
            module = importlib.import_module(IMPORT_NAME)
        except Exception as error:  # a library built for another torch fails in many ways
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise NotInstalledError(f"{prepared.installed} does not import ({first}); see its requirements") from None
        if prepared.overlay is None:
            return _record(Activation(prepared.pin, _root_of(module), _root_of(module), in_place=True))
        return activate(module, prepared.overlay, fresh=fresh, allow_unrun=allow_unrun)


def activate(module: ModuleType, overlay: Overlay, fresh: bool = False, allow_unrun: bool = False) -> Activation:
    """Make the imported ``module`` compile from ``overlay``. The same overlay twice is once.

    ``fresh`` is the caller's word that the module was imported just now and nothing called; it counts where the state of the
    host library cannot be read. ``allow_unrun`` is as in :func:`ensure_active`.

    Raises:
        UnrunTargetError: the overlay's kernels were never run, and nobody allowed that.
        AlreadyCompiledError: a kernel was compiled before, or nobody can tell.
        MismatchError: ``module`` is not the package that the overlay was made for, or the overlay has changed since.
        UpstreamError: another overlay is active.
        NotInEffectError: the library took the call and still reads another root.
    """
    with _lock:
        require_run(overlay.plan.pin, allow_unrun)
        if _active is not None:
            if _active.library_root == overlay.root:
                return _active
            raise UpstreamError(f"{_active.library_root} is active in this process; start a new process for {overlay.root}")
        root = _root_of(module)
        if root / INCLUDE != overlay.plan.include_root:
            raise MismatchError(
                f"{module.__name__} is loaded from {root}, the overlay is for {overlay.plan.include_root.parent}"
            )
        if fault := overlay_fault(overlay.root, overlay.plan):
            raise MismatchError(f"{overlay.root}: {fault}; build it again: xstage overlay build")
        activation = Activation(overlay.plan.pin, root, overlay.root)
        before = read_compiler_state(root, overlay.plan.pin.host)
        if before.compiled:
            if _same(before.frozen_include, overlay.include_root):
                if not _same(before.hashed_root, overlay.include_root):
                    _init(module, overlay.root)  # somebody reset the root after our compile: hash what it compiles again
                return _record(activation)
            raise AlreadyCompiledError(
                f"{module.__name__} compiled a kernel already, from {before.frozen_include or 'the stock headers'}; "
                "call xstage_plugin.register() before the first call of it"
            )
        if before.compiled is None and not fresh:
            raise AlreadyCompiledError(
                f"cannot tell whether {module.__name__} compiled a kernel already ({before.reason}); "
                f"call xstage_plugin.register() before importing it"
            )
        _init(module, overlay.root)
        after = read_compiler_state(root, overlay.plan.pin.host)
        proof = judge(activation, after)
        if proof.in_effect is False:
            _init(module, root)  # the stock library as it was: never hash ours and compile theirs
            raise NotInEffectError(f"{module.__name__} did not take the overlay {overlay.root}: {proof.detail}")
        return _record(activation)


def prove() -> Proof:
    """Look again at the active library, best after the first compile: is it the overlay that it compiles from? Never raises."""
    if _active is None:
        return Proof(False, None, "nothing is activated in this process")
    return judge(_active, read_compiler_state(_active.package_root, _active.pin.host))


def require_in_effect() -> Proof:
    """:func:`prove`, and an error where the library reads another root.

    Raises:
        NotInEffectError: with what was seen.
    """
    proof = prove()
    if proof.in_effect is False:
        raise NotInEffectError(f"the interleaved schedules are not in effect: {proof.detail}; start a new process")
    return proof


def judge(activation: Activation, state: CompilerState) -> Proof:
    """What ``state`` says about ``activation``. Pure."""
    include = activation.library_root / INCLUDE
    seen = {
        "the root given to it": (state.library_root, activation.library_root),
        "the folder that it hashes": (state.hashed_root, include),
        "the folder that it compiles from": (state.frozen_include, include),
    }
    for what, (found, wanted) in seen.items():
        if found is not None and not _same(found, wanted):
            return Proof(False, state.compiled, f"{what} is {found}; expected {wanted}")
    if state.compiled:
        if state.frozen_include is None:
            return Proof(None, True, "it has compiled, and its flags cannot be read")
        return Proof(True, True, f"it compiles from {include}")
    if state.library_root is None:
        return Proof(None, state.compiled, state.reason or "its root cannot be read")
    return Proof(True, state.compiled, f"it has compiled nothing yet, and will from {include}")


def _record(activation: Activation) -> Activation:
    global _active
    _active = activation
    return activation


def _root_of(module: ModuleType) -> Path:
    root = module_root(module)
    if root is None:
        raise MismatchError(f"{module.__name__} has no file; expected the installed package")
    return root


def _init(module: ModuleType, library_root: Path) -> None:
    """Upstream's own initialisation with another root and its own CUDA home."""
    library: Any = module
    try:
        find_cuda_home = getattr(library, "_find_cuda_home", None) or library.find_cuda_home  # renamed in 0.2
        library._C.init(str(library_root), find_cuda_home())
    except Exception as error:  # AttributeError, an assertion on CUDA's home, or an error of the binding
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NotInEffectError(f"{module.__name__}: its init cannot be called ({first}); is CUDA_HOME set?") from None


def _same(found: str | None, wanted: Path) -> bool:
    return found is not None and Path(found) == wanted
