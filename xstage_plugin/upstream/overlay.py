"""The overlay: a library root whose headers are links to the installed ones, and ours along the shadowed paths.

DeepGEMM derives one thing from its library root: the include folder below it. So an overlay is that folder. Everything in it
follows from a plan that is computed from the pin, our headers and the installed tree; building it and checking it are the same
plan. A tree that is not exactly its plan (incomplete, edited, upstream moved) is never used.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from xstage_plugin import env
from xstage_plugin.upstream.check import require_hashable, require_match, require_overlay
from xstage_plugin.upstream.errors import OverlayError
from xstage_plugin.upstream.insertions import insert, parse_insertions
from xstage_plugin.upstream.pins import INCLUDE, Patch, Pin, source_bytes

SCHEMA = "xstage-overlay/1"
MANIFEST = "overlay.json"
BUILDING = ".building-"
LOCK = ".lock"
# The root goes unquoted into the compiler's command line.
SAFE_PATH = re.compile(r"[A-Za-z0-9_./+@%=:,-]+")


@dataclass(frozen=True)
class OverlayPlan:
    """What an overlay holds, by path below its include folder.

    Attributes:
        links: path to the absolute target; a folder that holds nothing of ours is one link.
        contents: our headers, as bytes.
        folders: the real folders, parents first.
        digest: of all of it and of the pinned hashes; part of the overlay's name.
    """

    pin: Pin
    include_root: Path
    links: Mapping[str, str]
    contents: Mapping[str, bytes]
    folders: tuple[str, ...]
    digest: str

    @property
    def name(self) -> str:
        return f"{self.pin.name}-{self.digest}"

    def manifest(self) -> dict[str, str]:
        return {"schema": SCHEMA, "pin": self.pin.name, "digest": self.digest, "upstream": str(self.include_root)}


@dataclass(frozen=True)
class Overlay:
    """An overlay on the disk that is exactly its plan. ``root`` is what upstream's ``init`` takes as the library root."""

    root: Path
    plan: OverlayPlan
    built_now: bool

    @property
    def include_root(self) -> Path:
        return self.root / INCLUDE


@dataclass(frozen=True)
class Cleaned:
    """What :func:`clean` removed, and what it left because it did not make it or because it is in use here."""

    removed: tuple[Path, ...]
    kept: tuple[Path, ...]


def overlays_folder() -> Path:
    """Where overlays lie: ``xstage-plugin/overlays`` in the user's cache.

    Raises:
        OverlayError: the user has no home, or the path has a character that upstream's compiler command would not survive.
    """
    home = env.cache_home()
    if home is None:
        raise OverlayError(f"no folder for overlays: there is no home directory; set {env.CACHE_HOME} to an absolute path")
    folder = home / "xstage-plugin" / "overlays"
    if not SAFE_PATH.fullmatch(str(folder)):
        raise OverlayError(
            f"{folder}: has a blank or a shell character, which DeepGEMM's compiler command takes unquoted; "
            f"set {env.CACHE_HOME} to a plain path"
        )
    return folder


def plan_overlay(pin: Pin, include_root: Path, patches: Path | None = None) -> OverlayPlan:
    """What the overlay of ``pin`` over the installed headers ``include_root`` holds. Writes nothing.

    Raises:
        TargetRefusedError: the pin has no shadow header yet.
        MismatchError: the installed headers are not the pinned ones.
        HeaderError: a header of ours is missing, or has includes that upstream's compiler refuses.
        OverlayError: the installed tree cannot be listed, or has something where a header of ours goes.
    """
    require_overlay(pin)
    include_root = include_root.resolve()
    require_match(pin, include_root, patches)
    contents = {added.path: source_bytes(added.source, patches) for added in pin.ours}
    contents |= {patch.path: _patched(patch, include_root, patches) for patch in pin.patches}
    originals = {shadow.original_as: str(include_root / shadow.path) for shadow in pin.shadows}
    for path in (*(added.path for added in pin.additions), *originals):
        if os.path.lexists(include_root / path):
            raise OverlayError(
                f"{include_root / path}: exists upstream, where a header of ours goes; reinstall the stock library"
            )
    folders = _folders_along([*contents, *originals])
    links = dict(originals)
    for folder in folders:
        for child in _children(include_root / folder):
            path = str(PurePosixPath(folder, child))
            if path not in contents and path not in folders:
                links[path] = str(include_root / path)
    for path, content in contents.items():
        text = content.decode("utf-8", errors="replace")
        require_hashable(path, text, lambda p: p in contents or p in originals or (include_root / p).is_file())
    digest = _digest(pin, include_root, links, contents)
    return OverlayPlan(pin, include_root, dict(sorted(links.items())), contents, folders, digest)


def _patched(patch: Patch, include_root: Path, patches: Path | None) -> bytes:
    """Upstream's header with our lines. Its hash was checked, so that what is read is what the patch was made for."""
    insertions = parse_insertions(source_bytes(patch.source, patches).decode("utf-8", errors="replace"), patch.source)
    original = (include_root / patch.path).read_text(encoding="utf-8")
    return insert(original, insertions, patch.source).encode()


def find_overlay(plan: OverlayPlan) -> Overlay | None:
    """The overlay of ``plan`` if it lies in the cache, whole."""
    root = overlays_folder() / plan.name
    return Overlay(root, plan, built_now=False) if overlay_fault(root, plan) is None else None


