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

import xstage_plugin

# hidden, intermediate, experts, topk, most tokens, tokens of rank 0, tokens of the others, routing. Each line of new numbers
# up to the tokens is a kernel to compile.
CASES = {
    "small": (2048, 512, 64, 8, 2048, 512, 512, "random"),
    "nothing routed": (2048, 512, 64, 8, 2048, 64, 64, "none"),
    "one token": (2048, 512, 64, 8, 2048, 1, 1, "random"),
    "an expert twice in a token": (2048, 512, 64, 8, 2048, 256, 300, "twice"),
    "skewed": (2048, 512, 64, 8, 2048, 2000, 1500, "skewed"),
    "one rank without tokens": (2048, 768, 32, 4, 300, 300, 0, "random"),
    "padding": (4096, 1024, 32, 8, 200, 200, 128, "padded"),
    "one expert": (1024, 512, 8, 2, 256, 256, 256, "one"),
    "many rows": (2048, 512, 16, 8, 4096, 4096, 4096, "random"),
    "hidden 7168": (7168, 512, 16, 4, 640, 600, 640, "random"),
}
LEADS = (1, 2, 7, 33, 5000)
ROUNDS = 4  # on one buffer with new inputs each: what an earlier launch left there must not be taken for this one's
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
    if kind == "twice":
        ids[:, 1] = ids[:, 0]
    if kind == "skewed":
        shares = torch.arange(1, experts + 1, device="cuda").float().pow(-1.5)
        ids = torch.multinomial(shares.expand(tokens, -1), topk, generator=generator) if tokens else ids
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


def local_weights(deep_gemm, experts, intermediate, hidden):
    """Both layers of this rank's experts, as the kernel takes them."""
    share = experts // dist.get_world_size()
    local = range(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    layers = [
        tuple(torch.stack(part) for part in zip(*(weights_of(expert, *shape) for expert in local), strict=True))
        for shape in ((2 * intermediate, hidden, 1), (hidden, intermediate, 2))
    ]
    return deep_gemm.transform_weights_for_mega_moe_sm90(*layers)


def run_case(deep_gemm, case, family):
    hidden, intermediate, experts, topk, most, first, others, kind = case
    rank = dist.get_rank()
    tokens = first if rank == 0 else others
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(dist.group.WORLD, experts, most, topk, hidden, intermediate)
    l1, l2 = local_weights(deep_gemm, experts, intermediate, hidden)

    def fill(round_number):
        generator = torch.Generator("cuda").manual_seed(100 * round_number + 7 + rank)
        x, x_sf = quantised(torch.randn(max(tokens, 1), hidden, device="cuda", generator=generator), (1, 128))
        ids = routing_of(kind, tokens, experts, topk, generator)
        weights = torch.rand(tokens, topk, device="cuda", generator=generator)
        for place, value in ((buffer.x, x), (buffer.x_sf, x_sf), (buffer.topk_idx, ids), (buffer.topk_weights, weights)):
            place[:tokens].copy_(value[:tokens])
        return x, x_sf, ids, weights

    x, x_sf, ids, weights = fill(0)
    y = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="cuda")

    def launch(delayed):
        y.fill_(float("nan"))  # a row that nobody wrote is seen
        torch.cuda.synchronize()
        dist.barrier()
        if rank == delayed:
            torch.cuda._sleep(20_000_000)  # some 10 ms: the others meet a peer that is not there yet
        deep_gemm.fp8_mega_moe(y, l1, l2, buffer)
        torch.cuda.synchronize()
        return digest(y)

    digests = {"wave": launch(None), "wave, rank 1 late": launch(1)}
    if tokens:
        expected = reference(dequantised(x, x_sf, (1, 128))[:tokens], ids, weights, intermediate, hidden)
        got = y.float()
        assert torch.isfinite(got).all(), "a value is not finite: a row was not written"
        energy = (expected**2).sum() + (got**2).sum()
        digests["difference"] = float(1 - 2 * (expected * got).sum() / energy) if energy > 0 else 0.0
        assert digests["difference"] < LARGEST_DIFFERENCE, digests
    if family == "xstage":
        digests |= our_digests(deep_gemm, y, l1, l2, buffer, launch)
    digests["rounds"] = []
    for number in range(1, ROUNDS):
        if family == "xstage":
            xstage_plugin.moe.set_schedule(buffer, "interleaved", number, pulls="shared")
        fill(number)
        digests["rounds"].append(launch(number % 2))
    buffer.destroy()
    return digests


