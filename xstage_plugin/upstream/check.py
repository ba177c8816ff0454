"""Is an upstream tree the pinned one, and will its run-time compiler take our headers? Reads files, changes nothing."""

from __future__ import annotations

import enum
import hashlib
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from xstage_plugin import env
from xstage_plugin.upstream.errors import (
    HeaderError,
    MismatchError,
    NotInstalledError,
    TargetRefusedError,
    UnknownVersionError,
    UnrunTargetError,
)
from xstage_plugin.upstream.find import Installed
from xstage_plugin.upstream.pins import Pin, Role, Status, source_bytes

HASHED_PREFIX = "deep_gemm"


class FileState(str, enum.Enum):
    """A pinned file on this machine. APPLIED: our shadow stands in its place and the original under its other name."""

    MATCHES = "matches"
    APPLIED = "applied"
    DIFFERS = "differs"
    MISSING = "missing"


@dataclass(frozen=True)
class FileCheck:
    """One file of a pin as found. ``path`` is relative to the include root, or the host library's name."""

    path: str
    state: FileState


def sha256_of(path: Path) -> str | None:
    """SHA-256 of a file in hex, None if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def compare(pin: Pin, include_root: Path, patches: Path | None = None) -> tuple[FileCheck, ...]:
    """Every file of ``pin`` below ``include_root``, and the host library beside it where its hash is pinned."""
    checks = []
    for pinned in pin.files:
        found = sha256_of(include_root / pinned.path)
        state = FileState.MISSING if found is None else FileState.MATCHES if found == pinned.sha256 else FileState.DIFFERS
        if state is FileState.DIFFERS and pinned.role is Role.SHADOWED and _is_applied(pin, pinned.path, include_root, patches):
            state = FileState.APPLIED
        checks.append(FileCheck(pinned.path, state))
    wanted = pin.host.sha256.get(platform.machine()) if pin.host else None
    if pin.host and wanted:
        library = next(iter(sorted(include_root.parent.glob(pin.host.library))), None)
        found = sha256_of(library) if library else None
        state = FileState.MISSING if found is None else FileState.MATCHES if found == wanted else FileState.DIFFERS
        checks.append(FileCheck(library.name if library else pin.host.library, state))
    return tuple(checks)


def mismatches(checks: Iterable[FileCheck]) -> tuple[FileCheck, ...]:
    return tuple(check for check in checks if check.state in (FileState.DIFFERS, FileState.MISSING))


def require_match(pin: Pin, include_root: Path, patches: Path | None = None) -> tuple[FileCheck, ...]:
    """:func:`compare`, where every file matches or carries our change.

    Raises:
        MismatchError: naming the first file that does not, and how many more there are.
    """
    checks = compare(pin, include_root, patches)
    wrong = mismatches(checks)
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        verb = "is missing" if wrong[0].state is FileState.MISSING else "is not the pinned file"
        raise MismatchError(
            f"{pin.name}: {wrong[0].path} {verb}{more} in {include_root}; reinstall the stock library, or use it without xstage"
        )
    return checks


def choose_pin(installed: Installed, pins: Mapping[str, Pin]) -> Pin:
    """The pin of what is installed: a wheel by package and version, a source build by the hashes of its headers.

    Raises:
        NotInstalledError, UnknownVersionError, TargetRefusedError: each with the next step.
        MismatchError: a source build whose headers are those of no pinned commit.
    """
    if installed.root is None or installed.include_root is None:
        raise NotInstalledError(f"{installed.reason}; known: {_known(pins.values(), installed)}")
    known = [pin for pin in pins.values() if pin.import_name == installed.import_name]
    if any(pin.package == installed.package for pin in known if pin.kind == "wheel"):
        for pin in known:
            if (pin.package, pin.version) == (installed.package, installed.version):
                return require_overlay(pin)
        raise UnknownVersionError(
            f"{installed.package} {installed.version} has no pin; known: {_known(known, installed)}; the stock one still works"
        )
    sources = [pin for pin in known if pin.kind == "submodule"]
    for pin in sources:
        if not mismatches(compare(pin, installed.include_root)):
            return require_overlay(pin)
    raise UnknownVersionError(f"{installed} has the headers of no pin; known: {_known(known, installed)}")


def require_overlay(pin: Pin) -> Pin:
    """``pin``, where it has something to build.

    Raises:
        TargetRefusedError: it has no shadow header yet.
    """
    if not pin.has_overlay:
        raise TargetRefusedError(f"{pin.name} is known and not supported yet: {pin.reason}")
    return pin


def require_run(pin: Pin, allow_unrun: bool) -> Pin:
    """``pin``, where its kernels were run and compared, or the caller takes it as it is.

    Raises:
        UnrunTargetError: with the reason, and how to allow it.
    """
    if pin.status is Status.UNRUN and not (allow_unrun or env.allow_unrun()):
        raise UnrunTargetError(f"{pin.name} is {unrun_note(pin)}")
    return pin


def unrun_note(pin: Pin) -> str:
    """What an unrun target is and how it is used all the same, on one line."""
    return f"unrun: {pin.reason}; it is used only with {env.ALLOW_UNRUN}=1 or register(allow_unrun=True)"


def is_applied_in_place(checks: Iterable[FileCheck]) -> bool:
    """Whether the tree itself carries our change (``build_tools`` put it there), so that it needs no overlay."""
    return any(check.state is FileState.APPLIED for check in checks)


def include_faults(text: str) -> tuple[str, ...]:
    """The include lines of a header that DeepGEMM's run-time compiler would refuse when it hashes the header.

    It scans the plain text, comments and inactive branches too, and takes the form ``#include <path>`` only, with one
    space and angle brackets. It opens and hashes every path that begins with ``deep_gemm``; any other is left unhashed.
    """
    found = re.findall(r"#\s*include\s*[<\"][^>\"]+[>\"]", text)
    return tuple(line for line in found if not re.fullmatch(r"#include <[^ >\"](?:[^>\"]*[^ >\"])?>", line))


def hashed_includes(text: str) -> tuple[str, ...]:
    """The paths that the run-time compiler's hash follows from this header."""
    return tuple(path for path in re.findall(r"#include <([^>\"]+)>", text) if path.startswith(HASHED_PREFIX))


