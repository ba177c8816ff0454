"""Patches that only add lines: unified diffs of one file without context, as ``git apply --unidiff-zero`` takes them.

Without context a patch holds nothing of the file that it is for, and fits nothing but the very file whose hash its pin names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from xstage_plugin.upstream.errors import HeaderError

_HUNK = re.compile(r"@@ -([0-9]{1,7}),0 \+([0-9]{1,7})(?:,([0-9]{1,7}))? @@")


@dataclass(frozen=True)
class Insertion:
    """Lines that go behind line ``after`` (counted from 1; 0: before the first) of the original."""

    after: int
    lines: tuple[str, ...]


def parse_insertions(patch: str, name: str) -> tuple[Insertion, ...]:
    """The insertions of ``patch``, in order. What stands before its first hunk is for readers.

    Raises:
        HeaderError: a line is removed or is context, the hunks overlap or go backwards, or their counts do not add up.
    """
    found: list[Insertion] = []
    head, *hunks = re.split(r"^(?=@@ )", patch, flags=re.MULTILINE)
    if len(re.findall(r"^\+\+\+ ", head, re.MULTILINE)) > 1 or any("\n--- " in hunk for hunk in hunks):
        raise HeaderError(f"{name}: is of several files; expected one")
    inserted = 0
    for hunk in hunks:
        head, *lines = hunk.removesuffix("\n").split("\n")
        match = _HUNK.fullmatch(head)
        if match is None or any(not line.startswith("+") for line in lines):
            raise HeaderError(f"{name}: {head!r} does more than insert; expected a diff without context or removed lines")
        after, first, count = int(match[1]), int(match[2]), int(match[3] or 1)
        if first != after + inserted + 1 or not 0 < count == len(lines) or (found and after <= found[-1].after):
            raise HeaderError(f"{name}: {head!r} does not add up with its {len(lines)} lines and the hunks before it")
        found.append(Insertion(after, tuple(line[1:] for line in lines)))
        inserted += count
    if not found:
        raise HeaderError(f"{name}: holds no hunk; expected a unified diff")
    return tuple(found)


def insert(original: str, insertions: tuple[Insertion, ...], name: str) -> str:
    """``original`` with ``insertions``.

    Raises:
        HeaderError: it has fewer lines than they ask for.
    """
    lines = [f"{line}\n" for line in original.removesuffix("\n").split("\n")]
    if insertions and insertions[-1].after > len(lines):
        raise HeaderError(f"{name}: goes behind line {insertions[-1].after} of a file of {len(lines)}")
    out: list[str] = []
    taken = 0
    for insertion in insertions:
        out += lines[taken : insertion.after]
        out += [f"{line}\n" for line in insertion.lines]
        taken = insertion.after
    return "".join(out + lines[taken:])
