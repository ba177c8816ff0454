"""``moe_schedule.hpp`` compiled for this machine and listed: the order that the kernel runs, as numpy arrays. Needs no GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from xstage_plugin.bundled import bundled_folder
from xstage_plugin.checks import positive_int
from xstage_plugin.errors import InvalidInputError, XStageError
from xstage_plugin.moe.schedule_text import check_schedule

COMPILERS = ("g++", "c++", "clang++")
HEADER = "deep_gemm/xstage/moe_schedule.hpp"
FLAGS = ("-std=c++20", "-O2", "-shared", "-fPIC")
COMPILE_LIMIT_S = 300
# What the C++ side returns instead of a number of tiles.
FAULTS = {-1: "more tiles than the instance can have", -2: "rows of an expert beyond the last"}

Order: TypeAlias = npt.NDArray[np.uint32]
"""Tiles of one instance, shape (tiles, 5); the columns are the fields of :class:`schedule_text.Tile`."""


class CompilerError(XStageError):
    """The header was not compiled; the message holds the first lines of the compiler's log."""


class NoCompilerError(CompilerError):
    """None of the compilers is here."""


class HeaderError(XStageError):
    """The compiled order breaks its own contract."""


@dataclass(frozen=True, order=True)
class ScheduleTemplate:
    """The template values of ``MoeSchedule``: tiles of a row, local experts, experts of a wave (a divisor of the experts)."""

    l1_tiles: int
    l2_tiles: int
    num_experts: int
    experts_per_wave: int

    def __post_init__(self) -> None:
        for name in ("l1_tiles", "l2_tiles", "num_experts", "experts_per_wave"):
            positive_int(name, getattr(self, name))
        if self.num_experts % self.experts_per_wave:
            raise InvalidInputError(
                f"experts_per_wave is {self.experts_per_wave}; expected a divisor of the {self.num_experts} experts"
            )

    @property
    def values(self) -> str:
        """The template arguments, in the header's order."""
        return f"{self.l1_tiles}, {self.l2_tiles}, {self.num_experts}, {self.experts_per_wave}"


@dataclass(frozen=True)
class CompiledSchedule:
    """One instantiation of the header, ready to be listed.

    ``largest_lead`` is what the header's schedule word holds, in rows.
    """

    template: ScheduleTemplate
    largest_lead: int
    _list_tiles: Any  # the C function

    def order(self, rows_per_expert: Sequence[int], instance: int, num_instances: int, lead: int) -> Order:
        """The tiles that ``instance`` of ``num_instances`` visits, in order. ``lead`` in rows, 0 for the expert wave.

        Raises:
            InvalidInputError: a value is out of its range, or there is not one count of rows for each expert.
            HeaderError: the header hands out too many tiles, or asks for an expert that is none.
        """
        return self._order(self._checked(rows_per_expert, instance, num_instances, lead), instance, num_instances, lead)

    def orders(self, rows_per_expert: Sequence[int], num_instances: int, lead: int) -> tuple[Order, ...]:
        """:meth:`order` of every instance."""
        rows = self._checked(rows_per_expert, 0, num_instances, lead)
        return tuple(self._order(rows, instance, num_instances, lead) for instance in range(num_instances))

    def _checked(self, rows_per_expert: Sequence[int], instance: int, num_instances: int, lead: int) -> Order:
        own = self.template
        if len(rows_per_expert) != own.num_experts:
            raise InvalidInputError(
                f"{len(rows_per_expert)} counts of rows; expected one for each of {own.num_experts} experts"
            )
        wave = own.experts_per_wave
        rows = check_schedule(rows_per_expert, instance, num_instances, own.l1_tiles, own.l2_tiles, lead, wave)
        return np.array(rows, dtype=np.uint32)

    def _order(self, rows: Order, instance: int, num_instances: int, lead: int) -> Order:
        own = self.template
        # An even share, and one tile more of each stream where it does not come out even.
        capacity = int(rows.sum()) * (own.l1_tiles + own.l2_tiles) // num_instances + 2
        tiles = np.empty((capacity, 5), dtype=np.uint32)
        count = self._list_tiles(rows.ctypes.data, instance, num_instances, lead, tiles.ctypes.data, capacity)
        if count < 0:
            raise HeaderError(f"moe_schedule.hpp <{own.values}> for instance {instance} of {num_instances}: {FAULTS[count]}")
        return tiles[:count]


