"""The attention kernels that can store through a strided output: FlashAttention-3 and -4, as their wheels come.

Only paths whose own epilogue writes the output are used: split-KV (another kernel combines) and packed GQA (rows are stored
one by one) stay off, and there is no varlen.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol

from xstage_plugin.checks import shown, unknown_name
from xstage_plugin.errors import InvalidInputError

if TYPE_CHECKING:
    import torch

AUTO = "auto"


class AttentionBackend(Protocol):
    """An attention kernel; give an object of your own as ``backend=`` to use another one.

    Attributes:
        name: for messages; equal on all ranks.
    """

    name: str

    def refusal(self, head_dim: int, dtype: torch.dtype, device: torch.device) -> str:
        """Why it cannot run this here, in one line; empty if it can."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *, softmax_scale: float, causal: bool
    ) -> None:
        """softmax(scale q k^T) v into ``out``; causal masks are aligned to the bottom right.

        Args:
            q: [b, rows, h, d], any strides with a contiguous last dimension.
            k, v: [b, kv_rows, h_kv, d], as q; the batch stride may be 0.
            out: [b, rows, h, d], as q; written in stream order, the host does not wait.
            softmax_scale: factor on the scores.
            causal: row i of q sees keys up to kv_rows - rows + i.
        """


class FlashAttention3:
    """PyPI fa3-fwd: the C++ operator, because its Python wrapper refuses an output that somebody else owns. Hopper only."""

    name = "fa3"

    def refusal(self, head_dim: int, dtype: torch.dtype, device: torch.device) -> str:
        import torch

        wrong = _wrong_generation(self.name, device, (9,))
        if wrong:
            return wrong
        try:
            importlib.import_module("fa3_fwd._C")
            flags = importlib.import_module("fa3_fwd_config").CONFIG["build_flags"]
        except (ImportError, OSError, RuntimeError) as error:
            return f"fa3 cannot be imported ({_first_line(error)}); install fa3-fwd"
        takes = [torch.bfloat16] if flags["FLASHATTENTION_DISABLE_FP16"] else [torch.bfloat16, torch.float16]
        if not flags["FLASHATTENTION_DISABLE_FP8"]:
            takes.append(torch.float8_e4m3fn)
        if dtype not in takes:
            return f"fa3 as installed takes {_names(takes)}, not {dtype}"
        step = 16 // dtype.itemsize
        if head_dim % step or not step <= head_dim <= 256:
            return f"fa3 takes head dimensions up to 256 that are multiples of {step}, not {head_dim}"
        return ""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *, softmax_scale: float, causal: bool
    ) -> None:
        import torch

        torch.ops.fa3_fwd.fwd(q, k, v, out=out, softmax_scale=softmax_scale, is_causal=causal, num_splits=1, pack_gqa=False)


class FlashAttention4:
    """PyPI flash-attn-4: the forward function below its public one, which has no ``out=``. Hopper and Blackwell."""

    name = "fa4"

    def refusal(self, head_dim: int, dtype: torch.dtype, device: torch.device) -> str:
        import torch

        wrong = _wrong_generation(self.name, device, (9, 10, 11))
        if wrong:
            return wrong
        blackwell = torch.cuda.get_device_capability(device)[0] > 9
        takes = [torch.bfloat16, torch.float16] + ([torch.float8_e4m3fn] if blackwell else [])
        if dtype not in takes:
            return f"fa4 takes {_names(takes)} on this GPU, not {dtype}"
        step = 16 // dtype.itemsize
        # Blackwell has one kernel up to 128 and another one for 256 alone.
        ranges = "up to 128, or 256," if blackwell else "up to 256"
        if head_dim % step or not (8 <= head_dim <= (128 if blackwell else 256) or head_dim == 256):
            return f"fa4 takes head dimensions {ranges} that are multiples of {step} on this GPU, not {head_dim}"
        try:
            importlib.import_module("flash_attn.cute.interface")
        except (ImportError, OSError, RuntimeError) as error:
            return f"fa4 cannot be imported ({_first_line(error)}); install flash-attn-4"
        return ""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *, softmax_scale: float, causal: bool
    ) -> None:
        forward = importlib.import_module("flash_attn.cute.interface")._flash_attn_fwd
        # Inputs that ask for a gradient would make it write a log-sum-exp that nobody reads.
        q, k, v = q.detach(), k.detach(), v.detach()
        forward(q, k, v, out=out, softmax_scale=softmax_scale, causal=causal, num_splits=1, pack_gqa=False)


# In the order in which "auto" looks at them: FA4 runs on both generations.
BACKENDS: tuple[AttentionBackend, ...] = (FlashAttention4(), FlashAttention3())


def candidates(backend: str | AttentionBackend) -> tuple[AttentionBackend, ...]:
    """The kernels that ``backend`` allows: the stock ones for ``auto``, else one.

    Raises:
        InvalidInputError: a name that is not known, or an object that is no :class:`AttentionBackend`.
    """
    if not isinstance(backend, str):
        missing = [name for name in ("name", "refusal", "__call__") if not hasattr(backend, name)]
        if missing or isinstance(backend, type):
            lacks = "is a class, not an object of it" if isinstance(backend, type) else f"has no {missing[0]}"
            raise InvalidInputError(f"backend {shown(backend)} {lacks}; expected a name or an AttentionBackend")
        return (backend,)
    if backend == AUTO:
        return BACKENDS
    for known in BACKENDS:
        if known.name == backend:
            return (known,)
    arriving = importlib.import_module("xstage_plugin.attention.arriving_backend")  # it derives from what is defined here
    if backend in arriving.ARRIVING:
        return (arriving.arriving_backend(backend),)
    raise unknown_name("attention backend", backend, (AUTO, *(known.name for known in BACKENDS), *arriving.ARRIVING))


def output_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of the output for inputs of ``dtype``: the same, and bfloat16 for FP8."""
    import torch

    return torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype


def _wrong_generation(name: str, device: torch.device, majors: tuple[int, ...]) -> str:
    import torch

    if device.type != "cuda":
        return f"{name} runs on CUDA devices, not on {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    known = " and ".join(f"sm_{m}x" for m in majors)
    return "" if major in majors else f"{name} is used on {known}; this GPU is sm_{major}{minor}"


def _names(dtypes: list[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
