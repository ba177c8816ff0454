"""The pins: for every upstream version that we know, the files that our change rests on and where our headers go.

One folder of ``patches/`` a target, each with a ``pin.toml``. Paths, hashes and names, and no text of upstream.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from xstage_plugin.bundled import bundled_folder
from xstage_plugin.checks import unknown_name
from xstage_plugin.errors import InvalidInputError
from xstage_plugin.toml_table import Table
from xstage_plugin.upstream.errors import HeaderError

SCHEMA = "xstage-pin/1"
SOURCE_TREE = "source tree"
INCLUDE = "include"  # the folder of headers inside the Python package, for the wheel and for the repository


class Role(str, enum.Enum):
    """What a pinned file is to us: replaced by a shadow header, or read by it or by the kernels that instantiate it."""

    SHADOWED = "shadowed"
    PATCHED = "patched"
    RELIED_ON = "relied on"


class Status(str, enum.Enum):
    """How far a target is.

    READY: its shadow header was run on a GPU and compared. UNRUN: the overlay builds and its kernels compile, and nobody ever
    ran them; it is activated for whoever asks for just that. NOT_YET: there is no shadow header.
    """

    READY = "ready"
    UNRUN = "unrun"
    NOT_YET = "not yet"


@dataclass(frozen=True)
class PinnedFile:
    """One upstream file: path relative to the include root, SHA-256 in hex."""

    path: str
    sha256: str
    role: Role


@dataclass(frozen=True)
class Addition:
    """A header of ours at ``path`` of the overlay. ``source`` begins with ``patches/`` or ``xstage_plugin/``."""

    path: str
    source: str


@dataclass(frozen=True)
class Shadow(Addition):
    """A header of ours in place of upstream's, which it includes under the path ``original_as``."""

    original_as: str


@dataclass(frozen=True)
class Patch:
    """Lines of ours for upstream's header at ``path``: an insertion-only diff at ``source``, which is as an addition's."""

    path: str
    source: str


@dataclass(frozen=True)
class HostSymbols:
    """Where a running process keeps the state of the run-time compiler.

    Attributes:
        library: file name pattern of the host library in the package folder.
        library_root, include_root: symbols of the paths (libstdc++ ``std::filesystem::path``) that ``init`` sets.
        compiler: symbol whose first word is a null pointer until the first compile.
        flags_offset: bytes from that pointer's target to the compiler's command-line flags (``std::string``).
        sha256: of the host library, by machine (``platform.machine()``); a machine without an entry is not checked.
    """

    library: str
    library_root: str
    include_root: str
    compiler: str
    flags_offset: int
    sha256: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Pin:
    """One upstream version.

    ``kind`` is "wheel" (package, version), "submodule" (repository, commit, path, package_path) or "source tree" (repository,
    commit, path). Headers of the first two go to a run-time compiler, from an overlay or in place; a source tree is patched
    in place and built by upstream's own procedure.

    ``reason`` says why a target is not ready; it is empty where it is. ``names`` are the upstream identifiers that our shadow
    headers may use. ``schedule_word_byte`` is the first byte, in the symmetric buffer, of the 32 bits that carry the schedule
    to the kernels; None where there is no shadow header.
    """

    name: str
    kind: str
    import_name: str
    arch: tuple[str, ...]
    why: str
    status: Status
    files: tuple[PinnedFile, ...]
    package: str = ""
    version: str = ""
    repository: str = ""
    commit: str = ""
    path: str = ""
    package_path: str = ""
    reason: str = ""
    names: tuple[str, ...] = ()
    shadows: tuple[Shadow, ...] = ()
    additions: tuple[Addition, ...] = ()
    patches: tuple[Patch, ...] = ()
    schedule_word_byte: int | None = None
    host: HostSymbols | None = None

    @property
    def ready(self) -> bool:
        return self.status is Status.READY

    @property
    def has_overlay(self) -> bool:
        """Whether there is something to build: the target is ready, or unrun."""
        return self.status is not Status.NOT_YET and self.kind != SOURCE_TREE

    @property
    def folder(self) -> str:
        """Where in the repository the paths of :attr:`files` begin."""
        return f"{self.package_path}/{INCLUDE}" if self.package_path else ""

    @property
    def ours(self) -> tuple[Addition, ...]:
        """Every header of ours, the shadows last: a tree is safe to read at any moment while they are placed in this order."""
        return (*self.additions, *self.shadows)

    def __str__(self) -> str:
        what = f"{self.package} {self.version}" if self.kind == "wheel" else f"{self.repository} at {self.commit[:7]}"
        return f"{self.name} ({what})"


