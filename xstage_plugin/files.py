"""Reading and writing files so that nothing is lost or half-written."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from xstage_plugin.errors import InvalidInputError


def read_text(path: Path, what: str) -> str:
    """The text of ``path``. ``what`` names the kind of file in the error ("platform file").

    Raises:
        InvalidInputError: missing, a directory, unreadable, or not UTF-8 text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InvalidInputError(f"{path}: no such file; expected a {what}") from None
    except IsADirectoryError:
        raise InvalidInputError(f"{path}: is a directory; expected a {what}") from None
    except UnicodeDecodeError:
        raise InvalidInputError(f"{path}: not a text file; expected a {what}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise InvalidInputError(f"{path}: cannot be read as a {what}: {getattr(error, 'strerror', error)}") from None


def read_json(path: Path, what: str) -> Any:
    """The JSON document in ``path``; numbers beyond JSON (NaN, Infinity) pass and are for the caller to judge.

    Raises:
        InvalidInputError: as :func:`read_text`, or not JSON.
    """
    text = read_text(path, what)
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        where = f"line {error.lineno}" if isinstance(error, json.JSONDecodeError) else "too deeply nested"
        raise InvalidInputError(f"{path}: not JSON ({where}); expected a {what}") from None


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` whole or not at all: a temporary file beside it, then a rename.

    Raises:
        InvalidInputError: the folder does not exist, is not writable, or ``path`` is a directory.
    """
    if path.is_dir():
        raise InvalidInputError(f"{path}: is a directory; expected a file name to write to")
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:64]}.", dir=path.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes it private
        os.replace(temporary, path)
        temporary = None
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}") from None
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
