// Stands in for the scheduler of MegaMoE on SM100, which hands out tasks by global counters: the same name and interface, with
// the turns of Linear-1 and Linear-2 chosen at run time.
//
// Upstream's header is included under another name and its struct under another type. The schedule is read from a counter for
// grid synchronisation that no kernel uses: upstream has four and takes the first three. The symmetric buffer is zeroed when
// it is made, and at 0 upstream's own code runs, so nobody who does not ask for another order gets one.

#pragma once

#define MegaMoEScheduler MegaMoEUpstreamScheduler
#include <deep_gemm/scheduler/mega_moe.upstream.cuh>
#undef MegaMoEScheduler

#include <deep_gemm/xstage/moe_schedule.hpp>
#include <deep_gemm/xstage/moe_task_schedule.hpp>

namespace deep_gemm::sched {

namespace xstage_detail {

constexpr uint32_t kScheduleWordIndex = 3;

template <typename WorkspaceT>
CUTLASS_DEVICE uint32_t lead_rows(const WorkspaceT& workspace) {
    return ::xstage::ScheduleWord{*workspace.template get_grid_sync_count_ptr<kScheduleWordIndex>()}.lead();
}

}  // namespace xstage_detail

// kArgs are upstream's template arguments in upstream's order; a kernel names them up to the ring and the domains, or further.
template <uint32_t... kArgs>
struct MegaMoEScheduler : MegaMoEUpstreamScheduler<kArgs...> {
    using Upstream = MegaMoEUpstreamScheduler<kArgs...>;
    using Task = typename Upstream::task_info_t;
    using Upstream::Upstream;

    // One argument by its place, at compile time.
    static constexpr uint32_t at(uint32_t place) {
        const uint32_t all[] = {kArgs...};
        return all[place];
    }
    static constexpr uint32_t kPairTileN = at(1) * 2;
    static constexpr uint32_t kL1N = at(3), kL1K = at(4), kL2N = at(5), kL2K = at(6);
    static constexpr uint32_t kNumPairs = at(8) / 2, kNumRingRows = at(10), kNumDomains = at(11);
    static constexpr uint32_t kNumL1Tasks = kL1N / kPairTileN, kNumL2Tasks = kL2N / kPairTileN;
    using Turns = ::xstage::MoeTaskTurns<kNumL1Tasks, kNumL2Tasks>;

    // Shared experts have tasks of their own before and behind the routed ones: with them upstream's order stays.
    CUTLASS_DEVICE void mainloop(const uint32_t& num_tokens, const uint8_t* domain_of_sm) {
        if constexpr (not Upstream::kHasShared) {
            if (const uint32_t lead = xstage_detail::lead_rows(this->workspace); lead > 0) {
                this->fetch_expert_recv_count();
                const uint32_t num_waves = ::xstage::num_warmup_waves(
                    lead, this->num_total_m_blocks, kNumRingRows, kNumPairs, kNumL1Tasks, kNumL2Tasks);
                if (num_waves > 0) return publish_in_turns(num_waves, domain_of_sm);
            }
        }
        Upstream::mainloop(num_tokens, domain_of_sm);
    }

private:
    CUTLASS_DEVICE void publish_in_turns(uint32_t num_waves, const uint8_t* domain_of_sm) {
        if constexpr (kNumDomains > 1) this->sm_locality_domain_idx = domain_of_sm[ptx::get_sm_idx()];
        Turns turns;
        turns.start(num_waves);
        for (bool is_last = false; not is_last;) {
            // A task is taken only with a slot free for it: one that is taken and not published would block its whole row.
            this->task_info_empty_barriers[this->sched_stage_idx].wait(this->sched_phase ^ 1);
            const Task task = take_task(turns);
            is_last = not task.is_valid();
            this->publish_task(task, ptx::get_lane_idx());
        }
    }

    // An invalid task when both phases are exhausted.
    CUTLASS_DEVICE Task take_task(Turns& turns) {
        const auto l1_count = this->workspace.get_l1_task_count_ptr(), l2_count = this->workspace.get_l2_task_count_ptr();
        const uint32_t num_rows = this->num_total_m_blocks;
        for (auto phase = turns.next(); phase != ::xstage::Phase::None; phase = turns.next()) {
            const bool is_l1 = phase == ::xstage::Phase::Linear1;
            uint32_t row, n_cluster_idx;
            if (is_l1 ? this->template get_next_task_idx<kNumL1Tasks>(l1_count, num_rows, row, n_cluster_idx)
                      : this->template get_next_task_idx<kNumL2Tasks>(l2_count, num_rows, row, n_cluster_idx)) {
                turns.take(phase);
                const auto block_phase = is_l1 ? BlockPhase::Linear1 : BlockPhase::Linear2;
                const uint32_t shape_n = is_l1 ? uint32_t(kL1N) : uint32_t(kL2N);  // values: they go on by reference
                const uint32_t shape_k = is_l1 ? uint32_t(kL1K) : uint32_t(kL2K);
                const auto task = this->create_task(block_phase, row, n_cluster_idx, shape_n, shape_k);
                if (not is_l1) wait_for_row(l1_count, row);
                return task;
            }
            turns.exhaust(phase);
        }
        return Task();
    }

    // Until every Linear-1 task of the row is taken, in each domain.
    CUTLASS_DEVICE void wait_for_row(const uint32_t* l1_count, uint32_t row) const {
        const uint32_t num_tasks = (row + 1) * (kNumL1Tasks / kNumDomains);
        for (uint32_t domain = 0; domain < kNumDomains; ++ domain) {
            while (ptx::ld_volatile(l1_count + domain) < num_tasks);
        }
    }
};

}  // namespace deep_gemm::sched
