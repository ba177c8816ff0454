// The order in which one persistent CTA visits the tiles of MegaMoE. One source: the kernel includes it, the tests compile
// it with g++, the simulator runs it. No CUDA and no DeepGEMM in it.
//
// A row is an m-block of one local expert; rows are numbered over all experts in expert order. A row has kNumL1Tiles tiles
// of Linear-1 and kNumL2Tiles of Linear-2. Instance g of G visits tiles g, g + G, g + 2G, ... of each stream. CTA pairs need
// no case of their own: with even tiles a row and even G both CTAs of a pair stay on the same row, side by side.

#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define XSTAGE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define XSTAGE_HOST_DEVICE inline
#endif

namespace xstage {

enum class Phase : uint32_t { None = 0, Linear1 = 1, Linear2 = 2 };

struct Tile {
    Phase phase;
    uint32_t expert_idx;   // local
    uint32_t row_offset;   // rows of the experts before it
    uint32_t m_block_idx;  // row within the expert
    uint32_t n_block_idx;  // tile within the row
};

// The schedule as one 32-bit word, so that a call can choose it at run time: the lead in rows, 0 for the expert wave, and
// whether Dispatch shares its pulls (pull_tokens.cuh).
struct ScheduleWord {
    static constexpr uint32_t kLeadMask = 0xffff, kSharedPulls = 0x10000;

    uint32_t value;

    XSTAGE_HOST_DEVICE uint32_t lead() const { return value & kLeadMask; }
    XSTAGE_HOST_DEVICE bool shares_pulls() const { return (value & kSharedPulls) != 0; }
};

// A position in one stream. `tile_idx` counts from the first tile of `expert_idx` and may lie beyond that expert until
// `settle` has moved on. `Rows` maps an expert index to its number of rows; it is asked again rather than remembered, since
// every word of state is a register of each thread of the kernel.
template <uint32_t kNumTiles>
struct TileCursor {
    uint32_t tile_idx = 0;
    uint32_t expert_idx = 0;
    uint32_t row_offset = 0;

    // Moves to the expert that holds the tile; false if that is none below `end_expert_idx`.
    template <typename Rows>
    XSTAGE_HOST_DEVICE bool settle(const Rows& rows, uint32_t end_expert_idx) {
        while (expert_idx < end_expert_idx) {
            const uint32_t num_rows = rows(expert_idx);
            if (tile_idx < num_rows * kNumTiles) return true;
            tile_idx -= num_rows * kNumTiles;
            row_offset += num_rows;
            ++ expert_idx;
        }
        return false;
    }

    XSTAGE_HOST_DEVICE uint32_t row() const { return row_offset + tile_idx / kNumTiles; }

    XSTAGE_HOST_DEVICE Tile take(Phase phase, uint32_t num_instances) {
        const uint32_t m_block_idx = tile_idx / kNumTiles;
        const Tile tile = {phase, expert_idx, row_offset, m_block_idx, tile_idx - m_block_idx * kNumTiles};
        tile_idx += num_instances;
        return tile;
    }
};

// The tiles of one instance, in order, under the schedule that `word` names.
template <uint32_t kNumL1Tiles, uint32_t kNumL2Tiles, uint32_t kNumExperts, uint32_t kNumExpertsPerWave>
struct MoeSchedule {
    static_assert(kNumExperts % kNumExpertsPerWave == 0, "waves hold whole numbers of experts");

    TileCursor<kNumL1Tiles> l1;
    TileCursor<kNumL2Tiles> l2;
    uint32_t lead = 0;

    XSTAGE_HOST_DEVICE void start(uint32_t instance_idx, ScheduleWord word) {
        lead = word.lead();
        l1 = {instance_idx, 0, 0};
        l2 = {instance_idx, 0, 0};
    }

    template <typename Rows>
    XSTAGE_HOST_DEVICE Tile next(const Rows& rows, uint32_t num_instances) {
        return lead == 0 ? next_of_wave(rows, num_instances) : next_interleaved(rows, num_instances);
    }

private:
    // Algorithm 1 of the paper: Linear-2 when its row trails Linear-1's by at least the lead, or Linear-1 is done.
    template <typename Rows>
    XSTAGE_HOST_DEVICE Tile next_interleaved(const Rows& rows, uint32_t num_instances) {
        const bool has_l1 = l1.settle(rows, kNumExperts);
        const bool has_l2 = l2.settle(rows, kNumExperts);
        if (has_l2 and (not has_l1 or l2.row() + lead <= l1.row()))
            return l2.take(Phase::Linear2, num_instances);
        if (has_l1) return l1.take(Phase::Linear1, num_instances);
        return {Phase::None, 0, 0, 0, 0};
    }

    // The original order: all Linear-1 tiles of a wave of experts, then all its Linear-2 tiles. One count of tiles runs
    // through both, so that the instances that did one Linear-1 tile less begin Linear-2 first. Linear-2's cursor waits at
    // the wave's first expert while Linear-1 runs, Linear-1's at the next wave's while Linear-2 does.
    template <typename Rows>
    XSTAGE_HOST_DEVICE Tile next_of_wave(const Rows& rows, uint32_t num_instances) {
        while (l2.expert_idx < kNumExperts) {
            const uint32_t end_expert_idx = (l2.expert_idx / kNumExpertsPerWave + 1) * kNumExpertsPerWave;
            if (l1.expert_idx < end_expert_idx) {
                if (l1.settle(rows, end_expert_idx)) return l1.take(Phase::Linear1, num_instances);
                l2.tile_idx = l1.tile_idx;
            }
            if (l2.settle(rows, end_expert_idx)) return l2.take(Phase::Linear2, num_instances);
            l1.tile_idx = l2.tile_idx;
        }
        return {Phase::None, 0, 0, 0, 0};
    }
};

}  // namespace xstage
