"""What shapes the MegaMoE kernels of DeepGEMM take (sgl-deep-gemm 0.1.3). Pure."""

from __future__ import annotations

LARGEST_SM90_INTERMEDIATE = 64 * 64
LARGEST_TOPK = 32


def kernel_refusal(hidden: int, intermediate: int, experts: int, topk: int, ranks: int, arch: str = "sm_90") -> str | None:
    """Why the kernel for ``arch`` does not take the shape, all reasons in one line; None where it does."""
    if ranks < 1:
        return f"{ranks} ranks; expected 1 or more"
    if experts < 1:
        return f"{experts} experts; expected 1 or more"
    rules = [
        (experts % ranks == 0, f"{experts} experts are no multiple of the {ranks} ranks"),
        # Two tiles a row at least: the scheduler asserts an even number of them in both layers.
        (hidden > 0 and hidden % 256 == 0, f"hidden {hidden} is no multiple of 256"),
        (intermediate > 0 and intermediate % 128 == 0, f"intermediate {intermediate} is no multiple of 128"),
        (0 < topk <= min(LARGEST_TOPK, experts), f"topk {topk} is not from 1 to {min(LARGEST_TOPK, experts)}"),
    ]
    if arch == "sm_90":
        rules.append(
            (intermediate <= LARGEST_SM90_INTERMEDIATE, f"intermediate {intermediate} is above {LARGEST_SM90_INTERMEDIATE}")
        )
    return "; ".join(reason for sound, reason in rules if not sound) or None
