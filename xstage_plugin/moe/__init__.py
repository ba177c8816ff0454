"""MegaMoE: workload, schedules, the advisor, the call.

The names below are imported when they are asked for: what predicts and decides needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xstage_plugin.moe.buffer_schedule import current_schedule, schedule, set_schedule
    from xstage_plugin.moe.moe_call import mega_moe, prepare_mega_moe

__all__ = ["current_schedule", "mega_moe", "prepare_mega_moe", "schedule", "set_schedule"]
_HOMES = {name: "moe_call" if "mega_moe" in name else "buffer_schedule" for name in __all__}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
