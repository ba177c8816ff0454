# mypy: ignore-errors
"""Compile and launch our FlashAttention-4 kernels, beside upstream's cache: a stock call never gets one of them."""

from functools import lru_cache

import cutlass
import cutlass.cute as cute
import torch
from flash_attn.cute import interface, utils
from flash_attn.cute.cute_dsl_utils import get_broadcast_dims, maybe_contiguous, to_cute_tensor, torch2cute_dtype_map

from xstage_plugin.attention.kernels.tile_walk import SPAN_SHAPE

HOPPER = 9
S_PING_PONG_HEAD_DIMS = (64, 128)
CTA_PAIR_HEAD_DIMS = range(113, 129)  # that upstream pads to 128

_kernels = {}


def generation() -> int:
    """Major number of the compute capability that upstream picks its kernels for."""
    return interface._get_device_arch() // 10


def tile_config(head_dim: int, causal: bool, rows: int = 1):
    """Upstream's own choice of tiles, so that our results are its results bit by bit."""
    return interface._get_fwd_config(
        arch=interface._get_device_arch(),
        head_dim=head_dim,
        head_dim_v=head_dim,
        max_seqlen_q=rows,
        max_seqlen_k=1,
        num_head_kv=1,
        qhead_per_kvhead=1,
        pack_gqa=False,
        batch_size=1,
        causal=causal,
        local=False,
        window_size_left=None,
        window_size_right=None,
        num_splits=1,
        device=None,
    )


@lru_cache
def kernel_arguments(head_dim: int, causal: bool, rows: int) -> dict:
    """What upstream's class of this generation is made with beside the types, for ``rows`` rows of q.

    Its choices that it does not give away by a function, for dense attention without split-KV, are made here once more.
    """
    tiles = tile_config(head_dim, causal, rows)
    if generation() == HOPPER:
        return {
            "tile_m": tiles.m_block_size,
            "tile_n": tiles.n_block_size,
            "num_stages": 2,
            "mma_pv_is_rs": tiles.mma_pv_is_rs,
            "intra_wg_overlap": tiles.intra_wg_overlap,
        }
    one_work_tile = rows <= tiles.q_stage * tiles.m_block_size
    pairs = not causal and not one_work_tile and head_dim in CTA_PAIR_HEAD_DIMS
    ping_pong = tiles.q_stage == 1 and head_dim in S_PING_PONG_HEAD_DIMS
    return {
        "m_block_size": tiles.m_block_size,
        "n_block_size": tiles.n_block_size,
        "q_stage": tiles.q_stage,
        "use_2cta_instrs": pairs and not utils._get_disable_2cta_default(is_fwd=True),
        "use_s_ping_pong": ping_pong and not utils._get_disable_s_ping_pong_default(),
    }


def launch(
    q, k, v, out, arrivals, spans, softmax_scale: float, causal: bool, sms: int | None, awaits=None, expected: int = 0
) -> None:
    """Run attention into ``out`` on the current stream.

    Args:
        q, k, v, out: as :class:`AttentionBackend`'s.
        arrivals: int32 [b, h, rows], or None.
        spans: int64 of :func:`spans_shape`, or None.
        softmax_scale, causal: the attention.
        sms: CTAs to launch at most; None: one on each SM.
        awaits: int32 [sequences, rows], or None.
        expected: what they count up to.
    """
    q, k, v = (maybe_contiguous(x.detach()) for x in (q, k, v))
    ctas = sms or _sm_count(q.device.index)
    operands = (q, k, v, out, arrivals, spans, awaits)
    numbers = (None if awaits is None else expected, softmax_scale)
    # CuTe keeps strides of 0 in the kernel's type.
    broadcasts = tuple(None if x is None else get_broadcast_dims(x) for x in operands)
    choices = tuple(kernel_arguments(q.shape[3], causal, q.shape[1]).values())
    key = (q.dtype, q.shape[3], q.shape[2] // k.shape[2], causal, ctas, choices, broadcasts)
    kernel = _kernels.get(key)
    if kernel is None:
        kernel = _kernels[key] = build(*operands, *numbers, causal, ctas)
    kernel(*operands, *numbers)


def build(q, k, v, out, arrivals, spans, awaits, expected: int | None, softmax_scale: float, causal: bool, ctas: int):
    """The compiled kernel for tensors like these; also takes fake tensors, and then needs no GPU."""
    return cute.compile(
        forward(q, k, causal, ctas),
        *(to_cute_tensor(x) for x in (q, k, v, out)),
        to_cute_tensor(arrivals, assumed_align=4),
        to_cute_tensor(spans, assumed_align=8),
        to_cute_tensor(awaits, assumed_align=4),
        None if expected is None else cutlass.Int32(expected),
        cutlass.Float32(softmax_scale),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )


def forward(q, k, causal: bool, ctas: int):
    """Our kernel of this generation, for q and k as :func:`launch`'s."""
    _, rows, heads, head_dim = q.shape
    given = kernel_arguments(head_dim, causal, rows) | {
        "qhead_per_kvhead": heads // k.shape[2],
        "is_causal": causal,
        "pack_gqa": False,
        "num_sms": ctas,
    }
    if generation() == HOPPER:
        from xstage_plugin.attention.kernels.fa4_sm90 import ArrivingForwardSm90

        return ArrivingForwardSm90(torch2cute_dtype_map[q.dtype], head_dim, head_dim, **given)
    from xstage_plugin.attention.kernels.fa4_sm100 import ArrivingForwardSm100

    return ArrivingForwardSm100(head_dim, head_dim, **given)


def spans_shape(q, causal: bool) -> tuple[int, ...]:
    """[b, h, row blocks, 3, 2] for q [b, rows, h, d]."""
    batch, rows, heads, head_dim = q.shape
    return (batch, heads, -(-rows // tile_config(head_dim, causal).m_block_size), *SPAN_SHAPE)


@lru_cache
def _sm_count(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
