"""Whether a Ulysses attention layer runs fused or serial: the caller's word, or the advisor's over a platform. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from xstage_plugin import env
from xstage_plugin.attention.advisor import PIGGYBACK, advise_attention
from xstage_plugin.attention.launch_plan import fused_plan
from xstage_plugin.attention.layout import OWN_LAST, UlyssesLayout
from xstage_plugin.attention.workload import AttentionWorkload
from xstage_plugin.burst_gap.platform_model import PlatformModel
from xstage_plugin.checks import unknown_name
from xstage_plugin.errors import InvalidInputError

AUTO, FUSED, SERIAL = "auto", "fused", "serial"
MODES = (AUTO, FUSED, SERIAL)


@dataclass(frozen=True)
class ModeChoice:
    """``fused`` or ``serial``, and why: the advisor's reason, or that it was asked for."""

    mode: str
    reason: str


def checked_mode(mode: str) -> str:
    """``mode`` if it is a known one.

    Raises:
        InvalidInputError: otherwise.
    """
    if mode not in MODES:
        raise unknown_name("mode", str(mode), MODES)
    return mode


def choose_mode(layout: UlyssesLayout, mode: str, platform: PlatformModel | None, arch: str) -> ModeChoice:
    """The mode for ``layout``; ``auto`` asks the advisor, which knows full attention only (a causal layer is advised as one).

    Args:
        layout: the same on all ranks, so that they decide alike.
        mode: ``auto``, ``fused`` or ``serial``.
        platform: what the advisor decides by; used for ``auto`` only.
        arch: of the ranks' GPUs, as ``sm_90``.

    Raises:
        InvalidInputError: unknown mode, or a platform of another GPU generation.
    """
    if checked_mode(mode) != AUTO:
        return ModeChoice(mode, "asked for")
    if layout.ranks == 1:
        return ModeChoice(FUSED, "one rank: the kernel's own output is the result")
    if platform is None or platform.device.arch != arch:
        which = "there is no platform" if platform is None else f"platform {platform.name} is of {platform.device.arch}"
        raise InvalidInputError(
            f"{which} and this device is {arch or 'no GPU'}; give platform=, set {env.PLATFORM} to what `xstage calibrate` "
            "wrote, or give mode='fused' or 'serial'"
        )
    workload = AttentionWorkload(
        seq_len=layout.seq_len,
        heads_per_rank=max(layout.heads),  # the rank with the most heads sets the pace
        head_dim=layout.head_dim,
        ranks=layout.ranks,
        batch=layout.batch,
        head_by_head=any(launch.head_by_head for launch in fused_plan(layout, 0, OWN_LAST).launches),
    )
    decision = advise_attention(platform, workload)
    return ModeChoice(FUSED if decision.action == PIGGYBACK else SERIAL, decision.reason)
