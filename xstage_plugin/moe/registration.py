"""Make every new MegaMoE buffer of this process follow XSTAGE_MOE_SCHEDULE and XSTAGE_MOE_LEAD."""

from __future__ import annotations

import functools
from typing import Any

from xstage_plugin import env
from xstage_plugin.moe.mega_moe import set_schedule
from xstage_plugin.moe.schedule_choice import parse_lead
from xstage_plugin.upstream.activate import ensure_active

FACTORY = "get_symm_buffer_for_mega_moe"
MARK = "_xstage_registered"


def register_moe() -> None:
    """Activate the overlay, and let the buffer factory of deep_gemm set the environment's schedule on what it makes.

    Raises:
        UpstreamError: as :func:`xstage_plugin.upstream.activate.ensure_active`.
        InvalidInputError: the environment holds no lead.
    """
    parse_lead(env.moe_lead())
    ensure_active()
    import deep_gemm

    factory = getattr(deep_gemm, FACTORY)
    if getattr(factory, MARK, False):
        return

    @functools.wraps(factory)
    def with_schedule(*args: Any, **kwargs: Any) -> Any:
        sym_buffer = factory(*args, **kwargs)
        schedule = env.moe_schedule()
        if schedule != "wave":  # a new buffer holds the wave already, and a program that asks for nothing pays nothing
            set_schedule(sym_buffer, schedule, parse_lead(env.moe_lead()))
        return sym_buffer

    setattr(with_schedule, MARK, True)
    setattr(deep_gemm, FACTORY, with_schedule)
