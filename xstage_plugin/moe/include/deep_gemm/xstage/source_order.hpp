// Which rank's token fills a row of an expert: the ranks take turns, and one that has run out is passed over. No CUDA in it.

#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define XSTAGE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define XSTAGE_HOST_DEVICE inline
#endif

namespace xstage {

struct Source {
    uint32_t rank_idx, token_idx;  // the token counts among those that the rank sends to the expert
};

// `counts(rank)` is how many tokens a rank sends to the expert; `slot` is below their sum.
template <uint32_t kNumRanks, typename Counts>
XSTAGE_HOST_DEVICE Source find_source(const Counts& counts, uint32_t slot) {
    uint32_t turn = 0, num_before = 0, num_active = 0;
    while (true) {
        num_active = 0;
        for (uint32_t rank_idx = 0; rank_idx < kNumRanks; ++ rank_idx)
            num_active += counts(rank_idx) > turn;
        // A turn takes at most one token of each active rank, so at least this many whole turns lie before the slot.
        const uint32_t num_turns = (slot - num_before) / num_active;
        if (num_turns == 0) break;
        turn += num_turns;
        num_before = 0;
        for (uint32_t rank_idx = 0; rank_idx < kNumRanks; ++ rank_idx) {
            const uint32_t count = counts(rank_idx);
            num_before += count < turn ? count : turn;
        }
    }
    uint32_t rank_idx = 0;
    for (uint32_t place = slot - num_before;; ++ rank_idx) {
        if (counts(rank_idx) <= turn) continue;
        if (place -- == 0) break;
    }
    return {rank_idx, turn};
}

}  // namespace xstage
