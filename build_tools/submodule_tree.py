"""Our change in the working tree of a submodule: headers of ours, and files of upstream with our insertions.

Placing it writes our additions and the copies of originals first and what replaces an upstream file last, so that the tree
compiles at every moment. Originals come from the submodule's own git objects. What was written is noted in the submodule's
git folder, so that a later version of our change replaces an earlier one and nothing that somebody edited is overwritten.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import git

from xstage_plugin.checks import unknown_name
from xstage_plugin.errors import InvalidInputError
from xstage_plugin.files import write_atomically
from xstage_plugin.upstream.check import sha256_of
from xstage_plugin.upstream.errors import MismatchError, UpstreamError
from xstage_plugin.upstream.insertions import insert, parse_insertions
from xstage_plugin.upstream.pins import Pin, load_pins, load_source_trees, source_bytes

LEDGER = "xstage-placed.json"
# The submodules by the word that stands for them on the command line.
SUBMODULES = {"deep-gemm": "third_party/DeepGEMM", "flash-attention": "third_party/flash-attention"}


class TreeState(str, enum.Enum):
    ABSENT = "absent"
    OTHER_COMMIT = "other commit"
    STOCK = "stock"
    APPLIED = "applied"
    OUTDATED = "applied, with an earlier change of ours or in part"
    MISMATCH = "mismatch"


@dataclass(frozen=True)
class TreeStatus:
    """What the working tree is at; ``detail`` is the file or commit that decides, ``next_step`` what to run."""

    target: str
    state: TreeState
    detail: str
    next_step: str

    def __str__(self) -> str:
        return f"{self.target}: {self.state.value} ({self.detail}); {self.next_step}"


def submodule_pin(submodule: str, name: str | None = None) -> Pin:
    """The pin of a submodule, by its word in :data:`SUBMODULES`.

    Raises:
        InvalidInputError: no such target, or ``name`` is left out and there are several.
    """
    pins = {pin.name: pin for pin in (load_pins() | load_source_trees()).values() if pin.path == SUBMODULES[submodule]}
    if name is None and len(pins) == 1:
        return next(iter(pins.values()))
    if name is None or name not in pins:
        raise unknown_name(f"{submodule} target", name or "", pins)
    return pins[name]


def placed_contents(pin: Pin, original: Callable[[str], bytes], patches: Path | None = None) -> dict[str, bytes]:
    """What an applied tree has from us, by path, in the order in which it is written.

    Args:
        original: upstream's bytes of a path.
        patches: where our files are, by default the package's.

    Raises:
        HeaderError: a file of ours is missing, or a patch does more than insert.
    """
    contents = {added.path: source_bytes(added.source, patches) for added in pin.additions}
    contents |= {shadow.original_as: original(shadow.path) for shadow in pin.shadows}
    contents |= {shadow.path: source_bytes(shadow.source, patches) for shadow in pin.shadows}
    for patch in pin.patches:
        insertions = parse_insertions(source_bytes(patch.source, patches).decode(), patch.source)
        contents[patch.path] = insert(original(patch.path).decode(), insertions, patch.path).encode()
    return contents


class SubmoduleTree:
    """A submodule of a checkout.

    Args:
        repository: root of the checkout.
        pin: what the submodule has to be at, and our change.
        command: what to run, for messages; an action is put behind it.
        patches: where our files are, by default the package's.
    """

    def __init__(self, repository: Path, pin: Pin, command: str, patches: Path | None = None) -> None:
        self._repository = repository
        self._pin = pin
        self._command = command
        self._patches = patches
        self._pinned = {pinned.path: pinned.sha256 for pinned in pin.files}
        self.tree = repository / pin.path
        self.folder = self.tree / pin.folder  # of the pin's paths

    def init(self, recursive: bool = False) -> None:
        """Fetch the submodule at the pin. A tree that is at the pin already stays as it is.

        Raises:
            InvalidInputError: ``repository`` is no git checkout, or does not record the pinned commit.
            UpstreamError: git failed; its last line is in the message.
        """
        try:
            checkout = git.Repo(self._repository)
            recorded = checkout.git.ls_tree("HEAD", self._pin.path).split()
        except (git.InvalidGitRepositoryError, git.NoSuchPathError):
            raise InvalidInputError(f"{self._repository}: not a git checkout; expected a clone with its submodules") from None
        except git.GitCommandError as error:
            raise self._failed("ls-tree", error) from None
        if recorded[1:3] != ["commit", self._pin.commit]:
            found = recorded[2] if len(recorded) > 2 else "nothing"
            raise InvalidInputError(f"{self._pin.path}: the checkout records {found}; expected the pin {self._pin.commit}")
        if self._head() == self._pin.commit and not recursive:
            return
        options = ["--init", "--checkout", *(["--recursive"] if recursive else [])]
        try:
            checkout.git.submodule("update", *options, "--", self._pin.path)
        except git.GitCommandError as error:
            raise self._failed("submodule update", error) from None

    def status(self) -> TreeStatus:
        """What the tree is at. Changes nothing.

        Raises:
            MismatchError: git's own copy of a file that our change rests on is not as pinned.
            HeaderError: a file of ours is missing.
        """
        head = self._head()
        if head is None:
            return self._status(TreeState.ABSENT, str(self.tree), f"run: {self._command} init")
        if head != self._pin.commit:
            return self._status(TreeState.OTHER_COMMIT, head, f"check out {self._pin.commit[:7]}: {self._command} init")
        wanted, placed = {path: _sha256(content) for path, content in self._contents().items()}, self._placed()
        found = {path: sha256_of(self.folder / path) for path in (*wanted, *self._pinned)}
        for path, sha256 in self._pinned.items():
            if found[path] not in (sha256, wanted.get(path), placed.get(path)) or found[path] is None:
                return self._status(TreeState.MISMATCH, path, "restore it: git checkout in the submodule")
        added = wanted.keys() - self._pinned.keys()
        for path in added:
            if found[path] not in (None, wanted[path], placed.get(path)):
                return self._status(TreeState.MISMATCH, f"{path} is not ours", "move it away")
        if all(found[path] == sha256 for path, sha256 in wanted.items()):
            return self._status(TreeState.APPLIED, f"{len(wanted)} files", f"undo: {self._command} revert")
        if all(found[path] == sha256 for path, sha256 in self._pinned.items()) and not any(found[path] for path in added):
            return self._status(TreeState.STOCK, self._pin.commit[:7], f"next: {self._command} apply")
        return self._status(TreeState.OUTDATED, self._pin.commit[:7], f"run: {self._command} apply, or revert")

    def check(self) -> TreeStatus:
        """:meth:`status`, where the tree is one that :meth:`apply` and :meth:`revert` can work on.

        Raises:
            MismatchError: absent, at another commit, or with a file that is neither upstream's nor ours.
        """
        status = self.status()
        if status.state in (TreeState.ABSENT, TreeState.OTHER_COMMIT, TreeState.MISMATCH):
            raise MismatchError(str(status))
        return status

    def apply(self) -> tuple[str, ...]:
        """Place our change. The paths written, none where everything is in place.

        Raises:
            MismatchError: as :meth:`check`; nothing is written then.
            HeaderError: a file of ours is missing, or a patch does more than insert.
        """
        self.check()
        contents = self._contents()
        due = {path: content for path, content in contents.items() if sha256_of(self.folder / path) != _sha256(content)}
        # Noted before they are written: a run that ends in between leaves files that the next one knows as ours.
        self._note({**self._placed(), **{path: _sha256(content) for path, content in contents.items()}})
        for path, content in due.items():
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.folder / path, content)
        return tuple(due)

    def revert(self) -> tuple[str, ...]:
        """Put the originals back and remove what :meth:`apply` added. The paths restored or removed.

        Raises:
            MismatchError: as :meth:`check`; nothing is changed then.
        """
        self.check()
        changed = []
        ours = dict.fromkeys((*self._contents(), *self._placed()))
        for path in (path for path in ours if path in self._pinned):
            if sha256_of(self.folder / path) != self._pinned[path]:
                write_atomically(self.folder / path, self._original(path))
                changed.append(path)
        for path in (path for path in ours if path not in self._pinned):
            target = self.folder / path
            if target.is_file():
                target.unlink()
                changed.append(path)
                with contextlib.suppress(OSError):  # the folder was there before us, or holds more
                    target.parent.rmdir()
        if ledger := self._ledger():
            ledger.unlink(missing_ok=True)
        return tuple(changed)

    def _contents(self) -> dict[str, bytes]:
        return placed_contents(self._pin, self._original, self._patches)

    def _original(self, path: str) -> bytes:
        """Upstream's bytes of ``path``, from git."""
        repo = self._repo()
        where = (Path(self._pin.folder) / path).as_posix()
        try:
            found = bytes(repo.head.commit.tree[where].data_stream.read()) if repo else b""
        except KeyError:
            raise MismatchError(f"{where}: not in {self._pin.commit[:7]}; expected the pinned file") from None
        if _sha256(found) != self._pinned[path]:
            raise MismatchError(f"{where}: {self._pin.commit[:7]} has another file than the pin {self._pin.name}")
        return found

    def _placed(self) -> dict[str, str]:
        """What an earlier :meth:`apply` noted; nothing of what is not, and was not, ours to write."""
        ledger = self._ledger()
        if ledger is None:
            return {}
        with contextlib.suppress(OSError, ValueError):
            known = json.loads(ledger.read_text(encoding="utf-8"))
            allowed = {added.path for added in self._pin.ours} | {patch.path for patch in self._pin.patches}
            allowed |= {shadow.original_as for shadow in self._pin.shadows}
            return {path: str(sha256) for path, sha256 in known.items() if path in allowed}
        return {}

    def _note(self, placed: dict[str, str]) -> None:
        if ledger := self._ledger():
            write_atomically(ledger, json.dumps(placed, indent=1).encode())

    def _ledger(self) -> Path | None:
        repo = self._repo()
        return Path(repo.git_dir) / LEDGER if repo else None

    def _head(self) -> str | None:
        repo = self._repo()
        try:
            return repo.head.commit.hexsha if repo else None
        except ValueError:  # a repository without a commit
            return None

    def _repo(self) -> git.Repo | None:
        if not (self.tree / ".git").exists():  # else git would find the checkout around it
            return None
        try:
            return git.Repo(self.tree)
        except (git.InvalidGitRepositoryError, git.NoSuchPathError):
            return None

    def _status(self, state: TreeState, detail: str, next_step: str) -> TreeStatus:
        return TreeStatus(self._pin.name, state, detail, next_step)

    def _failed(self, what: str, error: git.GitCommandError) -> UpstreamError:
        lines = [line.strip() for line in str(error.stderr).splitlines() if line.strip()]
        return UpstreamError(f"{self._pin.path}: git {what} failed ({lines[-1] if lines else error.status})")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
