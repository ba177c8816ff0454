"""The word in MegaMoE's symmetric buffer that tells the kernel its schedule, and which overlay reads it. Mechanism only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xstage_plugin.errors import InvalidInputError
from xstage_plugin.moe.all_ranks import DESTROYED
from xstage_plugin.moe.schedule_choice import ScheduleChoice

if TYPE_CHECKING:
    import torch

    from xstage_plugin.upstream.activate import Activation


def write_choice(sym_buffer: Any, choice: ScheduleChoice) -> None:
    """In stream order: what was launched before keeps the earlier schedule."""
    _word(sym_buffer).fill_(choice.word)


def read_choice(sym_buffer: Any) -> ScheduleChoice:
    """What the kernel would read now. Waits for the GPU."""
    return ScheduleChoice.of_word(int(_word(sym_buffer).item()), "read from the buffer")


def require_overlay() -> Activation:
    """What this process's DeepGEMM compiles from.

    Raises:
        NotInEffectError: the stock headers.
    """
    from xstage_plugin.upstream.activate import active
    from xstage_plugin.upstream.errors import NotInEffectError

    activation = active()
    if activation is None:
        raise NotInEffectError("MegaMoE runs its original schedule in this process; call xstage_plugin.register() first")
    return activation


def has_shared_pulls(device: torch.device) -> bool:
    """Whether the kernel for ``device`` has shared pulls: they are a patch of the SM90 kernel."""
    import torch

    patched = require_overlay().pin.patches
    return torch.cuda.get_device_capability(device)[0] == 9 and any("sm90" in patch.path for patch in patched)


def _word(sym_buffer: Any) -> torch.Tensor:
    import torch

    buffer = sym_buffer.buffer
    if buffer is None:
        raise InvalidInputError(DESTROYED)
    first = require_overlay().pin.schedule_word_byte
    assert first is not None  # a pin that can be active has one
    word: torch.Tensor = buffer[first : first + 4].view(torch.int32)
    return word
