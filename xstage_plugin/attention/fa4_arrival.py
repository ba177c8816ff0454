"""FlashAttention-4 whose output tiles announce their arrival: a backend that raises a counter at a tile's destination.

Our kernels derive from upstream's classes and rest on how these work inside, so only versions that we have read are used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from xstage_plugin import env
from xstage_plugin.attention.arriving_backend import require_awaited, require_counters
from xstage_plugin.attention.backends import FlashAttention4
from xstage_plugin.errors import InvalidInputError

if TYPE_CHECKING:
    import torch

PACKAGE = "flash-attn-4"
# By version, the files that the kernels derive from or call below their public functions, with their SHA-256.
KNOWN_VERSIONS: Mapping[str, Mapping[str, str]] = {
    "4.0.0b36": {
        "flash_attn/cute/flash_fwd.py": "be6e88c7d9f122aa5ab29ff5946f6270af0b580e4403351b869f1330b71ca53c",
        "flash_attn/cute/flash_fwd_sm100.py": "50c106f0ed8224b6819b00742d2a673fff792609f0284d4d9bee718955584e8d",
        "flash_attn/cute/flash_fwd_sm90.py": "340e8e4115c5dd06ceb873d9c886fac7b0799ec5ac47324e0dc9244e2b87625e",
        "flash_attn/cute/interface.py": "7665cf3a133d115da79e55b489615ea549b96b3333dc6972d76138d124cd6e1d",
        "flash_attn/cute/named_barrier.py": "1f80f96b690a2888ee1301d377665db6e9dd74b402f80eaa867d38f7294d813b",
        "flash_attn/cute/pipeline.py": "16a276487d7d0cb2c90a2f451ad482939b9faaaaa1453e43a1fcc7b73a187337",
        "flash_attn/cute/tile_scheduler.py": "bdd2affa3c11480f2a31b03755c43ee5181370a95ac2ef43cd00334d41073896",
        "flash_attn/cute/utils.py": "85c6aa8f8e8eeaa3b68cfa99258281421141231ce416e291a86cb818e014b0c8",
    }
}
# Wider heads leave no room for an output tile beside Q, K and V.
HEAD_DIM_LIMIT = 128
# Major numbers of the compute capabilities that there are kernels for, and of those whose kernel was run.
GENERATIONS = (9, 10)
# Our CTAs have a fixed share of the tiles; upstream's take one each, so that slow SMs get fewer. On two H200s that costs more
# than a closing barrier somewhere between 8192 and 16384 keys (benchmarks/results/ab_projection_h200_pair.json).
LONGEST_KEYS = 8192
RUN_GENERATIONS = (9,)


class FlashAttention4Arrival(FlashAttention4):
    """PyPI flash-attn-4 with our storing role, for Hopper and Blackwell. A call, without counters, is the stock kernel.

    Args:
        sms: SMs that the kernel takes at most; the others are free for a consumer beside it. None: all. Of an odd number one
            stays free where CTAs come in pairs (Blackwell, head dimension 128, not causal), and a pair is the least.
        allow_unrun: also the kernel for Blackwell, which compiles and was never run by us; XSTAGE_ALLOW_UNRUN=1 says the same.
        longest_keys: with longer keys a layer takes the stock kernel and a closing barrier, which is faster. None: never.

    Attributes:
        awaits_rows: ``announce`` takes ``awaits``.

    Raises:
        InvalidInputError: ``sms`` or ``longest_keys`` below 1.
    """

    name = "fa4-arrival"
    awaits_rows = True

    def __init__(self, sms: int | None = None, allow_unrun: bool = False, longest_keys: int | None = LONGEST_KEYS) -> None:
        if sms is not None and sms < 1:
            raise InvalidInputError(f"sms is {sms}; expected a number of SMs from 1 on, or None for all")
        if longest_keys is not None and longest_keys < 1:
            raise InvalidInputError(f"longest_keys is {longest_keys}; expected a length from 1 on, or None for no limit")
        self.sms, self.allow_unrun, self.longest_keys = sms, allow_unrun, longest_keys

    def refusal(self, head_dim: int, dtype: torch.dtype, device: torch.device) -> str:
        import torch

        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            refused = generation_refusal(major, minor, self.allow_unrun or env.allow_unrun())
            if refused:
                return refused
        if head_dim > HEAD_DIM_LIMIT:
            return f"{self.name} takes head dimensions up to {HEAD_DIM_LIMIT}, not {head_dim}; use fa4"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"{self.name} takes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}; use fa4"
        return super().refusal(head_dim, dtype, device) or installed_refusal()

    def block_rows(self, head_dim: int, dtype: torch.dtype, causal: bool) -> int:
        """Rows of one output tile."""
        from xstage_plugin.attention.kernels.fa4_launch import tile_config

        return int(tile_config(head_dim, causal).m_block_size)

    def announce(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        arrivals: torch.Tensor,
        *,
        softmax_scale: float,
        causal: bool,
        spans: torch.Tensor | None = None,
        awaits: torch.Tensor | None = None,
        expected: int = 0,
    ) -> None:
        """As a call, and for every tile (m, h, b) that is complete in ``out`` adds 1 to ``arrivals[b, h, m * block_rows]``.

        The addition is a release at system scope: who reads the counter with an acquire sees the tile.

        Args:
            q, k, v, out, softmax_scale, causal: as a call's.
            arrivals: int32 [b, h, rows], rows contiguous, other strides as they come (0 too).
            spans: int64 of ``fa4_launch.spans_shape``: when each tile's store was issued, its shared memory free and the store
                complete, in ns of the global timer and cycles of the SM. None costs nothing.
            awaits: int32 [B, local rows], rows contiguous, this rank's own counters: the kernel ends only when those of all row
                blocks have reached ``expected``, and clears them. It holds SMs until then, and traps after 600 s or where a
                counter exceeds ``expected``. None: it ends with its own tiles, and is the very same kernel as without.
            expected: tiles of a row block, over the heads of all ranks.

        Raises:
            InvalidInputError: keys of length 0 (no tile would be computed), counters of another shape or type; awaited ones
                without rows, without a q to compute, or ``expected`` below 1.
        """
        require_counters(tuple(out.shape), k.shape[1], tuple(arrivals.shape), str(arrivals.dtype), arrivals.stride(-1))
        if awaits is not None:
            require_awaited(tuple(q.shape), tuple(awaits.shape), str(awaits.dtype), awaits.stride(-1), expected)
        if not q.numel():
            return
        from xstage_plugin.attention.kernels.fa4_launch import launch

        launch(q, k, v, out, arrivals, spans, softmax_scale, causal, self.sms, awaits, expected)


def generation_refusal(major: int, minor: int, allow_unrun: bool) -> str:
    """Why there is no kernel for a GPU of this compute capability, in one line; empty if there is one.

    ``allow_unrun``: one that was never run counts.
    """
    name = FlashAttention4Arrival.name
    if major not in GENERATIONS:
        return f"{name} is written for sm_90 and sm_100; this GPU is sm_{major}{minor}, use fa4"
    if major not in RUN_GENERATIONS and not allow_unrun:
        return (
            f"{name} is unrun on sm_{major}{minor}: compiled, and nobody ran it; it is used only with "
            f"{env.ALLOW_UNRUN}=1 or FlashAttention4Arrival(allow_unrun=True)"
        )
    return ""


@lru_cache
def installed_refusal() -> str:
    """Why the installed flash-attn-4 is none that the kernels derive from, in one line; empty if it is one."""
    try:
        distribution = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        return f"{PACKAGE} is not installed; install {PACKAGE}=={newest_known()}"
    return refusal_of(distribution.version, Path(str(distribution.locate_file(""))))


def refusal_of(version: str, root: Path) -> str:
    """As :func:`installed_refusal`, for ``version`` below the folder ``root``."""
    if version not in KNOWN_VERSIONS:
        known = ", ".join(KNOWN_VERSIONS)
        return f"{PACKAGE} {version} is not one that our kernels derive from; known: {known}"
    for path, sha256 in KNOWN_VERSIONS[version].items():
        try:
            found = hashlib.sha256((root / path).read_bytes()).hexdigest()
        except OSError as error:
            return f"{path} of {PACKAGE} {version} cannot be read ({error.strerror}); reinstall {PACKAGE}"
        if found != sha256:
            return f"{path} is not the one of {PACKAGE} {version}; reinstall {PACKAGE}=={version}"
    return ""


def newest_known() -> str:
    """The version to install: the last one in the table."""
    return list(KNOWN_VERSIONS)[-1]