def our_digests(deep_gemm, y, l1, l2, buffer, launch):
    """Of every schedule and lead, both ways of pulling, out of a graph and through our own calls."""
    from xstage_plugin.moe import current_schedule, mega_moe, prepare_mega_moe, set_schedule

    digests = {}
    for pulls in ("stock", "shared"):
        set_schedule(buffer, "wave", pulls=pulls)
        digests[f"wave, {pulls}"] = launch(None)
        for lead in LEADS:
            chosen = set_schedule(buffer, "interleaved", lead, pulls=pulls)
            seen = current_schedule(buffer)
            assert (chosen.lead_rows, seen.lead_rows, seen.pulls) == (lead, lead, pulls)
            digests[f"lead {lead}, {pulls}"] = launch(None)
            digests[f"lead {lead}, {pulls}, rank 0 late"] = launch(0)
        digests[f"graph, {pulls}"] = replayed(y, lambda: deep_gemm.fp8_mega_moe(y, l1, l2, buffer))

    def called():
        mega_moe(y, l1, l2, buffer, schedule="interleaved", lead=9, pulls="shared")

    digests["our call"] = poisoned(y, called)
    digests["our call, graph"] = replayed(y, called)
    tokens = len(y)
    inputs = (buffer.x[:tokens], buffer.x_sf[:tokens], buffer.topk_idx[:tokens], buffer.topk_weights[:tokens])
    call = prepare_mega_moe(l1, l2, buffer, schedule="interleaved", lead=5, pulls="shared")
    torch.compiler.reset()  # the same lambda again for every case would be one too many at some point
    whole = torch.compile(lambda *inputs: call(*inputs, l1, l2) * 1, backend="aot_eager", fullgraph=True, dynamic=False)
    digests["operator"] = poisoned(y, lambda: y.copy_(whole(*inputs)))
    digests["operator, copied inputs"] = poisoned(y, lambda: y.copy_(call(*(part.clone() for part in inputs), l1, l2)))
    return digests


def digest(y):
    return hashlib.sha256(y.view(torch.int16).cpu().numpy().tobytes()).hexdigest()


def poisoned(y, call):
    """Digest of what ``call`` writes into ``y``."""
    y.fill_(float("nan"))
    torch.cuda.synchronize()
    dist.barrier()
    call()
    torch.cuda.synchronize()
    return digest(y)


def replayed(y, call):
    """Digest of what ``call`` writes when it comes out of a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return poisoned(y, graph.replay)


def check_faults(deep_gemm):
    """What must be an error on every rank, before any launch."""
    from xstage_plugin.errors import XStageError
    from xstage_plugin.moe import current_schedule, mega_moe, set_schedule

    def told(step):
        try:
            step()
        except XStageError as error:
            return str(error)
        return "no error"

    buffer = deep_gemm.get_symm_buffer_for_mega_moe(dist.group.WORLD, 8, 64, 2, 1024, 512)
    rank = dist.get_rank()
    messages = {
        name: told(lambda arguments=arguments: set_schedule(buffer, *arguments))
        for name, arguments in {
            "different leads": ("interleaved", 5 + rank),
            "different schedules": ("wave",) if rank == 0 else ("interleaved", 9),
            "one rank asks for nonsense": ("interleaved", 0) if rank == 1 else ("interleaved", 9),
            "a lead of 0": ("interleaved", 0),
        }.items()
    }
    messages["lead afterwards"] = str(current_schedule(buffer).lead_rows)
    messages["platform of another GPU"] = told(lambda: set_schedule(buffer, "auto", platform="paper-148sm"))
    messages["auto"] = set_schedule(buffer, "auto", platform="h200-nvlink-pair").schedule
    # Weights of the wrong shape on one rank: the other would wait in the kernel for a peer that never comes.
    l1, l2 = local_weights(deep_gemm, 8, 512, 1024)
    y = torch.empty(64, 1024, dtype=torch.bfloat16, device="cuda")
    messages["one rank cannot run"] = told(lambda: mega_moe(y, l1 if rank == 0 else l2, l2, buffer))
    messages["hidden"] = told(lambda: deep_gemm.get_symm_buffer_for_mega_moe(dist.group.WORLD, 8, 64, 2, 1088, 512))
    deep_gemm.set_num_sms(131)
    messages["odd SMs"] = told(lambda: mega_moe(y, l1, l2, buffer))
    deep_gemm.set_num_sms(132)
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
