"""The call: MegaMoE with a schedule of its own, checked before it launches, plainly or as a torch operator.

``torch.ops.xstage.mega_moe`` takes tensors and returns one, so that torch.compile may order and fuse around it as around any
product; it copies what does not lie in the symmetric buffer yet. It can be captured in a CUDA graph, which then sets its own
schedule at each replay.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from xstage_plugin.checks import shown
from xstage_plugin.errors import InvalidInputError, XStageError
from xstage_plugin.moe.all_ranks import DESTROYED, gather_or_raise
from xstage_plugin.moe.buffer_schedule import plan_schedule
from xstage_plugin.moe.schedule_choice import AUTO, ScheduleChoice
from xstage_plugin.moe.schedule_word import require_overlay, write_choice

if TYPE_CHECKING:
    import torch

    Weights = tuple[torch.Tensor, torch.Tensor]

BLOCK = 128  # side of the blocks of weights that share a scale
AS_SET = -1  # the operator leaves the word alone
# Buffers by number, which no later buffer gets again.
_buffers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_next = itertools.count()
_compiled: weakref.WeakSet[Any] = weakref.WeakSet()


class CompileError(XStageError):
    """A rank refuses the first call of a buffer or cannot compile it; raised on all of them, and nothing was launched."""


@dataclass(frozen=True)
class MegaMoeCall:
    """MegaMoE on one buffer under one schedule, compiled on all ranks; one operator, which torch.compile takes whole.

    Use the result on every rank: a compiler drops an operator whose result nobody reads, and the peers would wait for it.

    Attributes:
        key: by which the operator finds the buffer, which its maker keeps alive.
        word: schedule of each call, or ``AS_SET``: what the buffer is set to.
    """

    key: int
    word: int

    def __call__(
        self,
        x: torch.Tensor,
        x_sf: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        l1_weights: Weights,
        l2_weights: Weights,
    ) -> torch.Tensor:
        """Result (tokens, hidden) bfloat16 of x (tokens, hidden) FP8, x_sf (tokens, hidden / 128) float, topk_idx
        (tokens, topk) int64 with -1 for none, and topk_weights (tokens, topk) float. All ranks call it, also with 0 tokens.
        """
        import torch

        inputs = (x, x_sf, topk_idx, topk_weights)
        return cast("torch.Tensor", torch.ops.xstage.mega_moe(*inputs, *l1_weights, *l2_weights, self.key, self.word))


def prepare_mega_moe(
    l1_weights: Weights,
    l2_weights: Weights,
    sym_buffer: Any,
    *,
    schedule: str | None = None,
    lead: str | int = AUTO,
    pulls: str = AUTO,
    platform: str | None = None,
) -> MegaMoeCall:
    """Compile the kernel on all ranks of the buffer's group, together, and launch nothing. Collective.

    Args:
        l1_weights, l2_weights: as ``deep_gemm.transform_weights_for_mega_moe_sm90`` returned them.
        sym_buffer: what ``deep_gemm.get_symm_buffer_for_mega_moe`` returned.
        schedule, lead, pulls, platform: as :func:`xstage_plugin.moe.set_schedule`, for each call of the result, which leaves
            it set; None: what the buffer is set to then. Ranks do not talk about it: they need the same only to be fast.

    Raises:
        InvalidInputError: shapes, types or devices that do not go with the buffer, or an odd number of SMs.
        CompileError: on every rank, if one refuses the call or its kernel does not compile there.
        UpstreamError: the overlay is not active in this process.
    """
    import torch

    y = None
    if sym_buffer.buffer is not None:
        shape = (sym_buffer.num_max_tokens_per_rank, sym_buffer.hidden)
        y = torch.empty(shape, dtype=torch.bfloat16, device=sym_buffer.buffer.device)
    word = _prepare(y, l1_weights, l2_weights, sym_buffer, schedule, lead, pulls, platform, False)
    operator()
    if sym_buffer not in _numbers:
        _numbers[sym_buffer] = next(_next)
        _buffers[_numbers[sym_buffer]] = sym_buffer
    return MegaMoeCall(_numbers[sym_buffer], word)


def mega_moe(
    y: torch.Tensor,
    l1_weights: Weights,
    l2_weights: Weights,
    sym_buffer: Any,
    *,
    schedule: str | None = None,
    lead: str | int = AUTO,
    pulls: str = AUTO,
    platform: str | None = None,
    check_ids: bool = False,
) -> None:
    """Run MegaMoE into ``y``. All ranks of the buffer's group call it, also one with 0 tokens; the first call compiles.

    Args:
        y: (tokens, hidden) bfloat16, this rank's result; tokens may be 0, and at most the buffer's. The first ``tokens`` rows
            of the buffer's x, x_sf, topk_idx and topk_weights are its input.
        l1_weights, l2_weights, sym_buffer, schedule, lead, pulls, platform: as :func:`prepare_mega_moe`.
        check_ids: look at topk_idx first, which waits for the GPU. An id out of range overwrites memory in the kernel.

    Raises:
        As :func:`prepare_mega_moe`, and InvalidInputError for an id out of range with ``check_ids``.
    """
    word = _prepare(y, l1_weights, l2_weights, sym_buffer, schedule, lead, pulls, platform, check_ids)
    if word != AS_SET:
        write_choice(sym_buffer, ScheduleChoice.of_word(word, "asked for by the call"))
    _launch(y, l1_weights, l2_weights, sym_buffer)


def check_topk_ids(topk_idx: torch.Tensor, experts: int) -> None:
    """Refuse ids that are neither an expert nor -1. Waits for the GPU.

    Raises:
        InvalidInputError: with the first such id and its token.
    """
    wrong = (topk_idx < -1) | (topk_idx >= experts)
    if bool(wrong.any()):
        token, place = (int(value) for value in wrong.nonzero()[0])
        raise InvalidInputError(
            f"topk_idx[{token}, {place}] is {int(topk_idx[token, place])}; expected an expert from 0 to {experts - 1}, or -1"
        )


@functools.lru_cache(maxsize=1)
def operator() -> Any:
    """``torch.ops.xstage.mega_moe``, registered on the first call."""
    import torch

    def run(
        x: torch.Tensor,
        x_sf: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        l1_weights: torch.Tensor,
        l1_scales: torch.Tensor,
        l2_weights: torch.Tensor,
        l2_scales: torch.Tensor,
        key: int,
        word: int,
    ) -> torch.Tensor:
        buffer = _buffers.get(key)
        if buffer is None or buffer.buffer is None:
            raise InvalidInputError("the symmetric buffer of this call is gone; prepare the call with the new one")
        _check_weights((l1_weights, l1_scales), (l2_weights, l2_scales), buffer)
        tokens = x.shape[0]
        if tokens > buffer.num_max_tokens_per_rank:
            raise InvalidInputError(f"x has {tokens} tokens; expected at most the buffer's {buffer.num_max_tokens_per_rank}")
        inputs = {"x": x, "x_sf": x_sf, "topk_idx": topk_idx, "topk_weights": topk_weights}
        for name, value in inputs.items():
            place = getattr(buffer, name)[:tokens]
            if value.shape != place.shape or value.dtype != place.dtype:
                raise InvalidInputError(f"{name} is {_told(value)}; expected {_told(place)}")
            if value.data_ptr() != place.data_ptr():
                place.copy_(value)
        if word != AS_SET:
            write_choice(buffer, ScheduleChoice.of_word(word, "asked for by the call"))
        y = torch.empty(tokens, buffer.hidden, dtype=torch.bfloat16, device=x.device)
        _launch(y, (l1_weights, l1_scales), (l2_weights, l2_scales), buffer)
        return y

    registered = torch.library.custom_op(
        "xstage::mega_moe",
        run,
        mutates_args=(),
        schema="(Tensor x, Tensor x_sf, Tensor topk_idx, Tensor topk_weights, Tensor l1_weights, Tensor l1_scales, "
        "Tensor l2_weights, Tensor l2_scales, int key, int word) -> Tensor",
    )
    registered.register_fake(lambda x, *_: torch.empty(x.shape, dtype=torch.bfloat16, device=x.device))
    return registered


def _launch(y: torch.Tensor, l1_weights: Weights, l2_weights: Weights, sym_buffer: Any) -> None:
    import deep_gemm

    deep_gemm.fp8_mega_moe(y, l1_weights, l2_weights, sym_buffer)


def _prepare(
    y: torch.Tensor | None,
    l1_weights: Weights,
    l2_weights: Weights,
    sym_buffer: Any,
    schedule: str | None,
    lead: str | int,
    pulls: str,
    platform: str | None,
    check_ids: bool,
) -> int:
    """The word for a call that can work; the first time for a buffer, its kernel compiled on every rank.

    A kernel that runs waits for its peers, so one rank that refuses or cannot compile must be heard of by all before any
    launches. Later calls talk to nobody: what they refuse then, they refuse alone.
    """
    import torch

    def look() -> int:
        if sym_buffer.buffer is None:
            raise InvalidInputError(DESTROYED)
        if torch.cuda.get_device_capability(sym_buffer.buffer.device)[0] != 9:
            raise InvalidInputError(
                "mega_moe runs the FP8 kernel of Hopper; elsewhere use set_schedule and deep_gemm's own call"
            )
        _check_call(y, l1_weights, l2_weights, sym_buffer)
        if check_ids:
            check_topk_ids(sym_buffer.topk_idx[: len(cast("torch.Tensor", y))], sym_buffer.num_experts)
        return _word_of(sym_buffer, schedule, lead, pulls, platform)

    if sym_buffer in _compiled:
        return look()
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise InvalidInputError("the first call of this buffer compiles; make one outside the capture, on all ranks")
    word = AS_SET

    def compile_too() -> None:
        nonlocal word
        word = look()
        _compile(cast("torch.Tensor", y), l1_weights, l2_weights, sym_buffer)

    gather_or_raise(sym_buffer, "the first MegaMoE call of a buffer", compile_too, CompileError)
    _compiled.add(sym_buffer)
    return word


def _word_of(sym_buffer: Any, schedule: str | None, lead: str | int, pulls: str, platform: str | None) -> int:
    if schedule is not None:
        return plan_schedule(sym_buffer, schedule, lead, pulls, platform).word
    require_overlay()
    if (lead, pulls) != (AUTO, AUTO):
        raise InvalidInputError("lead or pulls without schedule; give schedule= as well, or use set_schedule")
    return AS_SET


def _compile(y: torch.Tensor, l1_weights: Weights, l2_weights: Weights, sym_buffer: Any) -> None:
    """Capturing the call compiles and loads the kernel and launches nothing; the graph is thrown away."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        _launch(y, l1_weights, l2_weights, sym_buffer)
    del graph