def require_hashable(header: str, text: str, has_path: Callable[[str], bool]) -> None:
    """That the run-time compiler can hash ``header`` in an overlay that has the paths for which ``has_path`` is true.

    Raises:
        HeaderError: a form of include that it refuses, or one that it would not find.
    """
    if faults := include_faults(text):
        raise HeaderError(f"{header}: {faults[0]!r} is refused by DeepGEMM's compiler, in comments too; write #include <path>")
    missing = [path for path in hashed_includes(text) if not has_path(path)]
    if missing:
        raise HeaderError(f"{header}: includes <{missing[0]}>, which neither upstream nor the pin brings; add it to [[add]]")


def unlisted_names(text: str, upstream: Iterable[str], names: Iterable[str], own: Iterable[str] = ()) -> set[str]:
    """Upstream's identifiers that our header ``text`` uses and a pin's ``names`` do not list.

    ``upstream`` are the texts of upstream's headers, on the disk of whoever has them. The words of C++ and CUDA do not count,
    nor those of ``own``, the texts of our headers that include nothing of upstream.
    """
    theirs = set().union(*(_identifiers(other) for other in upstream))
    ours = set().union(*(_identifiers(other) for other in own))
    return (_identifiers(text) & theirs) - set(names) - ours - _LANGUAGE


def _identifiers(text: str) -> set[str]:
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)
    text = re.sub(r"//[^\n]*", " ", text)
    text = re.sub(r"(?m)^\s*#\s*(include|pragma)[^\n]*", " ", text)
    text = re.sub(r"\"(?:\\.|[^\"\\\n])*\"", " ", text)
    return set(re.findall(r"\b[A-Za-z_]\w*", re.sub(r"\b\d\w*", " ", text)))


_LANGUAGE = set(
    re.findall(
        r"\S+",
        """alignas alignof and asm auto bool break case char class concept const consteval constexpr const_cast continue
    decltype default delete do double else enum explicit export extern false final float for friend goto if inline int int8_t
    int16_t int32_t int64_t long mutable namespace new noexcept not nullptr operator or override private protected public
    reinterpret_cast requires return short signed size_t sizeof static static_assert static_cast std struct switch template
    this true type typedef typename uint8_t uint16_t uint32_t uint64_t union unsigned using value virtual void volatile while
    define defined elif endif error ifdef ifndef undef i j m n x blockIdx threadIdx gridDim blockDim __syncwarp
    __all_sync __ballot_sync __popc __shfl_sync __ldcg __forceinline__
    __reduce_add_sync __host__ __device__ __CUDACC__ __CUDA_ARCH__ T""",
    )
)


def _is_applied(pin: Pin, path: str, include_root: Path, patches: Path | None) -> bool:
    shadow = next((shadow for shadow in pin.shadows if shadow.path == path), None)
    if shadow is None:
        return False
    pinned = next(pinned for pinned in pin.files if pinned.path == path)
    try:
        ours = {added.path: source_bytes(added.source, patches) for added in pin.ours}
    except HeaderError:
        return False
    return sha256_of(include_root / shadow.original_as) == pinned.sha256 and all(
        sha256_of(include_root / path) == hashlib.sha256(content).hexdigest() for path, content in ours.items()
    )


def _known(pins: Iterable[Pin], installed: Installed) -> str:
    mine = [pin for pin in pins if pin.import_name == installed.import_name]
    return ", ".join(f"{pin.name}" + ("" if pin.ready else f" ({pin.status.value})") for pin in mine)
