"""Whether DeepGEMM's run-time compiler exists already in this process, and which root it was given. Reads, never calls.

The host library keeps the compiler behind a pointer that is null until the first compile, and freezes the include folder into
the compiler's flags at that moment. Python has no view of either, so this reads the process's own memory: a symbol's offset
from the library's file, its load address from /proc/self/maps, the words from /proc/self/mem (where a wrong address is an error
and not a crash). What cannot be read is None, with the reason.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from xstage_plugin.upstream.pins import HostSymbols

LONGEST_TEXT = 1 << 16
_SYMBOL = struct.Struct("<IBBHQQ")  # ELF64: name, info, other, section, value, size
_SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, info, align, entry size
_SYMBOL_TABLES = (2, 11)  # SHT_SYMTAB (has the local symbols; gone from a stripped library), SHT_DYNSYM


@dataclass(frozen=True)
class CompilerState:
    """What the run-time compiler of this process is at.

    Attributes:
        compiled: it exists, so its include folder is frozen; None where that cannot be told.
        library_root: what ``init`` was last given.
        hashed_root: the include folder that goes into the hash of a kernel.
        frozen_include: the include folder that an existing compiler really passes on.
        reason: why something is None.
    """

    compiled: bool | None = None
    library_root: str | None = None
    hashed_root: str | None = None
    frozen_include: str | None = None
    reason: str = ""


def read_compiler_state(package_root: Path, symbols: HostSymbols | None) -> CompilerState:
    """The state of the host library that this process has loaded from ``package_root``. Never raises."""
    if symbols is None:
        return CompilerState(reason="the pin names no symbols of the host library")
    try:
        library, base = _loaded_library(package_root, symbols.library)
        offsets = symbol_offsets(library, {symbols.library_root, symbols.include_root, symbols.compiler})
        with _Memory(base) as memory:
            compiler = memory.word(offsets[symbols.compiler]) if symbols.compiler in offsets else None
            flags = memory.text(compiler + symbols.flags_offset, absolute=True) if compiler else None
            return CompilerState(
                compiled=None if compiler is None else compiler != 0,
                library_root=_path(memory, offsets, symbols.library_root),
                hashed_root=_path(memory, offsets, symbols.include_root),
                frozen_include=_include_of(flags),
                reason="" if compiler is not None else f"{library.name} is stripped of its local symbols",
            )
    except _UnreadableError as error:
        return CompilerState(reason=str(error))
    except (OSError, ValueError, struct.error) as error:
        return CompilerState(reason=f"this process's memory cannot be read ({getattr(error, 'strerror', None) or error})")


def symbol_offsets(library: Path, wanted: set[str]) -> dict[str, int]:
    """Offset from the load address of each symbol of an ELF64 library; a symbol that it does not have is left out."""
    data = library.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise _UnreadableError(f"{library.name} is no 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [_SECTION.unpack_from(data, table + index * entry_size) for index in range(count)]
    found: dict[str, int] = {}
    names = {name.encode() for name in wanted}
    for _, kind, _, _, offset, size, link, _, _, _ in sections:
        if kind not in _SYMBOL_TABLES:
            continue
        text_start, text_size = sections[link][4], sections[link][5]
        texts = data[text_start : text_start + text_size]
        starts = {texts.find(b"\0" + name + b"\0") + 1: name.decode() for name in names}
        starts.pop(0, None)
        for name, _, _, section, value, _ in _SYMBOL.iter_unpack(data[offset : offset + size]):
            if section and name in starts:
                found[starts[name]] = value
    return found


class _UnreadableError(Exception):
    pass


class _Memory:
    """This process's memory, addressed from the load address of one library."""

    def __init__(self, base: int) -> None:
        self._base = base

    def __enter__(self) -> _Memory:
        self._file = os.open("/proc/self/mem", os.O_RDONLY)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def word(self, offset: int, absolute: bool = False) -> int:
        return int.from_bytes(self._read(offset if absolute else self._base + offset, 8), "little")

    def text(self, offset: int, absolute: bool = False) -> str | None:
        """A libstdc++ ``std::string`` (pointer, size, ...), None if those two words cannot be one."""
        pointer, size = self.word(offset, absolute), self.word(offset + 8, absolute)
        if pointer == 0 or size > LONGEST_TEXT:
            return None
        raw = self._read(pointer, size) if size else b""
        return None if b"\0" in raw else raw.decode("utf-8", errors="surrogateescape")

    def _read(self, address: int, size: int) -> bytes:
        raw = os.pread(self._file, size, address)
        if len(raw) != size:
            raise _UnreadableError(f"{size} bytes at {address:#x} of this process cannot be read")
        return raw


def _loaded_library(package_root: Path, pattern: str) -> tuple[Path, int]:
    candidates = {str(path.resolve()) for path in package_root.glob(pattern)}
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        fields = line.split(maxsplit=5)
        # The mapping of file offset 0 starts at the load address.
        if len(fields) == 6 and int(fields[2], 16) == 0 and fields[5] in candidates:
            return Path(fields[5]), int(fields[0].partition("-")[0], 16)
    raise _UnreadableError(f"no {pattern} of {package_root} is loaded in this process")


def _path(memory: _Memory, offsets: dict[str, int], symbol: str) -> str | None:
    return memory.text(offsets[symbol]) if symbol in offsets else None


def _include_of(flags: str | None) -> str | None:
    match = re.search(r"(?:^|\s)-I(\S+)", flags or "")
    return match.group(1) if match else None
