// Stands in for the scheduler of MegaMoE on SM90, where one warp publishes the tiles and the others replay them: the same name
// and interface, with the lag of Linear-2 behind Linear-1 chosen at run time.
//
// Upstream's header is included under another name and its struct under another type. The schedule word is where the shadow of
// the SM100 scheduler reads it; at 0 upstream's own code runs. A lead makes Linear-2 follow unit by unit, where upstream lets
// several units of it follow in one go; no more units are under way than upstream sized its ring for. Kernels that are
// compiled for upstream's waves (buffers of fewer than 1024 tokens a rank) keep them.

#pragma once

#define SM90MegaMoEScheduler SM90MegaMoEUpstreamScheduler
#include <deep_gemm/scheduler/sm90_mega_moe.upstream.cuh>
#undef SM90MegaMoEScheduler

#include <deep_gemm/scheduler/mega_moe.cuh>
#include <deep_gemm/xstage/moe_schedule.hpp>
#include <deep_gemm/xstage/moe_unit_schedule.hpp>

namespace deep_gemm::sched {

// Upstream's template parameters in upstream's order. Its kernel names every argument.
template <uint32_t kRowTokens, uint32_t kTileN, uint32_t kTileK, uint32_t kL1N, uint32_t kL1K, uint32_t kL2N, uint32_t kL2K,
          uint32_t kNumExperts, uint32_t kWave, uint32_t kNumCTAs, uint32_t kNumRanks, bool kMulticastOnB, uint32_t kPerLane,
          uint32_t kNumL1Tiles, uint32_t kNumL2Tiles, uint32_t kNumL1Ks, uint32_t kNumL2Ks, typename WorkspaceT,
          uint32_t kLagCode, uint32_t kNumPoolRows, uint32_t kNumExpertTokens, uint32_t kNumCTAsPerCluster>
struct SM90MegaMoEScheduler
    : SM90MegaMoEUpstreamScheduler<kRowTokens, kTileN, kTileK, kL1N, kL1K, kL2N, kL2K, kNumExperts, kWave, kNumCTAs, kNumRanks,
                                   kMulticastOnB, kPerLane, kNumL1Tiles, kNumL2Tiles, kNumL1Ks, kNumL2Ks, WorkspaceT, kLagCode,
                                   kNumPoolRows, kNumExpertTokens, kNumCTAsPerCluster> {
    using Upstream =
        SM90MegaMoEUpstreamScheduler<kRowTokens, kTileN, kTileK, kL1N, kL1K, kL2N, kL2K, kNumExperts, kWave, kNumCTAs,
                                     kNumRanks, kMulticastOnB, kPerLane, kNumL1Tiles, kNumL2Tiles, kNumL1Ks, kNumL2Ks,
                                     WorkspaceT, kLagCode, kNumPoolRows, kNumExpertTokens, kNumCTAsPerCluster>;
    using Entry = typename Upstream::TileEntry;
    using Order =
        ::xstage::MoeUnitSchedule<kNumL1Tiles, kNumL2Tiles, kNumExperts, layout::kSM90LagUnitM, kMulticastOnB>;
    using Upstream::Upstream;

    // Tags of upstream's tile table; no objects, since they go on by reference.
    enum Tag : uint32_t { kTagEnd = 0, kTagLinear1 = 1, kTagLinear2 = 2 };

    template <uint32_t kClusterSize, typename Visit>
    CUTLASS_DEVICE void for_each_block_publish_dynamic_tail(
        Entry* table, uint32_t* counter, const uint32_t& cta_rank, const uint32_t& capacity, Visit&& visit) {
        if constexpr (kLagCode > 0) {
            if (const uint32_t lead = xstage_detail::lead_rows(this->workspace); lead > 0) {
                constexpr uint32_t kMostUnits = Upstream::kLagUnitsOnly + Upstream::kLagGroupUnits;
                const uint32_t lag = ::xstage::lag_of_lead(lead, layout::kSM90LagUnitM, kMostUnits);
                return publish_units<kClusterSize>(lag, table, counter, cta_rank, capacity, visit);
            }
        }
        Upstream::template for_each_block_publish_dynamic_tail<kClusterSize>(table, counter, cta_rank, capacity, visit);
    }

private:
    // Rows of an expert; the warp asks as one, since upstream's counts are spread over its lanes.
    CUTLASS_DEVICE auto rows() const {
        return [this](uint32_t expert) { return math::ceil_div(this->get_num_tokens(expert), kRowTokens); };
    }

    // The walk of the one warp that publishes. Behind the static part, the first CTA of a pair takes tickets for both, and the
    // second finds its tiles in its own table.
    template <uint32_t kClusterSize, typename Visit>
    CUTLASS_DEVICE void publish_units(
        uint32_t lag, Entry* table, uint32_t* counter, uint32_t cta_rank, uint32_t capacity, Visit& visit) {
        this->fetch_expert_recv_count();
        Order order;
        order.start(rows(), blockIdx.x, lag);
        bool is_tail = false;
        for (uint32_t place = 0;; ++ place) {
            uint32_t tag = kTagEnd;
            if (not is_tail) {
                tag = publish(table + place, order.next(rows(), kNumCTAs));
                is_tail = tag == kTagEnd;
            }
            if (is_tail) {
                // The table holds this entry and the end behind it, or this is the end: the other CTAs take the rest.
                const bool has_room = place + 1 < capacity;
                tag = cta_rank > 0 ? this->load_tile_entry(table + place)
                                   : publish_ticket<kClusterSize>(order, table + place, counter, has_room);
                if (tag == kTagEnd) return;
            }
            const auto phase = tag == kTagLinear1 ? BlockPhase::Linear1 : BlockPhase::Linear2;
            const uint32_t num_k_blocks = tag == kTagLinear1 ? kNumL1Ks : kNumL2Ks;
            visit(phase, this->current_local_expert_idx, num_k_blocks, this->m_block_idx, this->n_block_idx);
        }
    }

    // Makes the tile the current one and writes it down; its tag, kTagEnd and nothing written for none.
    CUTLASS_DEVICE uint32_t publish(Entry* entry, const ::xstage::UnitTile& next) {
        if (next.tile.phase == ::xstage::Phase::None) return kTagEnd;
        const uint32_t tag = next.tile.phase == ::xstage::Phase::Linear1 ? kTagLinear1 : kTagLinear2;
        this->current_local_expert_idx = next.tile.expert_idx;
        this->current_num_tokens = this->get_num_tokens(next.tile.expert_idx);
        this->current_pool_block_offset = next.tile.row_offset;
        this->m_block_idx = next.tile.m_block_idx;
        this->n_block_idx = next.tile.n_block_idx;
        this->current_pair_valid = next.is_paired;
        if (ptx::get_lane_idx() == 0) this->publish_tile_entry(entry, tag);
        return tag;
    }

    // Takes a ticket, a tile of the tail for each CTA of the pair, and writes both down, or the end for both.
    template <uint32_t kClusterSize>
    CUTLASS_DEVICE uint32_t publish_ticket(Order& order, Entry* entry, uint32_t* counter, bool has_room) {
        const bool is_first_lane = ptx::get_lane_idx() == 0;
        uint32_t position = 0;
        if (has_room and is_first_lane) position = atomicAdd(counter, 1u) * kClusterSize;
        position = ptx::exchange(position, 0);
        const uint32_t tag = has_room ? publish(entry, order.next_of_tail(rows(), position)) : kTagEnd;
        // An even position and the next one lie in one chunk.
        uint32_t word = 0, payload = 0;
        if (kClusterSize > 1 and tag != kTagEnd) {
            const auto other = order.next_of_tail(rows(), position + 1);
            const auto& tile = other.tile;
            word = this->make_compact_tag_word(tile.expert_idx, tile.m_block_idx, tile.n_block_idx, other.is_paired, tag);
            payload =
                this->make_compact_payload_word(this->current_num_tokens, this->current_pool_block_offset, tile.m_block_idx);
        }
        if (is_first_lane) {
            if (tag == kTagEnd) this->publish_tile_entry(entry, kTagEnd);
            if constexpr (kClusterSize > 1) this->st_remote_tile_entry(entry, 1u, word, payload);
        }
        return tag;
    }
};

}  // namespace deep_gemm::sched
