"""One address range over the memory of several GPUs: the driver calls of a span, and the only place that knows handle types.

The memory exists already, mapped somewhere in this process (torch's symmetric memory did that, peers' included). Each block
is mapped a second time, at equal distances. A domain of several hosts would differ in how a peer's block came to be mapped
(fabric handles), not in what happens here: a handle is taken from an address, whatever kind it is of.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from xstage_plugin.burst_gap.gpu_info import driver_api, driver_call
from xstage_plugin.errors import InvalidInputError


class SpanMap:
    """``len(addresses)`` slots of ``slot_bytes`` from ``address`` on; slot i is the block mapped at ``addresses[i]``.

    The same block may fill several slots. What one kernel writes through one slot, a later kernel may read through another;
    within a kernel that would need a proxy fence, so a kernel uses one slot a block.

    Args:
        addresses: starts of mapped blocks, all of the same size.
        device_index: GPU that will read and write through the range.

    Raises:
        InvalidInputError: an address is not the start of a block, or the blocks are of different sizes.
        GpuError: the driver refused; what had been mapped until then is released.
    """

    def __init__(self, addresses: Sequence[int], device_index: int) -> None:
        self.slot_bytes = _common_block_bytes(addresses)
        self.mapped_bytes = self.slot_bytes * len(addresses)
        driver = driver_api()
        # Released in the reverse order, also when one of the calls below fails.
        with ExitStack() as undo:
            start = int(driver_call("cuMemAddressReserve", self.mapped_bytes, 0, 0, 0))
            undo.callback(driver_call, "cuMemAddressFree", start, self.mapped_bytes)
            for slot, address in enumerate(addresses):
                handle = driver_call("cuMemRetainAllocationHandle", address)
                # A mapping keeps its block alive; the handle is needed for the call only.
                try:
                    driver_call("cuMemMap", start + slot * self.slot_bytes, self.slot_bytes, 0, handle, 0)
                    undo.callback(driver_call, "cuMemUnmap", start + slot * self.slot_bytes, self.slot_bytes)
                finally:
                    driver_call("cuMemRelease", handle)
            access = driver.CUmemAccessDesc()
            access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            access.location.id = device_index
            access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            driver_call("cuMemSetAccess", start, self.mapped_bytes, [access], 1)
            self._undo = undo.pop_all()
        self.address = start

    def close(self) -> None:
        """Unmap and free the range; the blocks themselves stay. The caller sees to it that no kernel still uses it."""
        self._undo.close()


def _common_block_bytes(addresses: Sequence[int]) -> int:
    sizes = set()
    for address in addresses:
        base, size = driver_call("cuMemGetAddressRange", address)
        if int(base) != address:
            raise InvalidInputError(
                f"the symmetric buffer at {address:#x} lies inside a larger block (from {int(base):#x}); expected a block of "
                "its own: make the span outside any torch memory pool"
            )
        sizes.add(int(size))
    if len(sizes) != 1:
        raise InvalidInputError(f"the ranks' blocks are of {sorted(sizes)} bytes; expected one size")
    return sizes.pop()
