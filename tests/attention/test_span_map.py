"""The driver calls of a span, over a driver of our own: what is mapped where, and that everything is given back."""

from types import SimpleNamespace

import pytest

from xstage_plugin.attention import span_map
from xstage_plugin.attention.span_map import SpanMap
from xstage_plugin.burst_gap.gpu_info import GpuError
from xstage_plugin.errors import InvalidInputError

START, BLOCK = 0x7000_0000_0000, 2**21
BLOCKS = [0x10_0000_0000, 0x20_0000_0000, 0x30_0000_0000]


class Driver:
    """Mapped blocks by address; the ``fail_at``-th call (from 1) fails."""

    def __init__(self, blocks, fail_at=0):
        self.blocks, self.fail_at = blocks, fail_at
        self.calls, self.mapped, self.handles, self.reserved, self.readable = 0, {}, [], {}, False

    def __call__(self, name, *arguments):
        self.calls += 1
        if self.calls == self.fail_at:
            raise GpuError(f"{name}: CUDA_ERROR_OUT_OF_MEMORY")
        return getattr(self, name)(*arguments)

    def cuMemGetAddressRange(self, address):  # noqa: N802
        for base, size in self.blocks.items():
            if base <= address < base + size:
                return base, size
        raise GpuError("cuMemGetAddressRange: CUDA_ERROR_NOT_FOUND")

    def cuMemAddressReserve(self, size, alignment, address, flags):  # noqa: N802
        self.reserved[START] = size
        return START

    def cuMemAddressFree(self, address, size):  # noqa: N802
        assert not self.mapped, "freed while something is mapped"
        assert self.reserved.pop(address) == size

    def cuMemRetainAllocationHandle(self, address):  # noqa: N802
        self.handles.append(address)
        return address

    def cuMemRelease(self, handle):  # noqa: N802
        self.handles.remove(handle)

    def cuMemMap(self, address, size, offset, handle, flags):  # noqa: N802
        assert (size, offset) == (self.blocks[handle], 0), "a block is mapped whole"
        self.mapped[address] = handle

    def cuMemUnmap(self, address, size):  # noqa: N802
        del self.mapped[address]

    def cuMemSetAccess(self, address, size, access, count):  # noqa: N802
        assert (address, size, count) == (START, self.reserved[START], len(access))
        self.readable = access[0].location.id == 3


@pytest.fixture
def driver(monkeypatch):
    def use(blocks=None, fail_at=0):
        made = Driver(blocks or dict.fromkeys(BLOCKS, BLOCK), fail_at)
        names = SimpleNamespace(
            CUmemAccessDesc=lambda: SimpleNamespace(location=SimpleNamespace()),
            CUmemLocationType=SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1),
            CUmemAccess_flags=SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3),
        )
        monkeypatch.setattr(span_map, "driver_call", made)
        monkeypatch.setattr(span_map, "driver_api", lambda: names)
        return made

    return use


def test_blocks_stand_in_the_order_given_at_equal_distances(driver):
    cuda = driver()
    turn = [*BLOCKS, *BLOCKS[:2]]
    mapping = SpanMap(turn, 3)
    assert cuda.mapped == {START + slot * BLOCK: block for slot, block in enumerate(turn)}
    assert (mapping.address, mapping.slot_bytes, mapping.mapped_bytes) == (START, BLOCK, 5 * BLOCK)
    assert cuda.readable
    assert cuda.handles == []  # a mapping needs no handle


def test_close_gives_everything_back_once(driver):
    cuda = driver()
    mapping = SpanMap(BLOCKS, 3)
    mapping.close()
    calls = cuda.calls
    mapping.close()
    assert (cuda.mapped, cuda.reserved, cuda.calls) == ({}, {}, calls)


@pytest.mark.parametrize("fail_at", range(1, 15))
def test_a_driver_that_refuses_half_way_leaves_nothing_behind(driver, fail_at):
    # 3 sizes, a reservation, three times handle, map and release, and the access rights.
    cuda = driver(fail_at=fail_at)
    # A release that fails leaves its handle with the driver.
    handles = 1 if fail_at in (7, 10, 13) else 0
    with pytest.raises(GpuError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        SpanMap(BLOCKS, 3)
    assert (cuda.mapped, cuda.reserved, len(cuda.handles)) == ({}, {}, handles)


def test_blocks_of_different_sizes_cannot_stand_at_equal_distances(driver):
    driver(dict(zip(BLOCKS, (BLOCK, BLOCK, 2 * BLOCK), strict=True)))
    with pytest.raises(InvalidInputError, match=r"the ranks' blocks are of \[2097152, 4194304\] bytes; expected one size"):
        SpanMap(BLOCKS, 3)


def test_a_buffer_inside_a_larger_block_is_refused(driver):
    driver()
    with pytest.raises(InvalidInputError, match=r"lies inside a larger block.*outside any torch memory pool"):
        SpanMap([BLOCKS[0] + 512, *BLOCKS[1:]], 3)
