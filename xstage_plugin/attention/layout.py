"""Who owns which rows and computes which heads in a Ulysses attention layer. Pure, no GPU.

Two orders of query rows occur:

- **sequence order**: rows as the sequence has them;
- **delivery order**: the ranks' local rows one after another, as a rank delivers them, rows that all ranks need repeated
  in every part. A rank serves itself last (``own_last``) or first (``own_first``), then its neighbours upwards, so that the
  ranks start at different destinations.

Keys and values are always in sequence order: the order of keys decides the last bits of a softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

from xstage_plugin.checks import not_negative_int, positive_int, shown, unknown_name
from xstage_plugin.errors import InvalidInputError

SEQUENCE, OWN_LAST, OWN_FIRST = "sequence", "own_last", "own_first"
Q_ORDERS = (SEQUENCE, OWN_LAST, OWN_FIRST)
FIRST, LAST = "first", "last"


@dataclass(frozen=True)
class UlyssesLayout:
    """Rows and heads of one attention layer over all ranks; the same object on every rank.

    Attributes:
        rows: rows that only rank j owns, one entry a rank; uneven and 0 are fine.
        heads: query heads that rank r computes, one entry a rank, each at least 1.
        head_dim: d, elements.
        batch: B, sequences.
        kv_heads: key/value heads of the whole model; default: as many as query heads.
        shared_rows: rows that every rank needs (text), delivered to all of them.
        shared_at: where they stand, in the sequence and among every rank's local rows: ``first`` or ``last``.

    Raises:
        InvalidInputError: a value is out of range, or ``rows`` and ``heads`` are of different lengths.
    """

    rows: tuple[int, ...]
    heads: tuple[int, ...]
    head_dim: int
    batch: int = 1
    kv_heads: int | None = None
    shared_rows: int = 0
    shared_at: str = LAST

    def __post_init__(self) -> None:
        for name in ("rows", "heads"):
            if not isinstance(getattr(self, name), tuple) or not getattr(self, name):
                raise InvalidInputError(f"{name} is {shown(getattr(self, name))}; expected a tuple with one entry a rank")
        if len(self.rows) != len(self.heads):
            raise InvalidInputError(
                f"rows has {len(self.rows)} entries and heads {len(self.heads)}; expected one a rank in both"
            )
        for rank, count in enumerate(self.rows):
            not_negative_int(f"rows of rank {rank}", count)
        for rank, count in enumerate(self.heads):
            positive_int(f"heads of rank {rank}", count)
        not_negative_int("shared_rows", self.shared_rows)
        positive_int("head_dim", self.head_dim)
        positive_int("batch", self.batch)
        if self.shared_at not in (FIRST, LAST):
            raise unknown_name("place of the shared rows", str(self.shared_at), (FIRST, LAST))
        if self.seq_len == 0:
            raise InvalidInputError("the layout has no rows; expected at least one in rows or shared_rows")
        if self.kv_heads is not None and self.total_heads % positive_int("kv_heads", self.kv_heads):
            raise InvalidInputError(f"kv_heads is {self.kv_heads}; expected a divisor of the {self.total_heads} query heads")

    @classmethod
    def even(
        cls,
        seq_len: int,
        heads: int,
        head_dim: int,
        ranks: int,
        *,
        batch: int = 1,
        kv_heads: int | None = None,
        shared_rows: int = 0,
        shared_at: str = LAST,
    ) -> UlyssesLayout:
        """``seq_len`` rows (the shared ones counted once) and ``heads`` query heads, shared as equally as they can be.

        What does not divide goes to the first ranks, one row or head each.

        Raises:
            InvalidInputError: fewer heads than ranks, more shared rows than rows, or a value out of range.
        """
        positive_int("ranks", ranks)
        if positive_int("heads", heads) < ranks:
            raise InvalidInputError(f"heads is {heads}; expected at least one for each of the {ranks} ranks")
        own = positive_int("seq_len", seq_len) - not_negative_int("shared_rows", shared_rows)
        if own < 0:
            raise InvalidInputError(f"shared_rows is {shared_rows}; expected at most the {seq_len} rows of the sequence")
        return cls(_split(own, ranks), _split(heads, ranks), head_dim, batch, kv_heads, shared_rows, shared_at)

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def seq_len(self) -> int:
        """Rows of the sequence, shared ones counted once."""
        return sum(self.rows) + self.shared_rows

    @property
    def total_heads(self) -> int:
        return sum(self.heads)

    @property
    def total_kv_heads(self) -> int:
        return self.total_heads if self.kv_heads is None else self.kv_heads

    @property
    def delivery_rows(self) -> int:
        """Rows of q in delivery order: the local rows of all ranks."""
        return sum(self.rows) + self.ranks * self.shared_rows

    @property
    def span_shape(self) -> tuple[int, int, int, int]:
        """Shape of every rank's output buffer, [B, most local rows, H, d]; one size, so that one stride reaches all."""
        return (self.batch, max(map(self.local_rows, range(self.ranks))), self.total_heads, self.head_dim)

    def local_rows(self, rank: int) -> int:
        """Rows of the output that ``rank`` holds: its own and the shared ones."""
        return self.shared_rows + self.rows[rank]

    def out_shape(self, rank: int) -> tuple[int, int, int, int]:
        """[B, S_local, H, d] of ``rank``."""
        return (self.batch, self.local_rows(rank), self.total_heads, self.head_dim)

    def q_rows(self, q_order: str) -> int:
        """Rows of q in ``q_order``."""
        return self.seq_len if checked_order(q_order) == SEQUENCE else self.delivery_rows

    def head_start(self, rank: int) -> int:
        """First of the query heads that ``rank`` computes."""
        return sum(self.heads[:rank])

    def row_start(self, rank: int) -> int:
        """Where ``rank``'s own rows begin in the sequence."""
        return sum(self.rows[:rank]) + (self.shared_rows if self.shared_at == FIRST else 0)

    def own_range(self, rank: int) -> range:
        """Sequence positions of the rows that only ``rank`` owns."""
        return range(self.row_start(rank), self.row_start(rank) + self.rows[rank])

    def shared_range(self) -> range:
        """Sequence positions of the shared rows."""
        start = 0 if self.shared_at == FIRST else sum(self.rows)
        return range(start, start + self.shared_rows)

    def local_ranges(self, rank: int) -> tuple[range, ...]:
        """Sequence positions of ``rank``'s local rows, in their local order; empty ranges left out."""
        own, shared = self.own_range(rank), self.shared_range()
        return tuple(part for part in ((shared, own) if self.shared_at == FIRST else (own, shared)) if part)

    def kv_heads_of(self, rank: int) -> tuple[int, int]:
        """(first, count) of the key/value heads that ``rank``'s query heads need.

        Raises:
            InvalidInputError: some of them serve more of the rank's query heads than others; kernels take equal groups only.
        """
        group = self.total_heads // self.total_kv_heads
        start, count = self.head_start(rank), self.heads[rank]
        needed = [head // group for head in range(start, start + count)]
        first, kv_count = needed[0], needed[-1] - needed[0] + 1
        served = {needed.count(head) for head in set(needed)}
        if len(served) > 1:
            raise InvalidInputError(
                f"query heads {start} to {start + count - 1} of rank {rank} use {kv_count} of {self.total_kv_heads} key/value "
                "heads unevenly; expected equal groups: give the ranks other head counts"
            )
        return first, kv_count

    def delivery_ranks(self, rank: int, q_order: str) -> tuple[int, ...]:
        """The ranks in the order in which ``rank`` serves them."""
        first = {SEQUENCE: 0, OWN_LAST: rank + 1, OWN_FIRST: rank}[checked_order(q_order)]
        return tuple((first + step) % self.ranks for step in range(self.ranks))

    def q_ranges(self, rank: int, q_order: str) -> tuple[range, ...]:
        """Sequence positions of the rows of ``rank``'s q, in ``q_order``."""
        if checked_order(q_order) == SEQUENCE:
            return (range(self.seq_len),)
        return tuple(part for owner in self.delivery_ranks(rank, q_order) for part in self.local_ranges(owner))

    def delivery_start(self, rank: int, owner: int, q_order: str) -> int:
        """Where ``owner``'s local rows begin in ``rank``'s q; ``q_order`` is ``own_last`` or ``own_first``."""
        order = self.delivery_ranks(rank, q_order)
        return sum(self.local_rows(earlier) for earlier in order[: order.index(owner)])


def checked_order(q_order: str) -> str:
    """``q_order`` if it is a known one.

    Raises:
        InvalidInputError: otherwise.
    """
    if q_order not in Q_ORDERS:
        raise unknown_name("order of query rows", str(q_order), Q_ORDERS)
    return q_order


def _split(total: int, ranks: int) -> tuple[int, ...]:
    return tuple(total // ranks + (rank < total % ranks) for rank in range(ranks))
