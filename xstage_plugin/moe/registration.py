"""Make every new MegaMoE buffer of this process follow the environment's schedule, and refuse one that cannot work."""

from __future__ import annotations

import functools
import inspect
import socket
from typing import Any

from xstage_plugin import env
from xstage_plugin.checks import shown
from xstage_plugin.errors import InvalidInputError
from xstage_plugin.moe.advisor import WAVE
from xstage_plugin.moe.buffer_schedule import set_schedule
from xstage_plugin.moe.kernel_limits import kernel_refusal
from xstage_plugin.moe.schedule_choice import AUTO, LARGEST_LEAD, PULLS, SCHEDULES, parse_lead
from xstage_plugin.upstream.activate import ensure_active

FACTORY = "get_symm_buffer_for_mega_moe"
SHAPE = ("hidden", "intermediate_hidden", "num_experts", "num_topk", "num_max_tokens_per_rank")
MARK = "_xstage_registered"


def register_moe(allow_unrun: bool = False) -> None:
    """Activate the overlay, and let the buffer factory of deep_gemm check and schedule what it makes.

    Raises:
        UpstreamError: as :func:`xstage_plugin.upstream.activate.ensure_active`.
        InvalidInputError: XSTAGE_MOE_SCHEDULE, XSTAGE_MOE_LEAD or XSTAGE_MOE_PULLS holds what no buffer could be set to.
    """
    check_environment()
    ensure_active(allow_unrun)
    import deep_gemm

    factory = getattr(deep_gemm, FACTORY)
    if getattr(factory, MARK, False):
        return

    @functools.wraps(factory)
    def checked(*args: Any, **kwargs: Any) -> Any:
        asked = inspect.signature(factory).bind(*args, **kwargs).arguments
        check_buffer(asked["group"], {name: asked[name] for name in SHAPE})
        sym_buffer = factory(*args, **kwargs)
        schedule, pulls = env.moe_schedule(), env.moe_pulls()
        # A new buffer holds the original already, and a program that asks for nothing pays nothing.
        if schedule is not None or pulls is not None:
            set_schedule(sym_buffer, schedule or WAVE, parse_lead(env.moe_lead()), pulls=pulls or AUTO)
        return sym_buffer

    setattr(checked, MARK, True)
    setattr(deep_gemm, FACTORY, checked)


def check_environment() -> None:
    """Refuse now what would be refused when the first buffer is there.

    Raises:
        InvalidInputError: naming the variable.
    """
    for variable, value, known in (
        (env.MOE_SCHEDULE, env.moe_schedule(), SCHEDULES),
        (env.MOE_PULLS, env.moe_pulls(), PULLS),
    ):
        if value is not None and value not in known:
            raise InvalidInputError(f"{variable} is {shown(value)}; expected one of {', '.join(known)}")
    lead = env.moe_lead()
    if lead != AUTO and not (lead.isdecimal() and lead.isascii() and 1 <= int(lead[:9]) <= LARGEST_LEAD):
        raise InvalidInputError(f"{env.MOE_LEAD} is {shown(lead)}; expected 'auto' or whole rows from 1 to {LARGEST_LEAD}")
    if lead != AUTO and env.moe_schedule() in (None, WAVE):
        raise InvalidInputError(f"{env.MOE_LEAD} is set and {env.MOE_SCHEDULE} is not; a lead needs 'interleaved' or 'auto'")


def check_buffer(group: Any, shape: dict[str, int]) -> None:
    """Refuse, on all ranks alike, a buffer that the kernels do not take or the ranks do not agree on. Collective.

    Raises:
        InvalidInputError: with the first rank's reason.
    """
    import torch.distributed as dist

    answers: list[Any] = [None] * group.size()
    dist.all_gather_object(answers, (socket.gethostname(), shape), group=group)
    hosts = sorted({host for host, _ in answers})
    if len(hosts) > 1:
        raise InvalidInputError(
            f"the group spans {len(hosts)} hosts ({', '.join(hosts)}); MegaMoE's buffers need one NVLink host"
        )
    for name in SHAPE:
        values = [theirs[name] for _, theirs in answers]
        if len(set(values)) > 1:
            raise InvalidInputError(f"the ranks ask for {name} {values}; expected the same on all")
    reason = kernel_refusal(
        shape["hidden"], shape["intermediate_hidden"], shape["num_experts"], shape["num_topk"], group.size(), _arch()
    )
    if shape["num_max_tokens_per_rank"] < 1:
        reason = f"num_max_tokens_per_rank {shape['num_max_tokens_per_rank']} is below 1"
    if reason:
        raise InvalidInputError(f"MegaMoE takes no such buffer: {reason}")


def _arch() -> str:
    import torch

    return f"sm_{torch.cuda.get_device_capability()[0]}0"
