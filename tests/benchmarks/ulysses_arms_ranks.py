"""One rank of the check of ab_ulysses.py's arms without a GPU, started by torchrun from test_ulysses_arms.py."""

import json

import torch
import torch.distributed as dist
from attention.ulysses_doubles import FakeSpan, PlainAttention, expected_attention
from rank_exit import leave
from ulysses_arms import Inputs, UlyssesArms

from xstage_plugin.attention.layout import UlyssesLayout

ROWS, HEADS, HEAD_DIM = 24, 3, 16


def main():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layout = UlyssesLayout.even(ROWS * ranks, HEADS * ranks, HEAD_DIM, ranks)
    generator = torch.Generator().manual_seed(0)
    model = [torch.randn(1, layout.seq_len, layout.total_heads, HEAD_DIM, generator=generator) for _ in range(3)]
    mine = slice(HEADS * rank, HEADS * (rank + 1))
    inputs = Inputs(*(x[:, :, mine].contiguous() for x in model), dist.group.WORLD)
    arms = UlyssesArms(layout, rank, PlainAttention(), inputs, FakeSpan(layout.span_shape, torch.float32))
    expected = expected_attention(*model, HEAD_DIM**-0.5, False)[:, ROWS * rank : ROWS * (rank + 1)].float()
    found = {}
    for name, steps in arms.steps.items():
        for tensor in arms.poisonable:
            tensor.fill_(float("nan"))
        dist.barrier()
        steps.call()
        dist.barrier()
        found[name] = steps.result().clone()
    one = found["serial nccl"]
    answer = {
        "right": torch.allclose(one, expected, rtol=1e-6, atol=1e-6),
        "equal": {name: torch.equal(rows, one) for name, rows in found.items()},
    }
    answers = [None] * ranks
    dist.all_gather_object(answers, answer)
    if rank == 0:
        print(json.dumps(answers))
    leave()


if __name__ == "__main__":
    main()
