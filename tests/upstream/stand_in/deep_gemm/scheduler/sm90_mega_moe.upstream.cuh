// What the shadow of the SM90 scheduler uses of upstream, for g++: a warp is one lane, the tables of a pair of CTAs lie side by
// side, and the CTAs run one after the other. Upstream's own walk is only noted. Ours, not upstream's text.

#pragma once

#include <cstdint>

#include <deep_gemm/scheduler/mega_moe.cuh>

struct StandInBlock {
    uint32_t x;
};
inline StandInBlock blockIdx;

inline uint32_t atomicAdd(uint32_t* counter, uint32_t value) {
    const uint32_t before = *counter;
    *counter += value;
    return before;
}

namespace deep_gemm {

namespace layout {
constexpr uint32_t kSM90LagUnitM = 8;
}

namespace sched {

struct StandInEntry {
    uint32_t word, payload;
};

template <uint32_t kRowTokens, uint32_t kTileN, uint32_t kTileK, uint32_t kL1N, uint32_t kL1K, uint32_t kL2N, uint32_t kL2K,
          uint32_t kExperts, uint32_t kWave, uint32_t kCTAs, uint32_t kRanks, bool kShareB, uint32_t kLanes, uint32_t kL1Tiles,
          uint32_t kL2Tiles, uint32_t kL1Ks, uint32_t kL2Ks, typename Workspace, uint32_t kLag, uint32_t kRows,
          uint32_t kTokens, uint32_t kCluster>
struct SM90MegaMoEScheduler {
    using TileEntry = StandInEntry;
    static constexpr uint32_t kLagUnitsOnly = kLag % 1000, kLagGroupUnits = kLag / 1000;

    const Workspace& workspace;
    const uint32_t* tokens;
    uint32_t table_stride;
    uint32_t current_local_expert_idx = 0, current_num_tokens = 0, current_pool_block_offset = 0;
    uint32_t m_block_idx = 0, n_block_idx = 0;
    bool current_pair_valid = false;
    bool is_upstreams_walk = false;

    SM90MegaMoEScheduler(const Workspace& workspace, const uint32_t* tokens, uint32_t table_stride)
        : workspace(workspace), tokens(tokens), table_stride(table_stride) {}

    void fetch_expert_recv_count() {}
    uint32_t get_num_tokens(uint32_t expert) const { return tokens[expert]; }

    template <uint32_t kClusterSize, typename Visit>
    void for_each_block_publish_dynamic_tail(StandInEntry*, uint32_t*, const uint32_t&, const uint32_t&, Visit&&) {
        is_upstreams_walk = true;
    }

    static uint32_t make_compact_tag_word(uint32_t expert, uint32_t m, uint32_t n, bool is_paired, uint32_t tag) {
        return expert | m << 8 | n << 16 | uint32_t(is_paired) << 29 | tag << 30;
    }
    static uint32_t make_compact_payload_word(uint32_t num_tokens, uint32_t row_offset, uint32_t) {
        return num_tokens | row_offset << 16;
    }
    void publish_tile_entry(StandInEntry* entry, const uint32_t& tag) const {
        *entry = {make_compact_tag_word(current_local_expert_idx, m_block_idx, n_block_idx, current_pair_valid, tag),
                  make_compact_payload_word(current_num_tokens, current_pool_block_offset, m_block_idx)};
    }
    void st_remote_tile_entry(StandInEntry* entry, const uint32_t& cta, const uint32_t& word, const uint32_t& payload) const {
        entry[cta * table_stride] = {word, payload};
    }
    uint32_t load_tile_entry(const StandInEntry* entry) {
        current_local_expert_idx = entry->word & 0xff;
        m_block_idx = entry->word >> 8 & 0xff;
        n_block_idx = entry->word >> 16 & 0xff;
        current_pair_valid = entry->word >> 29 & 1;
        current_num_tokens = entry->payload & 0xffff;
        current_pool_block_offset = entry->payload >> 16;
        return entry->word >> 30;
    }
};

}
}
