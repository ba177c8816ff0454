// Dispatch of MegaMoE with fewer bytes over the link and the waits of a token side by side.
//
// Upstream's warps pull one routed token after the other: its place, its scales, its weight and its data each cross the link
// or the L2 cache in turn, and the copy into the pool has to land before the row counts it. These latencies bound how fast
// rows reach Linear-1, and Combine stores on the same link lengthen each of them. Three changes, none of a result:
//
// - 32 tokens are located at once, a lane each, with their weights.
// - A token's data and scales start together, and its copy lands while the next token is on its way.
// - A token that this rank has pulled already, for another of its experts, is copied from the pool. Which tokens those are
//   stands in a table that lies in words of the workspace that no kernel for this architecture uses; a token that has not
//   landed yet, or has no place in the table, is pulled once more.

#pragma once

#include <deep_gemm/common/math.cuh>
#include <deep_gemm/ptx/ld_st.cuh>
#include <deep_gemm/ptx/tma.cuh>
#include <deep_gemm/ptx/utils.cuh>
#include <deep_gemm/xstage/source_order.hpp>

namespace xstage {

constexpr uint32_t kNone = 0xffffffff;

// Where in the pool the tokens of other ranks have landed in this launch. Nothing is kept in registers: Dispatch has 32.
template <typename Workspace>
struct LandedTokens {
    // Arrival words are sized for rows of 8 tokens; kernels for SM90 use rows of 64 at least, and leave those behind alone.
    static constexpr uint32_t kLeastRowTokens = 64;

    const Workspace& workspace;

    // The word of a token, nullptr where there are not enough.
    __device__ __forceinline__ uint64_t* word(const uint32_t token_key) const {
        const uint32_t word_idx = workspace.num_max_pool_tokens / kLeastRowTokens + token_key;
        return word_idx < workspace.num_max_pool_blocks ? workspace.get_l2_arrival_mask_ptr(word_idx) : nullptr;
    }

    // Upstream counts its barriers here, three a launch, and none while tokens are pulled: a word of another launch is none.
    __device__ __forceinline__ uint32_t launch() const { return *workspace.get_nvl_barrier_counter_ptr(); }

    __device__ __forceinline__ uint32_t find(const uint32_t token_key) const {
        const auto ptr = word(token_key);
        const uint64_t value = ptr == nullptr ? 0 : deep_gemm::ptx::ld_acq_gpu(ptr);
        return static_cast<uint32_t>(value >> 32) == launch() ? static_cast<uint32_t>(value) : kNone;
    }

