"""Facts and faults of all ranks of a group, so that what stops one rank stops all of them with the same line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xstage_plugin.attention.span_errors import GroupMismatchError
from xstage_plugin.errors import InvalidInputError, XStageError


def group_or_world(group: Any) -> Any:
    """``group``, or the group of all ranks for None.

    Raises:
        InvalidInputError: torch.distributed is not initialised, or this process is not in the group.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise InvalidInputError("torch.distributed is not initialised; call torch.distributed.init_process_group first")
    if group is None:
        return dist.group.WORLD
    # new_group gives ranks outside the group a marker in place of one.
    if group == dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
        raise InvalidInputError(f"rank {dist.get_rank()} is not in this group; only the group's own ranks may take part")
    return group


def gather(group: Any, fact: Any) -> list[Any]:
    """``fact`` of every rank of ``group``, in rank order. Collective; ``fact`` is pickled."""
    import torch.distributed as dist

    facts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(facts, fact, group=group)
    return facts


def agree(group: Any, find: Callable[[], Any], error: type[GroupMismatchError] = GroupMismatchError) -> list[Any]:
    """What ``find`` gives on every rank. Collective: a rank that fails in ``find`` still takes part.

    Raises:
        GroupMismatchError: (as ``error``) on every rank, if ``find`` failed on any of them. A failure that is no error of
            this package is raised as it is on the rank that had it.
    """
    fact, fault, text = None, None, ""
    try:
        fact = find()
    except Exception as caught:
        fault, text = caught, (str(caught).splitlines() or [""])[0]
        text = text if isinstance(caught, XStageError) else f"{type(caught).__name__}: {text}"
    answers = gather(group, (fault is not None, text, fact))
    if fault is not None and not isinstance(fault, XStageError):
        raise fault
    for rank, (failed, text, _) in enumerate(answers):
        if failed:
            raise error(f"rank {rank}: {text}")
    return [answer for _, _, answer in answers]


def require_same(group_facts: list[Any], what: str, error: type[GroupMismatchError] = GroupMismatchError) -> None:
    """Every entry of ``group_facts`` equals the first.

    Raises:
        GroupMismatchError: (as ``error``) otherwise, naming the first rank that differs.
    """
    for rank, fact in enumerate(group_facts):
        if fact != group_facts[0]:
            raise error(f"{what} is {group_facts[0]} on rank 0 and {fact} on rank {rank}; expected the same on all ranks")