def build_overlay(plan: OverlayPlan) -> Overlay:
    """The overlay of ``plan``, built unless it lies there whole. Any number of processes may do this at once.

    Raises:
        OverlayError: the cache cannot be written, or what was written cannot be read back.
    """
    if found := find_overlay(plan):
        return found
    folder = overlays_folder()
    root = folder / plan.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            built = overlay_fault(root, plan) is not None
            if built:
                _build(plan, folder, root)
    except OSError as error:
        raise OverlayError(
            f"{folder}: the overlay cannot be written ({error.strerror or error}); set a writable {env.CACHE_HOME}"
        ) from None
    if fault := overlay_fault(root, plan):
        raise OverlayError(f"{root}: the overlay did not come out as planned ({fault}); run: xstage overlay clean")
    return Overlay(root, plan, built_now=built)


def overlay_fault(root: Path, plan: OverlayPlan) -> str | None:
    """Why the tree at ``root`` is not exactly ``plan``, or None if it is."""
    include = root / INCLUDE
    try:
        if json.loads((root / MANIFEST).read_text(encoding="utf-8")) != plan.manifest():
            return "its manifest is another one"
        for folder in plan.folders:
            wanted = {
                PurePosixPath(path).name for path in (*plan.links, *plan.contents, *plan.folders) if _parent(path) == folder
            }
            if (include / folder).is_symlink() or set(os.listdir(include / folder)) != wanted - {""}:
                return f"{folder or INCLUDE} does not have the planned entries"
        for path, target in plan.links.items():
            if os.readlink(include / path) != target or not os.path.exists(target):
                return f"{path} does not link to {target}"
        for path, content in plan.contents.items():
            if (include / path).is_symlink() or (include / path).read_bytes() != content:
                return f"{path} is not our header"
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except (OSError, ValueError) as error:
        return f"it cannot be read ({getattr(error, 'strerror', None) or 'no manifest'})"
    return None


def clean(in_use: Path | None = None) -> Cleaned:
    """Remove every overlay, finished or abandoned. Follows no link, and leaves what has no manifest of ours.

    ``in_use`` is the overlay that this process reads; it stays. Another process that compiles from one will fail to compile.

    Raises:
        OverlayError: something of ours cannot be removed.
    """
    folder = overlays_folder()
    if not folder.is_dir():
        return Cleaned((), ())
    removed, kept = [], []
    try:
        with _locked(folder):
            for path in sorted(folder.iterdir()):
                if path.name == LOCK:
                    continue
                if path == in_use or not _is_ours(path):
                    kept.append(path)
                    continue
                shutil.rmtree(path)
                removed.append(path)
    except OSError as error:
        raise OverlayError(f"{folder}: cannot be cleaned ({error.strerror or error}); remove it by hand") from None
    return Cleaned(tuple(removed), tuple(kept))


def _build(plan: OverlayPlan, folder: Path, root: Path) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=BUILDING, dir=folder))
    try:
        # First, so that what is left of a process that died here is known as ours.
        (temporary / MANIFEST).write_text(json.dumps(plan.manifest()), encoding="utf-8")
        include = temporary / INCLUDE
        for path in plan.folders:
            (include / path).mkdir()
        for path, target in plan.links.items():
            (include / path).symlink_to(target)
        for path, content in plan.contents.items():
            (include / path).write_bytes(content)
        if os.path.lexists(root):  # a broken one: out of the way by a rename, so that nobody sees half of it
            aside = Path(tempfile.mkdtemp(prefix=BUILDING, dir=folder))
            os.rename(root, aside / root.name)
            shutil.rmtree(aside)
        try:
            os.rename(temporary, root)
        except OSError as error:  # where locks do not work another process may be faster: its tree is the one, ours goes
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time. On a file system without locks all go on: the rename alone keeps half-built trees unseen."""
    with open(folder / LOCK, "a", encoding="utf-8") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_ours(path: Path) -> bool:
    if path.is_symlink() or not path.is_dir():
        return False
    if path.name.startswith(BUILDING) and not any(path.iterdir()):
        return True
    manifests = [path / MANIFEST, *(path.glob(f"*/{MANIFEST}") if path.name.startswith(BUILDING) else ())]
    for manifest in manifests:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            return bool(json.loads(manifest.read_text(encoding="utf-8")).get("schema") == SCHEMA)
    return False


def _folders_along(paths: list[str]) -> tuple[str, ...]:
    """Every folder on the way to ``paths``, "" (the include folder itself) first."""
    found = {""}
    for path in paths:
        found.update("" if str(parent) == "." else str(parent) for parent in PurePosixPath(path).parents)
    return tuple(sorted(found, key=lambda folder: (len(PurePosixPath(folder).parts), folder)))


def _children(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []  # a folder that only we have
    except OSError as error:
        raise OverlayError(f"{folder}: cannot be listed ({error.strerror}); reinstall the stock library") from None


def _parent(path: str) -> str | None:
    if path == "":
        return None
    parent = str(PurePosixPath(path).parent)
    return "" if parent == "." else parent


def _digest(pin: Pin, include_root: Path, links: Mapping[str, str], contents: Mapping[str, bytes]) -> str:
    document = {
        "schema": SCHEMA,
        "pin": pin.name,
        "upstream": str(include_root),
        "files": {pinned.path: pinned.sha256 for pinned in pin.files},
        "links": dict(links),
        "contents": {path: hashlib.sha256(content).hexdigest() for path, content in contents.items()},
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]
