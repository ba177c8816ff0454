// A stream's wait for rows: one block, its threads over row blocks and sequences.

#include "arrival.cuh"

// Waits for num_blocks row blocks of every sequence and clears their counters. Nobody raises them before the ranks meet again,
// and that meeting comes after this kernel on the stream.
extern "C" __global__ void __launch_bounds__(1024, 1) xstage_take_blocks(const __grid_constant__ xstage::Arrivals arrivals,
                                                                         unsigned num_sequences, unsigned first_block,
                                                                         unsigned num_blocks) {
    for (unsigned index = threadIdx.x; index < num_sequences * num_blocks; index += blockDim.x) {
        const unsigned sequence = index / num_blocks, block = first_block + index % num_blocks;
        xstage::wait_for_block(arrivals, sequence, block);
        *xstage::arrival_counter(arrivals, sequence, block) = 0;
    }
}
