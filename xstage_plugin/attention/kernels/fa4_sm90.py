# mypy: ignore-errors
# ruff: noqa: N815 - the names of the regions in shared memory are upstream's
"""FlashAttention-4's forward kernel for SM90 with a storing role: output tiles go out, and are announced, behind the next tile.

Upstream's CTA ends with its tile: the first MMA warp issues the output's TMA store and waits until shared memory is read.
Here a CTA takes tile after tile, and an idle warp of the producer warp group stores: the MMA warps write a tile into shared
memory, tell that warp, and go on. It issues the store, frees the memory for the next tile, waits until the stores are complete
(not only read) and then raises the tile's counter at its destination, so that only a link that is busy for longer than a
whole tile takes can hold the MMA warps. Behind the CTA's last tile it waits for rows of this rank, where that is asked for.

Nothing of the arithmetic changes: loading, both products and the softmax are upstream's methods with upstream's tile sizes.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from flash_attn.cute import utils
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.named_barrier import NamedBarrierFwd
from flash_attn.cute.tile_scheduler import SingleTileLPTScheduler, StaticPersistentTileScheduler
from quack import copy_utils

from xstage_plugin.attention.kernels.named_arguments import named
from xstage_plugin.attention.kernels.tile_walk import COMPLETE, ISSUED, SMEM_FREE, Delivery, TurningWalk

STORING_WARP = 1  # of warps 0 to 3 upstream uses the first one for loads by TMA
# Named barriers behind upstream's: a whole output tile is in shared memory; a warp group may overwrite its rows of it.
OUT_FULL = max(NamedBarrierFwd) + 1
OUT_FREE = OUT_FULL + 1  # and the next ones, one a warp group
SMEM_BYTES = 227 * 1024
SMEM_ALIGN = 1024


class ArrivingForwardSm90(FlashAttentionForwardSm90):
    """See the module. Arguments as upstream's class; no varlen, no packed GQA, no block sparsity, equal head dimensions.

    Args:
        num_sms: CTAs to launch at most.
    """

    def __init__(self, *args, num_sms: int, **kwargs):
        super().__init__(*args, **kwargs)
        self.num_sms = num_sms

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
        self.signals = (arrivals, spans, awaits, expected)
        FlashAttentionForwardSm90.__call__(self, q, k, v, out, None, softmax_scale, stream=stream)

    def kernel(self, *args):
        """Upstream's kernel with our walk over the tiles, launched on as many CTAs as run at once."""
        given = named(FlashAttentionForwardSm90.kernel, self, args)
        order = given["tile_sched_params"]
        if not isinstance(order, SingleTileLPTScheduler.Params):
            order = StaticPersistentTileScheduler.to_underlying_arguments(order)
        delivery = Delivery(order, given["mO"], given["tma_atom_O"], *self.signals)
        given |= {"tile_sched_params": delivery, "TileScheduler": TurningWalk, "tma_atom_O": None}
        return _Launch(FlashAttentionForwardSm90.kernel(self, **given), cutlass.min(self.num_sms, delivery.tiles()))

    def _get_shared_storage_cls(self):
        # The output tile lies right behind K: in a place of its own where there is room, else where P is.
        q, k, v, out, p = (
            0 if layout is None else cute.cosize(layout)
            for layout in (self.sQ_layout, self.sK_layout, self.sV_layout, self.sO_layout, self.sP_layout)
        )
        width = self.dtype.width // 8
        assert all(elements * width % SMEM_ALIGN == 0 for elements in (q, k, out)), "the regions are not back to back"
        self.out_in_p = (q + k + v + out + p) * width + SMEM_ALIGN > SMEM_BYTES
        self.k_elements = k
        assert not self.out_in_p or p >= out, "no room for the output tile"

        def tile(elements):
            return cute.struct.Align[cute.struct.MemRange[self.dtype, elements], SMEM_ALIGN]

        def barriers(stages):
            return cute.struct.MemRange[Int64, 2 * stages]

        @cute.struct
        class Storage:
            mbar_ptr_Q: barriers(1)
            mbar_ptr_K: barriers(self.num_stages)
            mbar_ptr_V: barriers(self.num_stages)
            sV: tile(v)
            sQ: tile(q)
            sK: tile(k if self.out_in_p else k + out)
            sP: tile(p)

        return Storage

    def _out_tile(self, sQ, sK):
        return cute.make_tensor(sK.iterator + self.k_elements, sQ.layout)  # as many rows and columns as Q

    @cute.jit
    def load(self, *args):
        given = named(FlashAttentionForwardSm90.load, self, args)
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == STORING_WARP:
            self.store_tiles(self._out_tile(given["sQ"], given["sK"]), given["TileSchedulerCls"]())
        else:
            FlashAttentionForwardSm90.load(self, **given)

    @cute.jit
    def store_tiles(self, sO, walk):
        """The storing role: every tile of this CTA, one at a time, from shared memory to its destination."""
        delivery = walk.delivery
        cpasync.prefetch_descriptor(delivery.store)
        self._free_out()
        work = walk.initial_work_tile_info()
        while work.is_valid_tile:
            m_block, head, batch, _ = work.tile_idx
            rows = cute.local_tile(delivery.out[None, None, head, batch], (self.tile_m, self.tile_hdimv), (m_block, 0))
            store, _, _ = copy_utils.tma_get_copy_fn(delivery.store, 0, cute.make_layout(1), sO, rows, single_stage=True)
            cute.arch.barrier(barrier_id=OUT_FULL, number_of_threads=self.num_mma_threads + cute.arch.WARP_SIZE)
            store()
            cute.arch.cp_async_bulk_commit_group()
            with cute.arch.elect_one():
                delivery.stamp(ISSUED, m_block, head, batch)
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            self._free_out()
            with cute.arch.elect_one():
                delivery.stamp(SMEM_FREE, m_block, head, batch)
            if const_expr(delivery.arrivals is not None or delivery.spans is not None):
                cute.arch.cp_async_bulk_wait_group(0)
                with cute.arch.elect_one():
                    # ptxas makes one instruction of both waits for SM90, so only past the fence has a tile reached its peer.
                    cute.arch.fence_acq_rel_sys()
                    delivery.stamp(COMPLETE, m_block, head, batch)
                    delivery.announce(m_block * self.tile_m, head, batch)
            walk.advance_to_next_work()
            work = walk.get_current_work()
        delivery.await_rows(self.tile_m)

    def _free_out(self):
        for group in range(self.num_wg_mma):
            cute.arch.barrier_arrive(barrier_id=OUT_FREE + group, number_of_threads=self._writers)

    def _await_free_out(self):
        group = utils.canonical_warp_group_idx(sync=False) - 1
        cute.arch.barrier(barrier_id=OUT_FREE + group, number_of_threads=self._writers)

    @property
    def _writers(self):
        return self.num_threads_per_warp_group + cute.arch.WARP_SIZE

    def mma(self, *args):
        given = named(FlashAttentionForwardSm90.mma, self, args)
        FlashAttentionForwardSm90.mma(self, **given | {"sO": self._out_tile(given["sQ"], given["sK"])})

    def first_half_block_overlap(self, *, mask_fn, **given):
        def mask_once_free(*args, **kwargs):
            # The scores are masked before the first P of a tile is written, and behind the product that they come from.
            self._await_free_out()
            mask_fn(*args, **kwargs)

        masked = mask_once_free if self.out_in_p else mask_fn
        return FlashAttentionForwardSm90.first_half_block_overlap(self, mask_fn=masked, **given)

    def epilogue(self, *args):
        given = named(FlashAttentionForwardSm90.epilogue, self, args)
        self.hand_over(given["acc_O"], given["sO"], given["tiled_mma"], given["tidx"])

    @cute.jit
    def hand_over(self, acc_O, sO, tiled_mma, tidx):
        """An MMA thread's part of the output tile into shared memory, for the storing role."""
        rounded = cute.make_fragment_like(acc_O, self.dtype)
        rounded.store(acc_O.load().to(self.dtype))
        if const_expr(self.out_in_p):  # other warps' rows of P lie where this one's rows of the output go
            cute.arch.barrier(barrier_id=int(NamedBarrierFwd.Epilogue), number_of_threads=self.num_mma_threads)
        else:
            self._await_free_out()
        atom = utils.get_smem_store_atom(self.arch.major * 10 + self.arch.minor, self.dtype)
        copy = cute.make_tiled_copy_C(atom, tiled_mma).get_slice(tidx)
        cute.copy(atom, copy.retile(rounded), copy.partition_D(sO))
        cute.arch.fence_view_async_shared()
        cute.arch.barrier_arrive(barrier_id=OUT_FULL, number_of_threads=self.num_mma_threads + cute.arch.WARP_SIZE)


class _Launch:
    """A kernel that is launched on our grid instead of upstream's."""

    def __init__(self, kernel, ctas):
        self._kernel, self._ctas = kernel, ctas

    def launch(self, *, grid, **config):
        return self._kernel.launch(grid=(self._ctas, 1, 1), **config)
