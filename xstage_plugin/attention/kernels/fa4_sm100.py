# mypy: ignore-errors
# ruff: noqa: SIM102 - of two conditions the outer one is decided while compiling
"""FlashAttention-4's forward kernel for SM100 with a storing role that announces its tiles. Compiled, never run on a GPU.

Upstream's CTA already takes tile after tile, and a warp of its own already stores the output, of which a work tile has one tile
of ``m_block_size`` rows for each Q stage. Here that warp also waits until the stores of its work tile are complete (not only
read) and then raises one counter for each output tile. It has nothing else to do until the next work tile is computed, and has
freed the shared memory before it waits, so that only a link that is busy for longer than that can hold the other warps. Behind
the CTA's last tile it waits for rows of this rank, where that is asked for.

In a kernel of CTA pairs a work tile belongs to the pair. Of every Q stage the first CTA has the first ``m_block_size`` rows and
the second CTA the next ones; each stores and announces its own.

Nothing else is changed but who takes which work tile: for causal attention too a CTA takes one after another, so that a launch
takes no more SMs than asked.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from flash_attn.cute.flash_fwd_sm100 import FlashAttentionForwardSm100
from quack import copy_utils

from xstage_plugin.attention.kernels.named_arguments import named
from xstage_plugin.attention.kernels.tile_walk import COMPLETE, ISSUED, SMEM_FREE, Delivery, TileWalk, TurningWalk


class ArrivingForwardSm100(FlashAttentionForwardSm100):
    """See the module. Arguments as upstream's class; no varlen, no split-KV, no packed GQA, no block sparsity, static order.

    Args:
        num_sms: CTAs to launch at most; a kernel of CTA pairs launches one pair at least.
    """

    def __init__(self, *args, num_sms: int, **kwargs):
        super().__init__(*args, **kwargs)
        assert self.use_tma_O, "the output needs a warp of its own"
        assert not self.overlap_sO_sQ, "the output needs a place of its own"
        assert not self.dynamic_persistent, "the order of tiles is ours"
        self.num_sms, self.order = num_sms, self.TileScheduler

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        arrivals: cute.Tensor | None,
        spans: cute.Tensor | None,
        awaits: cute.Tensor | None,
        expected: Int32 | None,
        softmax_scale: Float32,
        stream: cuda.CUstream = None,
    ):
        """Launch on q and out [b, rows, h, d], k and v [b, kv_rows, h_kv, d]; the next four as :class:`Delivery`'s."""
        self.TileScheduler = _Scheduling(self.order, (arrivals, spans, awaits, expected), self.num_sms)
        FlashAttentionForwardSm100.__call__(self, q, k, v, out, None, softmax_scale, stream=stream)

    def epilogue_s2g(self, *args, **kwargs):
        given = named(FlashAttentionForwardSm100.epilogue_s2g, self, args, kwargs)
        takes = ("mO", "sO", "tma_atom_O", "pipeline_o_epi", "mma_tile_coord_v", "tile_scheduler")
        self.store_tiles(*(given[name] for name in takes))

    @cute.jit
    def store_tiles(self, out, sO, store_atom, written, cta_in_pair, walk):
        """The storing role: the output tiles of this CTA, from shared memory to their destinations.

        ``written`` is the pipeline from the warps that write ``sO``, with a stage for each Q stage.
        """
        delivery = walk.delivery
        phase = Int32(0)
        work = walk.initial_work_tile_info()
        while work.is_valid_tile:
            m_block, head, batch, _ = work.tile_idx
            blocks = [(m_block * self.q_stage + stage) * self.cta_group_size + cta_in_pair for stage in range(self.q_stage)]
            for stage in cutlass.range_constexpr(self.q_stage):
                rows = cute.local_tile(out[None, None, head, batch], self.epi_tile, (blocks[stage], 0))
                store, _, _ = copy_utils.tma_get_copy_fn(
                    store_atom, 0, cute.make_layout(1), sO[None, None, stage], rows, single_stage=True
                )
                written.consumer_wait_w_index_phase(stage, phase)
                store()
                cute.arch.cp_async_bulk_commit_group()
                self.stamp(delivery, ISSUED, out, blocks[stage], head, batch)
            for stage in cutlass.range_constexpr(self.q_stage):
                cute.arch.cp_async_bulk_wait_group(self.q_stage - 1 - stage, read=True)
                written.consumer_release_w_index(stage)
                self.stamp(delivery, SMEM_FREE, out, blocks[stage], head, batch)
            if const_expr(delivery.arrivals is not None or delivery.spans is not None):
                cute.arch.cp_async_bulk_wait_group(0)
                with cute.arch.elect_one():
                    # As for SM90: whatever ptxas makes of the waits, past the fence the tiles have reached their peer.
                    cute.arch.fence_acq_rel_sys()
                for stage in cutlass.range_constexpr(self.q_stage):
                    row = blocks[stage] * self.m_block_size
                    if row < out.shape[0]:  # the last work tile may have output tiles past the end
                        with cute.arch.elect_one():  # the thread of the fence: an election has one outcome
                            delivery.stamp(COMPLETE, blocks[stage], head, batch)
                            delivery.announce(row, head, batch)
            phase ^= 1
            work = walk.advance_to_next_work()
        delivery.await_rows(self.m_block_size)

    @cute.jit
    def stamp(self, delivery, entry: cutlass.Constexpr, out, block, head, batch):
        """Note the time of one entry of a tile's span, if the tile has rows."""
        if const_expr(delivery.spans is not None):
            if block * self.m_block_size < out.shape[0]:
                with cute.arch.elect_one():
                    delivery.stamp(entry, block, head, batch)


class _Scheduling:
    """What upstream's launch and kernel ask of a scheduler class: our walk in the order of one of theirs, on our grid.

    Args:
        order: upstream's scheduler class.
        signals: arrivals, spans, awaits and expected as :class:`Delivery`'s.
        num_sms: CTAs to launch at most.
    """

    def __init__(self, order, signals, num_sms):
        self._order, self._signals, self._num_sms = order, signals, num_sms

    def to_underlying_arguments(self, args, *, scheduling_mode):
        order = self._order.to_underlying_arguments(args, scheduling_mode=scheduling_mode)
        return Delivery(order, None, None, *self._signals)

    def get_grid_shape(self, delivery):
        cluster = delivery.order.cluster_shape_m
        return (cutlass.min(max(self._num_sms // cluster, 1), delivery.tiles()) * cluster, Int32(1), Int32(1))

    def create(self, delivery):
        # Where all tiles cost the same, a turn would only take a register.
        return (TurningWalk if delivery.is_longest_first else TileWalk).create(delivery)
