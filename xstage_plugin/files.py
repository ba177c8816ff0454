"""Reading and writing files so that nothing is lost or half-written."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from xstage_plugin.checks import shown
from xstage_plugin.errors import InvalidInputError


def read_text(path: Path, what: str) -> str:
    """The text of ``path``. ``what`` names the kind of file in the error ("a platform file").

    Raises:
        InvalidInputError: missing, a directory, unreadable, or not UTF-8 text.
    """
    with _one_line(path, what):
        return path.read_text(encoding="utf-8-sig")


def read_json(path: Path, what: str) -> Any:
    """The JSON document in ``path``; numbers beyond JSON (NaN, Infinity) pass and are for the caller to judge.

    Raises:
        InvalidInputError: as :func:`read_text`, or not JSON.
    """
    text = read_text(path, what)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInputError(f"{path}: not JSON (line {error.lineno}); expected {what}") from None
    except RecursionError:
        raise InvalidInputError(f"{path}: nested too deeply; expected {what}") from None
    except ValueError:  # Python refuses whole numbers of thousands of digits
        raise InvalidInputError(f"{path}: holds a number of too many digits; expected {what}") from None


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` whole or not at all. Raises InvalidInputError as :func:`write_together`."""
    write_together([(path, data)])


def write_together(files: Sequence[tuple[Path, bytes]]) -> None:
    """Write all ``files`` or none: temporary files beside each, and renames once all of them are complete.

    A link is followed, and an existing file keeps its permissions.

    Raises:
        InvalidInputError: a folder does not exist or is not writable, a path is a directory, or the disk is full.
    """
    ready: list[tuple[str, Path]] = []
    path = files[0][0]
    try:
        for path, data in files:
            with _one_line(path, "a file name to write to", verb="written"):
                if path.is_dir():
                    raise IsADirectoryError
                target = path.resolve() if path.is_symlink() else path
                ready.append((_temporary(target, data), target))
        for temporary, path in ready:
            with _one_line(path, "a file name to write to", verb="written"):
                os.replace(temporary, path)
    finally:
        for temporary, _ in ready:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _temporary(target: Path, data: bytes) -> str:
    """A complete file beside ``target`` with ``data`` and the permissions that ``target`` has or would get."""
    umask = os.umask(0)
    os.umask(umask)
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~umask
    handle, temporary = tempfile.mkstemp(prefix=".xstage.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, mode)
    except BaseException:
        os.unlink(temporary)
        raise
    return temporary


@contextlib.contextmanager
def _one_line(path: Path, expected: str, verb: str = "read") -> Iterator[None]:
    """File errors as one line each."""
    name = str(path) if len(str(path)) < 200 else shown(str(path))
    try:
        yield
    except FileNotFoundError:
        what = "no such file" if verb == "read" else f"cannot be {verb}: no such folder"
        raise InvalidInputError(f"{name}: {what}; expected {expected}") from None
    except IsADirectoryError:
        raise InvalidInputError(f"{name}: is a directory; expected {expected}") from None
    except UnicodeDecodeError:
        raise InvalidInputError(f"{name}: not a text file; expected {expected}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        reason = getattr(error, "strerror", None) or error
        raise InvalidInputError(f"{name}: cannot be {verb}: {reason}; expected {expected}") from None