def patches_folder() -> Path:
    """The folder of the pins: in the installed package, or beside it in a source tree.

    Raises:
        InvalidInputError: in neither place.
    """
    package = bundled_folder(".")
    for folder in (package / "patches", package.parent / "patches"):
        if any(folder.glob("*/pin.toml")):
            return folder
    raise InvalidInputError(f"no pins in {package / 'patches'} or {package.parent / 'patches'}; reinstall xstage-plugin")


def load_pins(folder: Path | None = None) -> dict[str, Pin]:
    """The pins of libraries that compile at run time, by name. ``folder`` is for tests and tools; by default it is
    :func:`patches_folder`.

    Raises:
        InvalidInputError: a pin is malformed; the message names the file and the key.
    """
    return {name: pin for name, pin in _load_all(folder).items() if pin.kind != SOURCE_TREE}


def load_source_trees(folder: Path | None = None) -> dict[str, Pin]:
    """The pins of trees that are built from source, by name; as :func:`load_pins`."""
    return {name: pin for name, pin in _load_all(folder).items() if pin.kind == SOURCE_TREE}


def load_pin(name: str, folder: Path | None = None) -> Pin:
    """The pin of any kind. Raises InvalidInputError for an unknown name, with the near ones."""
    pins = _load_all(folder)
    if name not in pins:
        raise unknown_name("target", name, pins)
    return pins[name]


def read_pin(path: Path) -> Pin:
    """One ``pin.toml``.

    Raises:
        InvalidInputError: not a pin, or one that contradicts itself.
    """
    table = _PinTable.read_pin(path)
    if table.text("schema") != SCHEMA:
        raise InvalidInputError(f"{path}: 'schema' is {table.text('schema')!r}; expected {SCHEMA!r}")
    kind = table.choice("kind", ("wheel", "submodule", SOURCE_TREE))
    status = Status(table.choice("status", tuple(Status)))
    wheel = kind == "wheel"
    pin = Pin(
        name=table.text("name"),
        kind=kind,
        import_name=table.text("import_name"),
        arch=table.texts("arch"),
        why=table.text("why"),
        status=status,
        files=tuple(_file(entry) for entry in table.tables("file")),
        package=table.text("package") if wheel else "",
        version=table.text("version") if wheel else "",
        repository="" if wheel else table.text("repository"),
        commit="" if wheel else table.matching("commit", r"[0-9a-f]{40}", "a full commit in hex"),
        path="" if wheel else _relative(table, "path"),
        package_path=_relative(table, "package_path") if kind == "submodule" else "",
        reason="" if status is Status.READY else table.text("reason"),
        names=table.texts("names") if "names" in table else (),
        shadows=tuple(_shadow(entry) for entry in (table.tables("shadow") if "shadow" in table else ())),
        additions=tuple(_addition(entry) for entry in (table.tables("add") if "add" in table else ())),
        patches=tuple(_patch(entry) for entry in (table.tables("patch") if "patch" in table else ())),
        schedule_word_byte=_word_byte(table.table("schedule_word")) if "schedule_word" in table else None,
        host=_host(table.table("host")) if "host" in table else None,
    )
    _check_consistent(pin, path)
    return pin


def source_path(source: str, patches: Path | None = None) -> Path:
    """Where the header ``source`` of a pin lies on this machine."""
    top, _, rest = source.partition("/")
    return (patches or patches_folder()) / rest if top == "patches" else bundled_folder(rest)


def source_bytes(source: str, patches: Path | None = None) -> bytes:
    """The content of a header of ours.

    Raises:
        HeaderError: it is not there.
    """
    path = source_path(source, patches)
    try:
        return path.read_bytes()
    except OSError as error:
        raise HeaderError(f"{path}: our header cannot be read ({error.strerror}); reinstall xstage-plugin") from None


def _load_all(folder: Path | None) -> dict[str, Pin]:
    pins = [read_pin(path) for path in sorted((folder or patches_folder()).glob("*/pin.toml"))]
    return {pin.name: pin for pin in pins}


