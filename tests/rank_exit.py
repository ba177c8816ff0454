"""How a rank of a gloo check ends. torch's gloo may abort a process that tears it down while a peer is still at it."""

import contextlib
import os
import sys

import torch.distributed as dist


def leave():
    """End this process, with everything written, once all ranks are here; one that is gone already has written too."""
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
