"""One rank of the MegaMoE check, started by torchrun from test_mega_moe_gpu.py: results as digests, one family a process.

The stock kernel and ours cannot run in one process (the run-time compiler reads its headers once), so the two families
write their digests to files and the test compares them.
"""

import argparse
import hashlib
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

# hidden, intermediate, experts, topk, tokens of rank 0, tokens of the others, routing
CASES = {
    "small": (2048, 512, 64, 8, 512, 512, "random"),
    "one rank without tokens": (2048, 768, 32, 4, 300, 0, "random"),
    "padding": (4096, 1024, 32, 8, 200, 128, "padded"),
    "nothing routed": (2048, 512, 64, 8, 64, 64, "none"),
    "one expert": (1024, 512, 8, 2, 256, 256, "one"),
    "one token": (2048, 512, 64, 8, 1, 1, "random"),
    "many rows": (2048, 512, 16, 8, 4096, 4096, "random"),
}
LEADS = (1, 2, 7, 33, 5000)
# 1 - cosine-like agreement against float32; the intermediate is FP8 with one scale per 64 columns, 3% of noise a value.
LARGEST_DIFFERENCE = 2e-3


def quantised(x, block):
    """(fp8 values, float scales) with one scale per ``block`` (rows, columns)."""
    rows, columns = x.shape
    blocks = x.reshape(rows // block[0], block[0], columns // block[1], block[1])
    scale = blocks.abs().amax((1, 3)).clamp(1e-6) / 448
    return (blocks / scale[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn), scale


def dequantised(values, scale, block):
    return values.float() * scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)


def weights_of(expert, rows, columns, layer):
    generator = torch.Generator("cuda").manual_seed(1000 * layer + expert)
    return quantised(torch.randn(rows, columns, device="cuda", generator=generator) / columns**0.5, (128, 128))


def routing_of(kind, tokens, experts, topk, generator):
    ids = torch.rand(tokens, experts, device="cuda", generator=generator).topk(topk, -1).indices
    if kind == "padded":
        ids[torch.rand(tokens, topk, device="cuda", generator=generator) < 0.3] = -1
    if kind == "none":
        ids[:] = -1
    if kind == "one":
        ids[:] = -1
        ids[:, 0] = 3
    return ids


def reference(x, ids, weights, intermediate, hidden):
    """Float32 result of the dequantised inputs, (tokens, hidden)."""
    out = torch.zeros(len(x), hidden, device="cuda")
    for expert in ids[ids >= 0].unique().tolist():
        l1 = dequantised(*weights_of(expert, 2 * intermediate, hidden, 1), (128, 128))
        l2 = dequantised(*weights_of(expert, hidden, intermediate, 2), (128, 128))
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ l1.T).chunk(2, -1)
        out.index_add_(0, token, (torch.nn.functional.silu(gate) * up) @ l2.T * weights[token, slot, None])
    return out


