from types import SimpleNamespace

import pytest

from xstage_plugin.attention import fa3_arrival
from xstage_plugin.attention.fa3_arrival import (
    FlashAttention3Arrival,
    build_refusal,
    require_keys,
    sm_margin,
)
from xstage_plugin.errors import InvalidInputError
from xstage_plugin.upstream.insertions import parse_insertions
from xstage_plugin.upstream.pins import Role, load_source_trees, source_bytes

PIN = load_source_trees()["flash-attention-77aacb6"]
COMMIT = int(PIN.commit[:7], 16)
ALL_BUILT = dict.fromkeys(
    ["FLASHATTENTION_DISABLE_FP16", *(f"FLASHATTENTION_DISABLE_HDIM{size}" for size in (64, 96, 128, 192, 256))], False
)
NO_FP16 = ALL_BUILT | {"FLASHATTENTION_DISABLE_FP16": True}
UP_TO_128 = ALL_BUILT | {"FLASHATTENTION_DISABLE_HDIM192": True, "FLASHATTENTION_DISABLE_HDIM256": True}


@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 256])
@pytest.mark.parametrize("dtype", ["torch.bfloat16", "torch.float16"])
def test_a_build_of_the_pinned_commit_is_taken(head_dim, dtype):
    assert build_refusal(COMMIT, ALL_BUILT, head_dim, dtype) == ""


@pytest.mark.parametrize(
    ("commit", "flags", "head_dim", "dtype", "message"),
    [
        (
            None,
            ALL_BUILT,
            128,
            "torch.bfloat16",
            "flash_attn_3 as installed announces nothing; build flash-attention 77aacb6 with our patch and XSTAGE_ARRIVALS",
        ),
        (
            0x00ABCDE,
            ALL_BUILT,
            128,
            "torch.bfloat16",
            "flash_attn_3 as installed is a patched flash-attention 00abcde; known: flash-attention 77aacb6",
        ),
        (COMMIT, NO_FP16, 128, "torch.float16", "fa3-arrival as built takes bfloat16, not torch.float16"),
        (COMMIT, ALL_BUILT, 128, "torch.float8_e4m3fn", "takes bfloat16 and float16, not torch.float8_e4m3fn"),
        (COMMIT, UP_TO_128, 136, "torch.bfloat16", "takes head dimensions up to 128 that are multiples of 8, not 136"),
        (COMMIT, ALL_BUILT, 4, "torch.bfloat16", "takes head dimensions up to 256 that are multiples of 8, not 4"),
        (COMMIT, ALL_BUILT, 60, "torch.bfloat16", "takes head dimensions up to 256 that are multiples of 8, not 60"),
        (COMMIT, ALL_BUILT, 0, "torch.bfloat16", "takes head dimensions up to 256 that are multiples of 8, not 0"),
    ],
)
def test_a_build_that_cannot_is_refused_in_one_line(commit, flags, head_dim, dtype, message):
    refusal = build_refusal(commit, flags, head_dim, dtype)
    assert message in refusal
    assert "\n" not in refusal


@pytest.mark.parametrize("sms", [1, 0, -4])
def test_a_kernel_on_fewer_sms_than_a_pair_of_ctas_is_refused(sms):
    with pytest.raises(InvalidInputError, match=f"sms is {sms}; expected"):
        FlashAttention3Arrival(sms=sms)


@pytest.mark.parametrize(("sms", "free"), [(132, 0), (133, 0), (400, 0), (131, 2), (130, 2), (101, 32), (100, 32), (2, 130)])
def test_sms_left_free_come_in_pairs(sms, free):
    assert sm_margin(132, sms) == free


def test_rows_without_a_key_are_refused():
    require_keys(100, 100, causal=True)
    require_keys(101, 100, causal=False)
    with pytest.raises(InvalidInputError, match="101 rows of q on 100 keys under a causal mask; expected at most"):
        require_keys(101, 100, causal=True)


class Shaped:
    """What announce() looks at in a tensor."""

    device, dtype = "cuda", "torch.int32"

    def __init__(self, *shape):
        self.shape = shape

    def stride(self, dim):
        return 1


@pytest.mark.parametrize("awaited", [{}, {"awaits": Shaped(3, 1000), "expected": 8}])
def test_the_counters_to_wait_for_reach_the_operator(monkeypatch, awaited):
    given = []
    operators = SimpleNamespace(xstage_announce=lambda *arguments: given.extend(arguments))
    monkeypatch.setattr(fa3_arrival, "_operators", lambda: operators)
    q, arrivals = Shaped(1, 5, 2, 128), Shaped(1, 2, 5)
    FlashAttention3Arrival().announce(q, q, q, q, arrivals, softmax_scale=0.5, causal=True, **awaited)
    assert given == [q, q, q, q, arrivals, None, awaited.get("awaits"), awaited.get("expected", 0), 0.5, True, 0]


def test_counters_are_looked_at_before_the_operator_is_called():
    q, arrivals = Shaped(1, 5, 2, 128), Shaped(1, 2, 5)
    with pytest.raises(InvalidInputError, match="expected is 0"):
        FlashAttention3Arrival().announce(q, q, q, q, arrivals, softmax_scale=1.0, causal=False, awaits=Shaped(1, 5))


@pytest.mark.parametrize("patch", PIN.patches, ids=lambda patch: patch.path)
def test_every_insertion_is_one_block_that_the_macro_guards(patch):
    for insertion in parse_insertions(source_bytes(patch.source).decode(), patch.source):
        first, *inner, last = insertion.lines
        assert (first, last) == ("#ifdef XSTAGE_ARRIVALS", "#endif")
        assert inner
        assert not any(line.lstrip().startswith(("#if", "#el", "#endif")) for line in inner)


def test_every_file_that_the_patches_touch_is_pinned():
    assert {pinned.path for pinned in PIN.files if pinned.role is Role.PATCHED} == {patch.path for patch in PIN.patches}
    assert PIN.commit.startswith(PIN.name.rpartition("-")[2])


def test_our_headers_find_each_other_where_the_pin_places_them():
    placed = {added.path.removeprefix("hopper/") for added in PIN.additions}
    texts = [source_bytes(source).decode() for source in (added.source for added in (*PIN.additions, *PIN.patches))]
    included = {line.split('"')[1] for text in texts for line in text.splitlines() if '#include "' in line}
    assert included == placed


def test_the_build_names_the_commit_of_its_pin():
    header = source_bytes("patches/flash-attention-77aacb6/announce_op.h").decode()
    assert f"kPinnedCommit = 0x{PIN.commit[:7]};" in header