class _PinTable(Table):
    """A table with the value kinds of a pin."""

    @classmethod
    def read_pin(cls, path: Path) -> _PinTable:
        return cls(Table.read(path, "pin")._values, str(path))

    @classmethod
    def of(cls, table: Table) -> _PinTable:
        return cls(table._values, table.where)

    def texts(self, key: str) -> tuple[str, ...]:
        values = self._get(key, list, "a list of texts", None)
        if not all(isinstance(value, str) and value for value in values) or len(set(values)) != len(values):
            raise self._wrong(key, values, "a list of texts, none empty, none twice")
        return tuple(values)

    def choice(self, key: str, known: tuple[str, ...]) -> str:
        if self.text(key) not in known:
            raise self._wrong(key, self.text(key), "one of " + ", ".join(known))
        return self.text(key)

    def matching(self, key: str, pattern: str, expected: str) -> str:
        if not re.fullmatch(pattern, self.text(key)):
            raise self._wrong(key, self.text(key), expected)
        return self.text(key)


def _file(entry: Table) -> PinnedFile:
    table = _PinTable.of(entry)
    role = Role(table.choice("role", tuple(role.value for role in Role)))
    return PinnedFile(_relative(table, "path"), _sha256(table, "sha256"), role)


def _shadow(entry: Table) -> Shadow:
    return Shadow(_relative(entry, "path"), _source(entry), original_as=_relative(entry, "original_as"))


def _addition(entry: Table) -> Addition:
    return Addition(_relative(entry, "path"), _source(entry))


def _patch(entry: Table) -> Patch:
    return Patch(_relative(entry, "path"), _source(entry))


def _word_byte(entry: Table) -> int:
    byte = entry.integer("first_byte")
    if byte < 0 or byte % 4:
        raise InvalidInputError(f"{entry.where}: 'first_byte' is {byte}; expected a multiple of 4, from 0")
    return byte


def _host(entry: Table) -> HostSymbols:
    hashes = _PinTable.of(entry.table("sha256")) if "sha256" in entry else None
    return HostSymbols(
        library=entry.text("library"),
        library_root=entry.text("library_root"),
        include_root=entry.text("include_root"),
        compiler=entry.text("compiler"),
        flags_offset=entry.integer("flags_offset"),
        sha256={machine: _sha256(hashes, machine) for machine in hashes.keys()} if hashes else {},  # noqa: SIM118 - no dict
    )


def _sha256(table: Table, key: str) -> str:
    return _PinTable.of(table).matching(key, r"[0-9a-f]{64}", "a SHA-256 in hex")


def _relative(table: Table, key: str) -> str:
    value = table.text(key)
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts or str(path) != value or value in ("", "."):
        raise InvalidInputError(f"{table.where}: {key!r} is {value!r}; expected a relative path in its shortest form")
    return value


def _source(table: Table) -> str:
    value = _relative(table, "source")
    if not value.startswith(("patches/", "xstage_plugin/")):
        raise InvalidInputError(f"{table.where}: 'source' is {value!r}; expected a path below patches/ or xstage_plugin/")
    return value


def _check_consistent(pin: Pin, path: Path) -> None:
    if pin.name != path.parent.name:
        raise InvalidInputError(f"{path}: 'name' is {pin.name!r}; expected the folder's, {path.parent.name!r}")
    placed = [pinned.path for pinned in pin.files] + [added.path for added in pin.additions]
    placed += [shadow.original_as for shadow in pin.shadows]
    if len(set(placed)) != len(placed):
        raise InvalidInputError(f"{path}: a path stands twice among file, add and original_as; expected each once")
    if pin.has_overlay != bool(pin.shadows):
        raise InvalidInputError(f"{path}: status and shadows disagree; expected [[shadow]] exactly where there is an overlay")
    if pin.has_overlay != (pin.schedule_word_byte is not None):
        raise InvalidInputError(f"{path}: status and word disagree; expected [schedule_word] exactly where there is [[shadow]]")
    shadowed = {pinned.path for pinned in pin.files if pinned.role is Role.SHADOWED}
    if pin.has_overlay and shadowed != {shadow.path for shadow in pin.shadows}:
        raise InvalidInputError(f"{path}: the files of role 'shadowed' are not the paths of [[shadow]]; expected the same set")
    patched = {pinned.path for pinned in pin.files if pinned.role is Role.PATCHED}
    if patched != {patch.path for patch in pin.patches}:
        raise InvalidInputError(f"{path}: the files of role 'patched' are not the paths of [[patch]]; expected the same set")
