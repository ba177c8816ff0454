"""Our headers in the working tree of the DeepGEMM submodule: the same files as in the overlay, as files of the user's tree.

Placing them writes our additions, a copy of the original under its other name, and last our shadow over the original, so that
the tree compiles at every moment. What was written is noted in the submodule's git folder, so that a later version of our
headers replaces an earlier one and nothing that somebody edited is overwritten.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import git

from xstage_plugin.checks import unknown_name
from xstage_plugin.errors import InvalidInputError
from xstage_plugin.files import write_atomically
from xstage_plugin.upstream.check import sha256_of
from xstage_plugin.upstream.errors import MismatchError, UpstreamError
from xstage_plugin.upstream.pins import INCLUDE, Pin, Role, load_pins, source_bytes

LEDGER = "xstage-placed.json"


class TreeState(str, enum.Enum):
    ABSENT = "absent"
    OTHER_COMMIT = "other commit"
    STOCK = "stock"
    APPLIED = "applied"
    OUTDATED = "applied, with earlier headers of ours or in part"
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


def submodule_pin(name: str | None = None) -> Pin:
    """The pin of the DeepGEMM submodule.

    Raises:
        InvalidInputError: no such target, or ``name`` is left out and there are several.
    """
    pins = {pin.name: pin for pin in load_pins().values() if pin.kind == "submodule" and pin.import_name == "deep_gemm"}
    if name is None and len(pins) == 1:
        return next(iter(pins.values()))
    if name is None or name not in pins:
        raise unknown_name("submodule target", name or "", pins)
    return pins[name]


class DeepGemmTree:
    """The submodule ``pin`` of the checkout ``repository``. ``patches`` is where our headers are, by default the package's."""

    def __init__(self, repository: Path, pin: Pin, patches: Path | None = None) -> None:
        self._repository = repository
        self._pin = pin
        self._patches = patches
        self.tree = repository / pin.path
        self.include_root = self.tree / pin.package_path / INCLUDE

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
        """What the tree is at. Changes nothing."""
        head = self._head()
        if head is None:
            return self._status(TreeState.ABSENT, str(self.tree), "run: python -m build_tools init")
        if head != self._pin.commit:
            return self._status(TreeState.OTHER_COMMIT, head, f"check out {self._pin.commit[:7]}: python -m build_tools init")
        wanted, placed = self._wanted(), self._placed()
        found = {path: sha256_of(self.include_root / path) for path in (*wanted, *self._pinned())}
        for path, sha256 in self._pinned().items():
            if found[path] not in (sha256, wanted.get(path), placed.get(path)) or found[path] is None:
                return self._status(TreeState.MISMATCH, path, "restore it: git checkout in the submodule")
        for path in wanted.keys() - self._pinned().keys():
            if found[path] not in (None, wanted[path], placed.get(path)):
                return self._status(TreeState.MISMATCH, f"{path} is not ours", "move it away")
        if all(found[path] == sha256 for path, sha256 in wanted.items()):
            return self._status(TreeState.APPLIED, f"{len(wanted)} files", "undo: python -m build_tools revert")
        shadowed = {shadow.path for shadow in self._pin.shadows}
        if all(found[path] == self._pinned()[path] for path in shadowed) and not any(
            found[path] for path in wanted.keys() - shadowed
        ):
            return self._status(TreeState.STOCK, self._pin.commit[:7], "next: python -m build_tools apply")
        return self._status(TreeState.OUTDATED, self._pin.commit[:7], "run: python -m build_tools apply, or revert")

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
        """Place our headers. The paths written, none where everything is in place.

        Raises:
            MismatchError: as :meth:`check`; nothing is written then.
            HeaderError: a header of ours is missing.
        """
        self.check()
        contents = {added.path: source_bytes(added.source, self._patches) for added in self._pin.additions}
        for shadow in self._pin.shadows:
            contents[shadow.original_as] = self._original(shadow.path, shadow.original_as)
        for shadow in self._pin.shadows:
            contents[shadow.path] = source_bytes(shadow.source, self._patches)
        due = {path: content for path, content in contents.items() if sha256_of(self.include_root / path) != _sha256(content)}
        # Noted before they are written: a run that ends in between leaves files that the next one knows as ours.
        self._note({**self._placed(), **self._wanted()})
        for path, content in due.items():
            (self.include_root / path).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.include_root / path, content)
        return tuple(due)

    def revert(self) -> tuple[str, ...]:
        """Put the originals back and remove what :meth:`apply` added. The paths restored or removed.

        Raises:
            MismatchError: as :meth:`check`; nothing is changed then.
        """
        self.check()
        changed = []
        for shadow in self._pin.shadows:
            original = self._original(shadow.path, shadow.original_as)
            if sha256_of(self.include_root / shadow.path) != _sha256(original):
                write_atomically(self.include_root / shadow.path, original)
                changed.append(shadow.path)
        shadowed = {shadow.path for shadow in self._pin.shadows}
        for path in (*self._wanted(), *self._placed()):
            target = self.include_root / path
            if path not in shadowed and target.is_file():
                target.unlink()
                changed.append(path)
                with contextlib.suppress(OSError):  # the folder was there before us, or holds more
                    target.parent.rmdir()
        if ledger := self._ledger():
            ledger.unlink(missing_ok=True)
        return tuple(dict.fromkeys(changed))

    def _original(self, path: str, original_as: str) -> bytes:
        """Upstream's text of ``path``, from wherever it stands now."""
        for candidate in (self.include_root / path, self.include_root / original_as):
            if sha256_of(candidate) == self._pinned()[path]:
                return candidate.read_bytes()
        raise MismatchError(f"{path}: the original is neither there nor under {original_as}; git checkout it in the submodule")

    def _wanted(self) -> dict[str, str]:
        """Path to SHA-256 of every file that an applied tree has from us."""
        ours = {added.path: _sha256(source_bytes(added.source, self._patches)) for added in self._pin.ours}
        return {**ours, **{shadow.original_as: self._pinned()[shadow.path] for shadow in self._pin.shadows}}

    def _pinned(self) -> dict[str, str]:
        return {pinned.path: pinned.sha256 for pinned in self._pin.files}

    def _placed(self) -> dict[str, str]:
        """What an earlier :meth:`apply` wrote, by its own note."""
        ledger = self._ledger()
        if ledger is None:
            return {}
        with contextlib.suppress(OSError, ValueError):
            known = json.loads(ledger.read_text(encoding="utf-8"))
            allowed = {*self._shadow_paths(), *(shadow.original_as for shadow in self._pin.shadows)}
            allowed |= {added.path for added in self._pin.additions}
            return {path: str(sha256) for path, sha256 in known.items() if path in allowed}
        return {}

    def _shadow_paths(self) -> set[str]:
        return {pinned.path for pinned in self._pin.files if pinned.role is Role.SHADOWED}

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
