"""One rank of the check of ab_projection.py's arms without a GPU, started by torchrun from test_projection_arms.py."""

import json

import torch
import torch.distributed as dist
from attention.ulysses_doubles import AnnouncingAttention, FakeSpan, HostTake, PlainAttention, expected_attention
from projection_arms import ProjectionArms
from rank_exit import leave
from ulysses_arms import Inputs

from xstage_plugin.attention.arrivals import ArrivalCounters, counter_shape
from xstage_plugin.attention.layout import UlyssesLayout
from xstage_plugin.attention.projection import projected

ROWS, HEADS, HEAD_DIM, BLOCK_ROWS, CALLS = 40, 3, 16, 16, 2


def main():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layout = UlyssesLayout.even(ROWS * ranks, HEADS * ranks, HEAD_DIM, ranks)
    generator = torch.Generator().manual_seed(0)
    model = [torch.randn(1, layout.seq_len, layout.total_heads, HEAD_DIM, generator=generator) for _ in range(3)]
    width = layout.total_heads * HEAD_DIM
    weight = torch.randn(width, width, generator=generator)
    mine = slice(HEADS * rank, HEADS * (rank + 1))
    inputs = Inputs(*(x[:, :, mine].contiguous() for x in model), dist.group.WORLD)
    span = FakeSpan(layout.span_shape, torch.float32)
    counters = ArrivalCounters(FakeSpan(counter_shape(layout), torch.int32), HostTake())
    arms = ProjectionArms(
        layout, rank, PlainAttention(), AnnouncingAttention(BLOCK_ROWS, awaits_rows=True), inputs, span, weight, counters
    )
    expected = expected_attention(*model, HEAD_DIM**-0.5, False)[:, ROWS * rank : ROWS * (rank + 1)].float()
    answer = {}
    for name, steps in arms.steps.items():
        arms.begin_check()
        dist.barrier()
        for _ in range(CALLS):
            steps.call()
        dist.barrier()
        found = answer[name] = {"counted": steps.counted is None or steps.counted(CALLS)}
        if steps.rows is not None:
            found["rows"] = torch.allclose(steps.rows(), expected, rtol=1e-6, atol=1e-6)
        if steps.projection is not None:
            reference = projected(steps.projected_rows(), weight)
            found["projected"] = torch.allclose(steps.projection.result, reference, rtol=1e-4, atol=1e-4)
        dist.barrier()
        found["clear"] = not bool(counters.span.local().any())
    answers = [None] * ranks
    dist.all_gather_object(answers, answer)
    if rank == 0:
        print(json.dumps(answers))
    leave()


if __name__ == "__main__":
    main()
