from dataclasses import replace

import pytest

from xstage_plugin.attention.span_errors import SpanRefusedError
from xstage_plugin.attention.span_facts import SpanFacts, require_mappable

GPUS = ("GPU-a", "GPU-b", "GPU-c")


def three_ranks(**changes):
    """Facts of three ranks that fit; ``changes`` are those of rank 2."""
    facts = [SpanFacts((4, 8), "torch.bfloat16", "cuda", "host", gpu, frozenset()) for gpu in GPUS]
    return [*facts[:2], replace(facts[2], **changes)]


def test_ranks_of_one_host_with_a_gpu_each_can_map_each_other():
    require_mappable(three_ranks())
    require_mappable(three_ranks()[:1])


def test_gpus_that_a_rank_cannot_see_are_left_to_the_driver():
    # One visible GPU a process is a common way to start ranks: nothing is known against the pair.
    require_mappable(three_ranks(unreachable=frozenset({"GPU-x"})))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device_type": "cpu"}, "rank 2 asks for a span on 'cpu'; expected a CUDA device"),
        ({"shape": (4, 9)}, r"shape_per_rank is \(4, 8\) on rank 0 and \(4, 9\) on rank 2; expected the same"),
        ({"dtype": "torch.float16"}, "dtype is torch.bfloat16 on rank 0 and torch.float16 on rank 2"),
        ({"host": "elsewhere"}, "ranks 0 and 2 are on different hosts"),
        ({"gpu": "GPU-b"}, "ranks 1 and 2 share GPU GPU-b; expected one GPU a rank"),
        ({"unreachable": frozenset({"GPU-b"})}, r"rank 2 \(GPU-c\) has no peer access to that of rank 1 \(GPU-b\)"),
    ],
)
def test_what_one_rank_cannot_do_is_refused_in_one_line_that_names_it(changes, message):
    with pytest.raises(SpanRefusedError, match=message) as error:
        require_mappable(three_ranks(**changes))
    assert "\n" not in str(error.value)


def test_a_buffer_without_elements_is_refused():
    with pytest.raises(SpanRefusedError, match=r"shape_per_rank is \(4, 0\); expected at least one element"):
        require_mappable([replace(fact, shape=(4, 0)) for fact in three_ranks()])
