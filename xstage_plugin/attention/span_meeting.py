"""Where the ranks of one span exchange handles: under a name and in a store of their own.

torch's symmetric memory numbers the exchanges of a process with one counter, whatever group they are of, and looks for peers
under keys with that number. A rank that has been in one more group than another is ahead of it, and from then on both wait for
keys that nobody writes (pytorch/pytorch#196082, in every release up to 2.13). Here every span's numbers start at 0 again.
Spans meet here once a rank has made spans over different ranks; before that torch's own way is in step.
"""

from __future__ import annotations

import re
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# All ranks have just agreed to come; a rank that could not go on must not keep the others for long.
TIMEOUT = timedelta(seconds=60)
_NUMBERED = re.compile(r"([^/]+/)(\d+)(?=/|$)")


class FromZero:
    """Keys ``PREFIX/NUMBER`` and ``PREFIX/NUMBER/REST`` with the numbers counted from the first one that comes along."""

    def __init__(self) -> None:
        self._first: int | None = None

    def __call__(self, key: str) -> str:
        found = _NUMBERED.match(key)
        if not found:
            return key
        number = int(found[2])
        if self._first is None:
            self._first = number
        return f"{found[1]}{number - self._first}{key[found.end() :]}"


@cache
def _store_class() -> Any:
    """A ``torch.distributed.Store``; made on the first call, because naming its base imports torch."""
    import torch.distributed as dist

    class MeetingStore(dist.Store):  # type: ignore[misc]
        """Another store under keys that count from 0. Every wait ends after ``TIMEOUT``."""

        def __init__(self, inner: Any) -> None:
            super().__init__()
            self._inner, self._key = inner, FromZero()

        def set(self, key: str, value: bytes) -> None:
            self._inner.set(self._key(key), value)

        def get(self, key: str) -> bytes:
            self.wait([key])
            return bytes(self._inner.get(self._key(key)))

        def add(self, key: str, amount: int) -> int:
            return int(self._inner.add(self._key(key), amount))

        def check(self, keys: list[str]) -> bool:
            return bool(self._inner.check([self._key(key) for key in keys]))

        def wait(self, keys: list[str], timeout: timedelta = TIMEOUT) -> None:
            self._inner.wait([self._key(key) for key in keys], min(timeout, TIMEOUT))

    return MeetingStore


class Meeting:
    """A name under which torch finds the ranks of ``group``.

    Args:
        group: the ranks.
        name: equal on all of them, and never used before.
    """

    def __init__(self, group: Any, name: str) -> None:
        self._group, self.name = group, name

    def rendezvous(self, tensor: torch.Tensor) -> Any:
        """torch's symmetric-memory handle over every rank's ``tensor``. Collective.

        Raises:
            RuntimeError: torch or the driver refused, or a peer did not come.
        """
        import torch.distributed as dist
        from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory, _unregister_process_group
        from torch.distributed.distributed_c10d import _get_process_group_store

        rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        store = _store_class()(dist.PrefixStore(self.name, _get_process_group_store(self._group)))
        stand_in = dist.ProcessGroup(store, rank, ranks)
        _register_process_group(self.name, stand_in)
        # Releases before 2.11 do not ask the group for its store.
        _SymmetricMemory.set_group_info(self.name, rank, ranks, store)
        try:
            return _SymmetricMemory.rendezvous(tensor, self.name)
        finally:
            # Later releases look the name up at every barrier, for what only a whole group has.
            _unregister_process_group(self.name)
            _register_process_group(self.name, self._group)

    def close(self) -> None:
        """Forget the name. The handle must not be used afterwards. Doing it twice is the same as once."""
        from torch._C._distributed_c10d import _unregister_process_group

        _unregister_process_group(self.name)
