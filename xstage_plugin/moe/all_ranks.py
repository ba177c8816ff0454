"""A step that every rank of a group takes, or none: a rank that cannot is heard of by all before anybody goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from xstage_plugin.errors import InvalidInputError, XStageError

T = TypeVar("T")
DESTROYED = "the symmetric buffer was destroyed; make a new one"


def gather_or_raise(sym_buffer: Any, step: str, look: Callable[[], T], error: type[XStageError]) -> list[T]:
    """``look()`` on every rank of the buffer's group; the values of all, in rank order. Collective.

    Args:
        step: what is going on; ranks that meet in different ones are told so.
        error: what is raised, on every rank alike, where one could not.

    Raises:
        InvalidInputError: on this rank alone: its buffer was destroyed and knows no group any more.
    """
    import torch.distributed as dist

    if sym_buffer.group is None:
        raise InvalidInputError(DESTROYED)
    value, fault = None, ""
    try:
        value = look()
    except Exception as wrong:  # whatever it is, every rank has to hear of it
        fault = (str(wrong).strip() or type(wrong).__name__).splitlines()[0]
    answers: list[Any] = [None] * sym_buffer.group.size()
    dist.all_gather_object(answers, (step, fault, value), group=sym_buffer.group)
    steps = [theirs for theirs, _, _ in answers]
    if len(set(steps)) > 1:
        raise error(f"the ranks are at different steps: {', '.join(steps)}; expected all of them at the same")
    if faults := [f"rank {rank}: {text}" for rank, (_, text, _) in enumerate(answers) if text]:
        raise error(faults[0])
    return [theirs for _, _, theirs in answers]
