"""One MoE layer under expert parallelism, and what its busiest rank has to do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xstage_plugin.checks import positive_int
from xstage_plugin.errors import InvalidInputError
from xstage_plugin.moe.routing import MOST_EXPERTS, Routing
from xstage_plugin.moe.tiles import TileConfig, ceil_div


@dataclass(frozen=True)
class MoeWorkload:
    """A batch through one MoE layer.

    Attributes:
        hidden, intermediate: of one routed expert.
        experts: routed experts over all ranks.
        topk: experts per token.
        ranks: expert-parallel ranks (GPUs).
        tokens_per_rank: tokens that each rank brings.
        routing: share of each expert.
        model: bundled name of the shape, if it is one.
    """

    hidden: int
    intermediate: int
    experts: int
    topk: int
    ranks: int
    tokens_per_rank: int
    routing: Routing
    model: str | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "topk", "ranks"):
            positive_int(name, getattr(self, name))
        positive_int("experts", self.experts, MOST_EXPERTS)
        if self.tokens_per_rank:
            positive_int("tokens_per_rank", self.tokens_per_rank)
        if self.topk > self.experts:
            raise InvalidInputError(f"topk is {self.topk}; expected at most the number of experts, {self.experts}")
        if self.experts % self.ranks:
            raise InvalidInputError(f"experts is {self.experts}; expected a multiple of the {self.ranks} ranks")
        if len(self.routing.shares) != self.experts:
            raise InvalidInputError(f"routing is of {len(self.routing.shares)} experts; expected {self.experts}")

    @property
    def experts_per_rank(self) -> int:
        return self.experts // self.ranks

    @property
    def remote_fraction(self) -> float:
        """Share of an expert's output rows that belong to other ranks, with tokens spread evenly over the ranks."""
        return (self.ranks - 1) / self.ranks

    def tokens_by_expert(self) -> np.ndarray:
        """Routed tokens of each expert, shape (experts,), over all ranks."""
        pairs = self.tokens_per_rank * self.ranks * self.topk * self.routing.used
        return np.array(self.routing.shares) * pairs


@dataclass(frozen=True)
class RankLoad:
    """Work of the busiest rank, which ends last.

    Attributes:
        rows: m-blocks over its local experts.
        active_experts: local experts with at least one token.
        row_fill: share of the rows' token slots that hold a token.
    """

    rows: int
    active_experts: int
    row_fill: float


def busiest_rank(workload: MoeWorkload, tile: TileConfig) -> RankLoad:
    """The rank with the most routed tokens, in m-blocks of ``tile``."""
    per_rank = workload.tokens_by_expert().reshape(workload.ranks, workload.experts_per_rank)
    tokens = per_rank[int(np.argmax(per_rank.sum(axis=1)))]
    # A share of a token still takes a row; the margin keeps rounding of the shares from adding one.
    counts = [int(np.ceil(count - 1e-6)) for count in tokens]
    rows = sum(ceil_div(count, tile.block_m) for count in counts)
    fill = min(1.0, float(tokens.sum()) / (rows * tile.block_m)) if rows else 0.0
    return RankLoad(rows, sum(count > 0 for count in counts), fill)
