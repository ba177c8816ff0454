// Stands in for the scheduler of MegaMoE: the same name and interface, with the order of tiles chosen at run time.
//
// Upstream's header is included under another name and its struct under another type; everything but the order is
// inherited. The schedule is read from a word that upstream's workspace leaves free: it reserves 32 bytes for barriers and
// uses 28. The symmetric buffer is zeroed when it is made, and 0 is the expert wave, so nobody who does not ask for another
// order gets one.

#pragma once

#define MegaMoEScheduler MegaMoEUpstreamScheduler
#include <deep_gemm/scheduler/mega_moe.upstream.cuh>
#undef MegaMoEScheduler

#include <deep_gemm/xstage/moe_schedule.hpp>

namespace deep_gemm::sched {

// kArgs are upstream's template arguments in upstream's order. Its last ones have defaults; a kernel may name them or not.
template <uint32_t... kArgs> struct MegaMoEScheduler;

namespace xstage_detail {

// Places in upstream's list.
constexpr uint32_t kPlaceBlockM = 0, kPlaceExperts = 7, kPlaceWave = 8, kPlaceSMs = 9;
constexpr uint32_t kPlaceL1Tiles = 12, kPlaceL2Tiles = 13, kPlaceL1Ks = 14, kPlaceL2Ks = 15;

template <uint32_t... kAll> struct ArgList {};

// The list with upstream's defaults filled in.
template <typename Upstream> struct Completed;
template <uint32_t... kAll> struct Completed<MegaMoEUpstreamScheduler<kAll...>> {
    template <template <uint32_t...> class T> using Apply = T<kAll...>;
};

template <uint32_t... kAll>
struct OrderedScheduler : MegaMoEUpstreamScheduler<kAll...> {
    using Upstream = MegaMoEUpstreamScheduler<kAll...>;
    using Block = cute::tuple<BlockPhase, uint32_t, uint32_t, uint32_t>;

    // One argument by its place, at compile time.
    static constexpr uint32_t at(uint32_t place) {
        const uint32_t all[] = {kAll...};
        return all[place];
    }
    static constexpr uint32_t kRowTokens = at(kPlaceBlockM), kInstances = at(kPlaceSMs);
    static constexpr uint32_t kL1Ks = at(kPlaceL1Ks), kL2Ks = at(kPlaceL2Ks);

    static constexpr uint64_t kScheduleWordOffset = 28;
    static_assert(kScheduleWordOffset + sizeof(uint32_t) <= layout::Workspace::kNumBarrierSignalBytes);

    ::xstage::MoeSchedule<at(kPlaceL1Tiles), at(kPlaceL2Tiles), at(kPlaceExperts), at(kPlaceWave)> schedule;

    using Upstream::Upstream;

    // Rows of an expert; the warp asks as one, since upstream's counts are spread over its lanes.
    CUTLASS_DEVICE auto rows() const {
        return [this](uint32_t expert) { return math::ceil_div(this->get_num_tokens(expert), kRowTokens); };
    }

    CUTLASS_DEVICE ::xstage::ScheduleWord schedule_word() const {
        return {*math::advance_ptr<uint32_t>(this->workspace.base, kScheduleWordOffset)};
    }

    CUTLASS_DEVICE void set_expert_idx(uint32_t expert) {
        Upstream::set_expert_idx(expert);
        schedule.start(blockIdx.x, schedule_word());
    }

    CUTLASS_DEVICE auto get_next_block() -> Block {
        const auto tile = schedule.next(rows(), kInstances);
        if (tile.phase == ::xstage::Phase::None) return Block(BlockPhase::None, 0u, 0u, 0u);
        // What the kernel reads of the tile beside the four values returned.
        this->current_local_expert_idx = tile.expert_idx;
        this->current_num_tokens = this->get_num_tokens(tile.expert_idx);
        this->current_pool_block_offset = tile.row_offset;
        this->m_block_idx = tile.m_block_idx;
        this->n_block_idx = tile.n_block_idx;
        const auto phase = tile.phase == ::xstage::Phase::Linear1 ? BlockPhase::Linear1 : BlockPhase::Linear2;
        return Block(phase, tile.expert_idx, tile.m_block_idx, tile.n_block_idx);
    }

    template <typename Visit>
    CUTLASS_DEVICE void for_each_block(Visit&& visit) {
        this->fetch_expert_recv_count();
        this->set_expert_idx(0u);
        for (auto block = get_next_block(); cute::get<0>(block) != BlockPhase::None; block = get_next_block()) {
            const uint32_t num_k_blocks = cute::get<0>(block) == BlockPhase::Linear2 ? kL2Ks : kL1Ks;
            visit(cute::get<0>(block), cute::get<1>(block), num_k_blocks, cute::get<2>(block), cute::get<3>(block));
        }
    }
};

// A complete list names the scheduler itself; a short one derives from it, so that a function that spells out every
// argument takes either.
template <uint32_t... kArgs>
struct BaseOf {
    using All = Completed<MegaMoEUpstreamScheduler<kArgs...>>;
    static constexpr bool kIsComplete = cute::is_same_v<typename All::template Apply<ArgList>, ArgList<kArgs...>>;
    template <bool kComplete, typename = void> struct Choose { using Type = OrderedScheduler<kArgs...>; };
    template <typename Dummy> struct Choose<false, Dummy> { using Type = typename All::template Apply<MegaMoEScheduler>; };
    using Type = typename Choose<kIsComplete>::Type;
};

}  // namespace xstage_detail

template <uint32_t... kArgs>
struct MegaMoEScheduler : xstage_detail::BaseOf<kArgs...>::Type {
    using Base = typename xstage_detail::BaseOf<kArgs...>::Type;
    using Base::Base;
};

}  // namespace deep_gemm::sched