def _check_call(y: torch.Tensor | None, l1_weights: Weights, l2_weights: Weights, sym_buffer: Any) -> None:
    import torch

    hidden, most = sym_buffer.hidden, sym_buffer.num_max_tokens_per_rank
    if not isinstance(y, torch.Tensor):
        raise InvalidInputError(f"y is {shown(y)}; expected a tensor (tokens, {hidden})")
    if y.dim() != 2 or y.shape[1] != hidden or y.dtype != torch.bfloat16 or not y.is_contiguous():
        raise InvalidInputError(f"y is {_told(y)}; expected contiguous bfloat16 (tokens, {hidden})")
    if y.shape[0] > most:
        raise InvalidInputError(f"y has {y.shape[0]} tokens; expected at most the buffer's {most}")
    if y.device != sym_buffer.buffer.device:
        raise InvalidInputError(f"y is on {y.device}; expected the buffer's {sym_buffer.buffer.device}")
    _check_weights(l1_weights, l2_weights, sym_buffer)


def _check_weights(l1_weights: Weights, l2_weights: Weights, sym_buffer: Any) -> None:
    """Weights (experts of a rank, N, K) in FP8 with a float scale per block of 128 x 128, and SMs in pairs."""
    import deep_gemm
    import torch

    hidden, intermediate = sym_buffer.hidden, sym_buffer.intermediate_hidden
    local = sym_buffer.num_experts // sym_buffer.group.size()
    for name, weights, (n, k) in (
        ("l1_weights", l1_weights, (2 * intermediate, hidden)),
        ("l2_weights", l2_weights, (hidden, intermediate)),
    ):
        if not (isinstance(weights, (tuple, list)) and len(weights) == 2 and all(isinstance(x, torch.Tensor) for x in weights)):
            raise InvalidInputError(f"{name} is {shown(weights)}; expected (values, scales)")
        for part, tensor, shape, dtype in (
            ("", weights[0], (local, n, k), torch.float8_e4m3fn),
            ("'s scales", weights[1], (local, n // BLOCK, k // BLOCK), torch.float32),
        ):
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise InvalidInputError(f"{name}{part}: {_told(tensor)}; expected {shape} {str(dtype).removeprefix('torch.')}")
            if tensor.device != sym_buffer.buffer.device:
                raise InvalidInputError(f"{name}{part}: on {tensor.device}; expected the buffer's {sym_buffer.buffer.device}")
    if (sms := deep_gemm.get_num_sms()) % 2:
        raise InvalidInputError(f"DeepGEMM is set to {sms} SMs; MegaMoE takes an even number: deep_gemm.set_num_sms({sms - 1})")


def _told(tensor: torch.Tensor) -> str:
    return shown(f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}")
