"""The torch operator behind a Ulysses layer, so that torch.compile keeps a call whole and never reuses the span's memory.

``xstage::ulysses_deliver(q, k, v, out!, key)``: ``out`` is this rank's rows, which the peers write; ``key`` names the
prepared call, because plans, groups and mappings are no operator arguments.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

from xstage_plugin.errors import InvalidInputError

if TYPE_CHECKING:
    import torch

SCHEMA = "ulysses_deliver(Tensor q, Tensor k, Tensor v, Tensor(a!) out, str key) -> ()"


class Deliverer(Protocol):
    """A prepared call: ``out`` is what ``run`` fills."""

    out: torch.Tensor

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None: ...


_live: WeakValueDictionary[str, Any] = WeakValueDictionary()
_numbers = itertools.count()


def enlist(deliverer: Deliverer) -> str:
    """The key under which the operator finds ``deliverer`` for as long as somebody holds it; defines the operator."""
    _define()
    key = f"ulysses-{next(_numbers)}"
    _live[key] = deliverer
    return key


@cache
def _define() -> Any:
    import torch

    library = torch.library.Library("xstage", "FRAGMENT")
    library.define(SCHEMA)
    library.impl("ulysses_deliver", _deliver, "CompositeExplicitAutograd")
    torch.library.register_fake("xstage::ulysses_deliver", _deliver_fake, lib=library)
    return library  # it takes its operators along when it goes


def _deliver(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, key: str) -> None:
    deliverer = _live.get(key)
    if deliverer is None:
        raise InvalidInputError(f"no prepared Ulysses call is named {key!r} any more; keep the call or the module alive")
    deliverer.run(q, k, v)
    # A compiler may hand in a copy of the buffer and write it back over the original: then the copy must hold the result.
    if out.data_ptr() != deliverer.out.data_ptr():
        out.copy_(deliverer.out)


def _deliver_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, key: str) -> None:
    return None
