// Lists the tiles of one instance for schedule_library.py. It is compiled behind a line that defines XSTAGE_TEMPLATES, the
// template values wanted, as ENTRY(l1_tiles, l2_tiles, num_experts, experts_per_wave) one after another.

#include <deep_gemm/xstage/moe_schedule.hpp>

namespace {

constexpr int64_t kTooManyTiles = -1, kNoSuchExpert = -2;

// Writes (phase, expert, row, m_block, n_block) for every tile and returns their number, or one of the faults above.
template <typename Schedule, uint32_t kNumExperts>
int64_t list_tiles(const uint32_t* rows_per_expert, uint32_t instance_idx, uint32_t num_instances, uint32_t word,
                   uint32_t* tiles, int64_t capacity) {
    bool no_such_expert = false;
    const auto rows = [&](uint32_t expert_idx) -> uint32_t {
        no_such_expert |= expert_idx >= kNumExperts;
        return expert_idx < kNumExperts ? rows_per_expert[expert_idx] : 0;
    };
    Schedule schedule;
    schedule.start(instance_idx, xstage::ScheduleWord{word});
    for (int64_t num_tiles = 0;; ++ num_tiles) {
        const xstage::Tile tile = schedule.next(rows, num_instances);
        if (no_such_expert) return kNoSuchExpert;
        if (tile.phase == xstage::Phase::None) return num_tiles;
        if (num_tiles == capacity) return kTooManyTiles;
        *tiles++ = static_cast<uint32_t>(tile.phase);
        *tiles++ = tile.expert_idx;
        *tiles++ = tile.row_offset + tile.m_block_idx;
        *tiles++ = tile.m_block_idx;
        *tiles++ = tile.n_block_idx;
    }
}

}  // namespace

extern "C" uint32_t xstage_largest_lead() { return xstage::ScheduleWord::kLeadMask; }

#define ENTRY(l1, l2, experts, wave)                                                                                         \
    extern "C" int64_t xstage_tiles_##l1##_##l2##_##experts##_##wave(const uint32_t* rows_per_expert, uint32_t instance_idx, \
                                                                     uint32_t num_instances, uint32_t word, uint32_t* tiles, \
                                                                     int64_t capacity) {                                     \
        return list_tiles<xstage::MoeSchedule<l1, l2, experts, wave>, experts>(rows_per_expert, instance_idx, num_instances, \
                                                                               word, tiles, capacity);                       \
    }
XSTAGE_TEMPLATES
