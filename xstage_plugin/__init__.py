"""X-Stage: how far a GPU kernel runs ahead of its own remote stores, and how to schedule by it.

Importing this package does nothing but define names: no directory, no build, no CUDA context.
"""

__version__ = "0.1.0"


def register(allow_unrun: bool = False) -> None:
    """Switch DeepGEMM's MegaMoE to our schedules in this process, before its first kernel is compiled.

    The installed library is not changed. Until a schedule is asked for (by :func:`xstage_plugin.moe.set_schedule`, or by
    XSTAGE_MOE_SCHEDULE, XSTAGE_MOE_LEAD and XSTAGE_MOE_PULLS for programs that call deep_gemm themselves) it runs the
    original one. A second call does nothing.

    Args:
        allow_unrun: also a version whose kernels compile and were never run by us; XSTAGE_ALLOW_UNRUN=1 says the same.

    Raises:
        UpstreamError: DeepGEMM is not installed, not a version that we know, changed, or has compiled a kernel already.
    """
    from xstage_plugin.moe.registration import register_moe

    register_moe(allow_unrun)
