"""One Ulysses attention layer as the output exchange sees it."""

from __future__ import annotations

from dataclasses import dataclass

from xstage_plugin.checks import positive_int


@dataclass(frozen=True)
class AttentionWorkload:
    """Full (non-causal) attention of one rank's heads over the whole sequence.

    Attributes:
        seq_len: M, tokens of the whole sequence.
        heads_per_rank: query heads that this rank computes.
        head_dim: d.
        ranks: ranks that share the sequence.
        batch: sequences.
        block_m, block_n: output tile rows and KV tile columns of the kernel.
        output_bytes: bytes of an output element (2 for bf16).
    """

    seq_len: int
    heads_per_rank: int
    head_dim: int
    ranks: int
    batch: int = 1
    block_m: int = 128
    block_n: int = 128
    output_bytes: int = 2

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            positive_int(name, getattr(self, name))

    @property
    def tile_bytes(self) -> int:
        """B_t = b_m d s_out, one output tile (all of a sequence that is shorter)."""
        return min(self.block_m, self.seq_len) * self.head_dim * self.output_bytes

    @property
    def kv_tiles(self) -> int:
        """Steps of a Q-loop, ceil(M / b_n)."""
        return -(-self.seq_len // self.block_n)

    @property
    def output_tiles(self) -> int:
        """Output tiles of this rank."""
        return -(-self.seq_len // self.block_m) * self.heads_per_rank * self.batch

    @property
    def remote_bytes(self) -> float:
        """Output bytes that belong to other ranks."""
        total = self.seq_len * self.heads_per_rank * self.head_dim * self.output_bytes * self.batch
        return total * (self.ranks - 1) / self.ranks