def compile_schedule(template: ScheduleTemplate) -> CompiledSchedule:
    """The header compiled for ``template``. Raises as :func:`compile_schedules`."""
    return compile_schedules([template])[template]


def compile_schedules(
    templates: Sequence[ScheduleTemplate], compiler: str | None = None, folder: Path | None = None
) -> dict[ScheduleTemplate, CompiledSchedule]:
    """The header compiled for all ``templates``, as one library: about 0.1 s, and 50 ms more for each of them.

    The library is kept in ``folder`` under a hash of the values, the header and the compile command, and taken from there
    the next time. ``compiler`` is a name or a path, by default the first of g++, c++ and clang++ that is there; ``folder``
    is by default one of this user's in the temporary folder.

    Raises:
        NoCompilerError: no compiler is found.
        CompilerError: it refuses the header, or the library cannot be written or loaded.
    """
    wanted = sorted(set(templates))
    command = [_find_compiler(compiler), *FLAGS, "-I", str(bundled_folder("moe") / "include"), "-x", "c++", "-"]
    try:
        library = ctypes.CDLL(str(_build(command, _source(wanted), folder or _own_folder())))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerError(f"compiling moe_schedule.hpp: {error}") from None
    library.xstage_largest_lead.restype = ctypes.c_uint32
    return {
        template: CompiledSchedule(template, library.xstage_largest_lead(), _list_function(library, template))
        for template in wanted
    }


def _find_compiler(name: str | None) -> str:
    for candidate in (name,) if name else COMPILERS:
        if path := shutil.which(candidate):
            return path
    looked_for = name or ", ".join(COMPILERS)
    raise NoCompilerError(f"no C++ compiler: looked for {looked_for}; install g++, or read the order from moe/schedule_text.py")


def _source(templates: Sequence[ScheduleTemplate]) -> str:
    wrapper = (bundled_folder("moe") / "native" / "enumerate_moe_schedule.cpp").read_text(encoding="utf-8")
    entries = " ".join(f"ENTRY({template.values})" for template in templates)
    return f"#define XSTAGE_TEMPLATES {entries}\n{wrapper}"


def _build(command: Sequence[str], source: str, folder: Path) -> Path:
    """The library in ``folder``, compiled unless it lies there. Several processes may do so at once."""
    header = (bundled_folder("moe") / "include" / HEADER).read_bytes()
    digest = hashlib.sha256("\0".join([*command, source]).encode() + header).hexdigest()[:24]
    path = folder / f"moe_schedule-{digest}.so"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as build:
        output = Path(build) / path.name
        run = subprocess.run(
            [*command, "-o", str(output)], input=source, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=False
        )
        if run.returncode:
            log = "; ".join(" ".join(line.split()) for line in run.stderr.splitlines() if "error" in line)
            raise CompilerError(f"{command[0]} refuses moe_schedule.hpp: {log[:400] or f'exit code {run.returncode}'}")
        os.replace(output, path)
    return path


def _own_folder() -> Path:
    """This user's folder for libraries, or a new one where another user took that name: we load what lies in it."""
    folder = Path(tempfile.gettempdir()) / f"xstage-plugin-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    state = folder.lstat()
    if stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o022:
        return folder
    return _fallback_folder()


@functools.cache
def _fallback_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="xstage-plugin-"))


def _list_function(library: ctypes.CDLL, template: ScheduleTemplate) -> Any:
    function = library[f"xstage_tiles_{template.values.replace(', ', '_')}"]
    word, address = ctypes.c_uint32, ctypes.c_void_p
    function.argtypes = [address, word, word, word, address, ctypes.c_int64]
    function.restype = ctypes.c_int64
    return function
