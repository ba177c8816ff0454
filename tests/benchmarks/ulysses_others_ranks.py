"""One rank of the check of what other libraries' arms refuse, started by torchrun from test_ulysses_others.py.

Argument: for each rank what flashinfer is there, as JSON: null (not installed), "" (works) or what its constructor says.
"""

import json
import sys
import types

import torch
import torch.distributed as dist
from rank_exit import leave
from ulysses_others import Flashinfer

made = []


class Communicator:
    """Takes what UlyssesCommunicator of flashinfer-python 0.7.4 takes; meets the other ranks, as that does."""

    fault = ""

    def __init__(self, group=None, *, max_bytes, dtype, backend="auto", nvlink_kernel="auto", device=None):
        dist.barrier()
        if self.fault:
            raise RuntimeError(self.fault)
        made.append(self)

    def gather_heads(self, x, *, out):
        sent = x.unflatten(1, (dist.get_world_size(), -1)).transpose(0, 1).contiguous()
        parts = torch.empty_like(sent)
        dist.all_to_all_single(parts, sent)
        out.copy_(torch.cat(list(parts), 2))

    def close(self):
        made.remove(self)


def main():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    installed = json.loads(sys.argv[1])[rank]
    library = types.ModuleType("flashinfer.comm")
    library.UlyssesCommunicator, Communicator.fault = Communicator, installed or ""
    sys.modules["flashinfer"] = types.ModuleType("flashinfer")
    sys.modules["flashinfer.comm"] = None if installed is None else library
    answer = {"refusal": Flashinfer.refusal(), "left_open": len(made)}
    if not answer["refusal"]:
        heads, rows = torch.arange(2 * ranks).view(1, 1, -1, 1), torch.arange(3 * ranks).view(1, -1, 1, 1)
        model = (100 * rows + heads).expand(1, 3 * ranks, 2 * ranks, 4).float()
        out = torch.empty(1, 3, 2 * ranks, 4)
        arm = Flashinfer(dist.group.WORLD, model[:, :, 2 * rank : 2 * rank + 2].contiguous(), out)
        arm()
        answer["right"] = torch.equal(out, model[:, 3 * rank : 3 * rank + 3])
        arm.close()
        answer["left_open"] = len(made)
    answers = [None] * ranks
    dist.all_gather_object(answers, answer)
    if rank == 0:
        print(json.dumps(answers))
    leave()


if __name__ == "__main__":
    main()
