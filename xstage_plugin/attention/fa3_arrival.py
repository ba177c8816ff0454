"""FlashAttention-3 whose output tiles announce their arrival: a build from the patched tree that raises a counter per tile.

Its kernels are C++: whoever wants them applies our patch to the pinned submodule and builds it by upstream's own procedure
(``patches/README.md``). The build is known by operators that only the patch adds.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from xstage_plugin.attention.arriving_backend import require_awaited, require_counters
from xstage_plugin.attention.backends import _first_line, _wrong_generation
from xstage_plugin.errors import InvalidInputError
from xstage_plugin.upstream.pins import load_source_trees

if TYPE_CHECKING:
    import torch

IMPORT_NAME = "flash_attn_3"
NAME = "fa3-arrival"
HEAD_DIMS = (64, 96, 128, 192, 256)  # that a build has kernels for, or leaves out
CLUSTER_CTAS = 2


class FlashAttention3Arrival:
    """flash_attn_3 built from the patched tree. Hopper only. A call, without counters, is the stock kernel.

    Args:
        sms: SMs that the kernel takes at most; the others are free for a consumer beside it. An odd number counts as one less:
            CTAs come in pairs. None: all.

    Raises:
        InvalidInputError: ``sms`` below 2.
    """

    name = NAME
    awaits_rows = True  # announce() takes awaits
    longest_keys = None  # counters cost it 0.1% at most, at any length

    def __init__(self, sms: int | None = None) -> None:
        if sms is not None and sms < CLUSTER_CTAS:
            raise InvalidInputError(f"sms is {sms}; expected a number of SMs from {CLUSTER_CTAS} on, or None for all")
        self.sms = sms

    def refusal(self, head_dim: int, dtype: torch.dtype, device: torch.device) -> str:
        wrong = _wrong_generation(self.name, device, (9,))
        if wrong:
            return wrong
        try:
            importlib.import_module(f"{IMPORT_NAME}._C")
            flags = importlib.import_module("flash_attn_config").CONFIG["build_flags"]
        except (ImportError, OSError, RuntimeError) as error:
            return f"{self.name} cannot be imported ({_first_line(error)}); build {_known()} with our patch and XSTAGE_ARRIVALS"
        operators = _operators()
        patched = hasattr(operators, "xstage_pinned_commit")
        return build_refusal(operators.xstage_pinned_commit() if patched else None, flags, head_dim, str(dtype))

    def block_rows(self, head_dim: int, dtype: torch.dtype, causal: bool) -> int:
        """Rows of one output tile, by upstream's own table."""
        return int(_operators().xstage_block_rows(head_dim, causal))

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *, softmax_scale: float, causal: bool
    ) -> None:
        _operators().fwd(
            q,
            k,
            v,
            out=out,
            softmax_scale=softmax_scale,
            is_causal=causal,
            num_splits=1,
            pack_gqa=False,
            sm_margin=self._sm_margin(q.device),
        )

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
            spans: int64 [b, h, row blocks, 3, 2]: when each tile's store was issued, its shared memory free and the store
                complete, in ns of the global timer and cycles of the SM. Only a build with XSTAGE_ARRIVAL_SPANS takes them.
            awaits: int32 [sequences, rows], rows contiguous: this rank's own counters. The kernel ends only when every block of
                ``block_rows`` rows is there, its first row's counter at ``expected``, and sets these counters to 0. It traps
                after 600 s, and where a counter is beyond ``expected``. Till then it holds its SMs: what the ranks still need
                to store those rows must run on others. None: it ends with its own tiles.
            expected: count of a block that has arrived.

        Raises:
            InvalidInputError: keys of length 0, or fewer keys than queries under a causal mask (a tile that sees no key is not
                computed), or counters of another shape or type; awaited ones without rows, or without a q to compute.
        """
        require_counters(tuple(out.shape), k.shape[1], tuple(arrivals.shape), str(arrivals.dtype), arrivals.stride(-1))
        require_keys(q.shape[1], k.shape[1], causal)
        if awaits is not None:
            require_awaited(tuple(q.shape), tuple(awaits.shape), str(awaits.dtype), awaits.stride(-1), expected)
        margin = self._sm_margin(q.device)
        _operators().xstage_announce(q, k, v, out, arrivals, spans, awaits, expected, softmax_scale, causal, margin)

    def _sm_margin(self, device: torch.device) -> int:
        if self.sms is None:
            return 0
        import torch

        return sm_margin(torch.cuda.get_device_properties(device).multi_processor_count, self.sms)


def build_refusal(commit: int | None, flags: Mapping[str, bool], head_dim: int, dtype: str) -> str:
    """Why a build cannot run this, in one line; empty if it can.

    Args:
        commit: the commit that it was patched at, its first seven digits; None: it has no operator of ours.
        flags: what upstream's build left out, from its ``flash_attn_config``.
        head_dim, dtype: of the attention.
    """
    if commit is None:
        return f"{IMPORT_NAME} as installed announces nothing; build {_known()} with our patch and XSTAGE_ARRIVALS"
    if f"{commit:07x}" not in _known_commits():
        return f"{IMPORT_NAME} as installed is a patched flash-attention {commit:07x}; known: {_known()}"
    takes = ["bfloat16"] if flags["FLASHATTENTION_DISABLE_FP16"] else ["bfloat16", "float16"]
    if dtype.removeprefix("torch.") not in takes:
        return f"{NAME} as built takes {' and '.join(takes)}, not {dtype}"
    widest = max(size for size in HEAD_DIMS if not flags[f"FLASHATTENTION_DISABLE_HDIM{size}"])
    if head_dim % 8 or not 8 <= head_dim <= widest:
        return f"{NAME} as built takes head dimensions up to {widest} that are multiples of 8, not {head_dim}"
    return ""


def require_keys(rows: int, kv_rows: int, causal: bool) -> None:
    """Raise InvalidInputError where a causal mask leaves rows of q without a key."""
    if causal and rows > kv_rows:
        raise InvalidInputError(
            f"{rows} rows of q on {kv_rows} keys under a causal mask; expected at most as many rows as keys: the first tiles "
            "would not be computed, and not announced"
        )


def sm_margin(present: int, sms: int) -> int:
    """SMs to leave free so that at most ``sms`` of the ``present`` ones are taken, and an even number of them."""
    return max(present - sms + sms % CLUSTER_CTAS, 0)


def _operators() -> torch._ops._OpNamespace:
    import torch

    return getattr(torch.ops, IMPORT_NAME)


def _known_commits() -> tuple[str, ...]:
    return tuple(pin.commit[:7] for pin in load_source_trees().values() if pin.import_name == IMPORT_NAME)


def _known() -> str:
    return ", ".join(f"flash-attention {commit}" for commit in _known_commits())
