// Waiting for rows of attention's output, for kernels that read them.
//
// Counting. The output of a rank comes in row blocks of block_rows rows, and a block in tiles, one a head of the whole model.
// Every row of the output buffer has a counter; that of a block's first row says how many of the block's tiles are here, the
// others stay 0. A rank that has stored a tile completely raises it with a release at system scope; the waits below acquire at
// system scope. What comes after a wait sees the rows: in the thread that waited, and in its block after a __syncthreads().
// A kernel that then reads rows through TMA needs fence_tma_reads() in the thread that issues the copy, after the wait.
//
// Nothing here changes a counter: the stream that made the call clears them. Free of torch and of headers (NVRTC, nvcc).

#pragma once

namespace xstage {

// The counters of one rank. Mirrored by DeviceArrivals in arrivals.py.
struct Arrivals {
    int* counters;                  // [sequences][rows]
    long long sequence_stride;      // in counters
    unsigned long long timeout_ns;  // of one wait; beyond it the kernel says what is missing, and traps
    unsigned block_rows;
    int expected;   // tiles of a block
    unsigned rank;  // for messages
    unsigned unused;
};

static_assert(sizeof(Arrivals) == 40, "DeviceArrivals in arrivals.py has the same layout");

__device__ __forceinline__ int* arrival_counter(const Arrivals& arrivals, unsigned sequence, unsigned block) {
    return arrivals.counters + sequence * arrivals.sequence_stride + static_cast<long long>(block) * arrivals.block_rows;
}

__device__ __forceinline__ int load_arrived(const int* counter) {
    int arrived;
    asm volatile("ld.acquire.sys.s32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
    return arrived;
}

__device__ __forceinline__ unsigned long long arrival_clock_ns() {
    unsigned long long ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns) :: "memory");
    return ns;
}

__device__ __noinline__ void give_up_waiting(unsigned rank, unsigned sequence, unsigned block, int arrived, int expected) {
    printf("xstage: rank %u gave up waiting for row block %u of sequence %u: %d of %d tiles have arrived\n", rank, block,
           sequence, arrived, expected);
    __trap();
}

// Returns when all tiles of the block are here.
__device__ __forceinline__ void wait_for_block(const Arrivals& arrivals, unsigned sequence, unsigned block) {
    const int* counter = arrival_counter(arrivals, sequence, block);
    int arrived = load_arrived(counter);
    if (arrived == arrivals.expected) return;
    const unsigned long long begin_ns = arrival_clock_ns();
    while (arrived != arrivals.expected) {
        // More than all of them: the counters were not cleared, or a kernel announces tiles twice.
        if (arrived > arrivals.expected || arrival_clock_ns() - begin_ns > arrivals.timeout_ns)
            give_up_waiting(arrivals.rank, sequence, block, arrived, arrivals.expected);
        arrived = load_arrived(counter);
    }
}

// Returns when rows first_row to first_row + num_rows - 1 of the sequence are here. Each thread that calls it waits for itself;
// one thread of a block is enough.
__device__ __forceinline__ void wait_for_rows(const Arrivals& arrivals, unsigned sequence, unsigned first_row,
                                              unsigned num_rows) {
    if (num_rows == 0) return;
    const unsigned last_block = (first_row + num_rows - 1) / arrivals.block_rows;
    for (unsigned block = first_row / arrivals.block_rows; block <= last_block; ++block)
        wait_for_block(arrivals, sequence, block);
}

// Between a wait and copies of the rows by TMA, which order themselves apart from loads and stores.
__device__ __forceinline__ void fence_tma_reads() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace xstage
