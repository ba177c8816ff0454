"""One Ulysses attention layer as the output exchange sees it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

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
        head_by_head: a head's tiles go to all ranks before the next head's; else one rank is served after the other.
    """

    seq_len: int
    heads_per_rank: int
    head_dim: int
    ranks: int
    batch: int = 1
    block_m: int = 128
    block_n: int = 128
    output_bytes: int = 2
    head_by_head: bool = True

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if name != "head_by_head":
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

    def remote_tiles_of_waves(self, num_sms: int) -> list[int]:
        """How many of the output tiles that ``num_sms`` CTAs finish together are for other ranks, wave after wave.

        Tiles come in the order in which a kernel takes them, each rank serving itself last; a sequence of the batch is a
        launch of its own.
        """
        rows_of_a_rank = math.ceil(self.seq_len / self.ranks)
        blocks = math.ceil(rows_of_a_rank / self.block_m)
        order = np.tile if self.head_by_head else np.repeat
        remote = order(np.repeat(np.arange(self.ranks) < self.ranks - 1, blocks), self.heads_per_rank)
        waves = np.add.reduceat(remote.astype(np.int64), np.arange(0, remote.size, num_sms))
        return [int(count) for count in np.tile(waves, self.batch)]