def run_case(deep_gemm, case, family):
    hidden, intermediate, experts, topk, first, others, kind = case
    rank, world = dist.get_rank(), dist.get_world_size()
    tokens, most = (first if rank == 0 else others), max(first, others)
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(dist.group.WORLD, experts, most, topk, hidden, intermediate)
    generator = torch.Generator("cuda").manual_seed(7 + rank)
    x, x_sf = quantised(torch.randn(max(tokens, 1), hidden, device="cuda", generator=generator), (1, 128))
    ids = routing_of(kind, tokens, experts, topk, generator)
    weights = torch.rand(tokens, topk, device="cuda", generator=generator)
    local = range(rank * experts // world, (rank + 1) * experts // world)
    stack = [
        [torch.stack(part) for part in zip(*(weights_of(e, *shape) for e in local), strict=True)]
        for shape in (
            (2 * intermediate, hidden, 1),
            (hidden, intermediate, 2),
        )
    ]
    l1, l2 = deep_gemm.transform_weights_for_mega_moe_sm90(tuple(stack[0]), tuple(stack[1]))
    buffer.x[:tokens].copy_(x[:tokens])
    buffer.x_sf[:tokens].copy_(x_sf[:tokens])
    buffer.topk_idx[:tokens].copy_(ids)
    buffer.topk_weights[:tokens].copy_(weights)
    y = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="cuda")

    def launch(delayed):
        y.fill_(float("nan"))  # a row that nobody wrote is seen
        torch.cuda.synchronize()
        dist.barrier()
        if rank == delayed:
            torch.cuda._sleep(20_000_000)  # some 10 ms: the others meet a peer that is not there yet
        deep_gemm.fp8_mega_moe(y, l1, l2, buffer)
        torch.cuda.synchronize()
        return hashlib.sha256(y.view(torch.int16).cpu().numpy().tobytes()).hexdigest()

    digests = {"wave": launch(None), "wave, rank 1 late": launch(1)}
    if tokens:
        expected = reference(dequantised(x, x_sf, (1, 128))[:tokens], ids, weights, intermediate, hidden)
        got = y.float()
        assert torch.isfinite(got).all(), "a value is not finite: a row was not written"
        energy = (expected**2).sum() + (got**2).sum()
        digests["difference"] = float(1 - 2 * (expected * got).sum() / energy) if energy > 0 else 0.0
        assert digests["difference"] < LARGEST_DIFFERENCE, digests
    if family == "xstage":
        from xstage_plugin.moe.mega_moe import current_lead, set_schedule

        for lead in LEADS:
            assert set_schedule(buffer, "interleaved", lead).lead_rows == lead
            assert current_lead(buffer) == lead
            digests[f"lead {lead}"] = launch(None)
            digests[f"lead {lead}, rank 0 late"] = launch(0)
        set_schedule(buffer, "wave")
        digests["wave again"] = launch(None)
        digests["graph"] = replayed(deep_gemm, y, l1, l2, buffer)
    buffer.destroy()
    return digests


def replayed(deep_gemm, y, l1, l2, buffer):
    """The same call out of a CUDA graph, under an interleaved schedule set before the capture."""
    from xstage_plugin.moe.mega_moe import set_schedule

    set_schedule(buffer, "interleaved", 7)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        deep_gemm.fp8_mega_moe(y, l1, l2, buffer)
    y.fill_(float("nan"))
    torch.cuda.synchronize()
    dist.barrier()
    graph.replay()
    torch.cuda.synchronize()
    return hashlib.sha256(y.view(torch.int16).cpu().numpy().tobytes()).hexdigest()


def check_faults(deep_gemm):
    """What must be an error on every rank, before any launch."""
    from xstage_plugin.moe.mega_moe import ScheduleMismatchError, current_lead, set_schedule

    buffer = deep_gemm.get_symm_buffer_for_mega_moe(dist.group.WORLD, 8, 64, 2, 1024, 512)
    rank = dist.get_rank()
    messages = {}
    for name, arguments in {
        "different leads": ("interleaved", 5 + rank),
        "different schedules": ("wave",) if rank == 0 else ("interleaved", 9),
        "one rank asks for nonsense": ("interleaved", 0) if rank == 1 else ("interleaved", 9),
        "a lead of 0": ("interleaved", 0),
    }.items():
        try:
            set_schedule(buffer, *arguments)
            messages[name] = "no error"
        except ScheduleMismatchError as error:
            messages[name] = str(error)
    messages["lead afterwards"] = str(current_lead(buffer))
    try:
        set_schedule(buffer, "auto", platform="paper-148sm")
        messages["platform of another GPU"] = "no error"
    except ScheduleMismatchError as error:
        messages["platform of another GPU"] = str(error)
    messages["auto"] = set_schedule(buffer, "auto", platform="h200-nvlink-pair").schedule
    buffer.destroy()
    return messages


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--family", choices=("stock", "xstage"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=CASES, help="one case, for a run under compute-sanitizer")
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    results = {}
    if arguments.family == "xstage":
        import xstage_plugin

        xstage_plugin.register()
    import deep_gemm

    for name, case in CASES.items():
        if arguments.only not in (None, name):
            continue
        results[name] = run_case(deep_gemm, case, arguments.family)
    if arguments.family == "xstage":
        from xstage_plugin.upstream.activate import prove

        proof = prove()
        results["proof"] = [proof.in_effect, proof.compiled, proof.detail]
        results["faults"] = check_faults(deep_gemm)
    arguments.out.with_suffix(f".{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