    __device__ __forceinline__ void add(const uint32_t token_key, const uint32_t pool_token_idx) const {
        const auto ptr = word(token_key);
        if (ptr == nullptr) return;
        const uint64_t value = static_cast<uint64_t>(launch()) << 32 | pool_token_idx;
        asm volatile("st.release.gpu.global.b64 [%0], %1;" :: "l"(ptr), "l"(value) : "memory");
    }
};

// Pulls tokens first_token_idx, first_token_idx + num_warps, ... of all local experts into the pool. Called by a whole warp.
template <uint32_t BLOCK_M, uint32_t kHidden, uint32_t kNumTopk, uint32_t kNumRanks, uint32_t kNumExpertsPerRank,
          uint32_t kNumMaxTokensPerRank, uint32_t kNumPaddedSFPoolTokens, typename Scheduler, typename Workspace,
          typename SymBuffer, typename Buffer, typename Data, typename Barrier>
__device__ __forceinline__ void pull_tokens(
    const Scheduler& scheduler, const Workspace& workspace, const SymBuffer& sym_buffer,
    const Buffer& input_token_buffer, const Buffer& input_sf_buffer, const Buffer& input_topk_weights_buffer,
    const Buffer& l1_token_buffer, const Buffer& l1_sf_buffer, const Buffer& l1_topk_weights_buffer,
    const Data& staging, Barrier* staged, const uint32_t first_token_idx, const uint32_t num_warps) {
    using namespace deep_gemm;
    constexpr uint32_t kNumSFs = kHidden / 128;
    constexpr uint32_t kNumSFsPerLane = math::constexpr_ceil_div(kNumSFs, 32u);
    const uint32_t lane = ptx::get_lane_idx();
    const bool is_leader = lane == 0;
    const LandedTokens<Workspace> landed = {workspace};
    const auto pool_sfs = l1_sf_buffer.template get_base_ptr<float>();

    // The token whose copy into the pool is under way, and its key where others may copy it from there.
    uint32_t landing_row_idx = kNone, landing_key = kNone, phase = 0;
    const auto land = [&]() {
        if (is_leader and landing_row_idx != kNone) {
            asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
            if (landing_key != kNone) landed.add(landing_key, landing_row_idx);
            ptx::red_add_rel(workspace.get_l1_arrival_count_ptr(landing_row_idx / BLOCK_M), 1);
        }
        __syncwarp();
    };

    uint32_t expert_idx = 0, expert_start_idx = 0, expert_pool_block_idx = 0;
    for (uint32_t batch_token_idx = first_token_idx;; batch_token_idx += 32 * num_warps) {
        // Locate a token a lane: its expert, its row in the pool, and who has it.
        const uint32_t my_token_idx = batch_token_idx + lane * num_warps;
        uint32_t my_expert_idx = kNone, my_slot_idx = 0, my_row_idx = 0, my_key = 0;
        while (true) {
            const uint32_t num_tokens = scheduler.get_num_tokens(expert_idx);
            if (my_expert_idx == kNone and my_token_idx - expert_start_idx < num_tokens) {
                my_expert_idx = expert_idx;
                my_slot_idx = my_token_idx - expert_start_idx;
                my_row_idx = expert_pool_block_idx * BLOCK_M + my_slot_idx;
            }
            if (__all_sync(0xffffffff, my_expert_idx != kNone) or expert_idx + 1 == kNumExpertsPerRank) break;
            expert_start_idx += num_tokens;
            expert_pool_block_idx += math::ceil_div(num_tokens, BLOCK_M);
            ++ expert_idx;
        }
        const uint32_t num_located = __popc(__ballot_sync(0xffffffff, my_expert_idx != kNone));
        if (my_expert_idx != kNone) {
            const auto source = find_source<kNumRanks>([&](const uint32_t rank_idx) {
                return static_cast<uint32_t>(*workspace.get_expert_recv_count_ptr(rank_idx, my_expert_idx));
            }, my_slot_idx);
            const uint32_t src_idx = *workspace.get_src_token_topk_idx_ptr(my_expert_idx, source.rank_idx, source.token_idx);
            *workspace.get_token_src_metadata_ptr(my_row_idx) = {source.rank_idx, src_idx / kNumTopk, src_idx % kNumTopk};
            *l1_topk_weights_buffer.get_data_buffer(my_row_idx).template get_base_ptr<float>() =
                *sym_buffer.map(input_topk_weights_buffer.template get_base_ptr<float>() + src_idx, source.rank_idx);
            my_key = source.rank_idx * kNumMaxTokensPerRank + src_idx / kNumTopk;
        }
        uint32_t my_copy_idx = lane == 0 and num_located > 0 ? landed.find(my_key) : kNone;
        __syncwarp();

        for (uint32_t i = 0; i < num_located; ++ i) {
            const uint32_t row_idx = __shfl_sync(0xffffffff, my_row_idx, i);
            const uint32_t key = __shfl_sync(0xffffffff, my_key, i);
            const uint32_t copy_idx = __shfl_sync(0xffffffff, my_copy_idx, i);
            const uint32_t rank_idx = key / kNumMaxTokensPerRank, src_token_idx = key % kNumMaxTokensPerRank;
            if (is_leader) {
                // The copy before has left the buffer, if it has not landed yet.
                asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
                // What another CTA copied there must be seen by the load, which goes another way than the word that said so.
                if (copy_idx != kNone) asm volatile("fence.proxy.async.global;" ::: "memory");
                ptx::mbarrier_arrive_and_set_tx(staged, kHidden);
                const auto src = copy_idx != kNone
                    ? l1_token_buffer.get_data_buffer(copy_idx).get_base_ptr()
                    : sym_buffer.map(input_token_buffer.get_data_buffer(src_token_idx).get_base_ptr(), rank_idx);
                ptx::tma_load_1d(staging.get_base_ptr(), src, staged, kHidden);
            }
            __syncwarp();
            float sfs[kNumSFsPerLane];
            const auto src_sfs = copy_idx != kNone ? pool_sfs + copy_idx : sym_buffer.map(
                input_sf_buffer.get_data_buffer(src_token_idx).template get_base_ptr<float>(), rank_idx);
            const uint32_t sf_stride = copy_idx != kNone ? kNumPaddedSFPoolTokens : 1;
            #pragma unroll
            for (uint32_t j = lane, k = 0; k < kNumSFsPerLane; j += 32, ++ k)
                if (j < kNumSFs) sfs[k] = __ldcg(src_sfs + j * sf_stride);

            land();
            if (lane == i + 1 and lane < num_located) my_copy_idx = landed.find(my_key);

            #pragma unroll
            for (uint32_t j = lane, k = 0; k < kNumSFsPerLane; j += 32, ++ k)
                if (j < kNumSFs) pool_sfs[j * kNumPaddedSFPoolTokens + row_idx] = sfs[k];
            if (is_leader) {
                ptx::mbarrier_wait_and_flip_phase(staged, phase);
                ptx::tma_store_1d(l1_token_buffer.get_data_buffer(row_idx).get_base_ptr(), staging.get_base_ptr(), kHidden);
                asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            }
            __syncwarp();
            landing_row_idx = row_idx;
            // Own tokens are as near as their copies.
            landing_key = copy_idx != kNone or rank_idx == sym_buffer.rank_idx ? kNone : key;
        }
        if (num_located < 32) break;
    }
    land();
}

}  // namespace xstage
