// What the shadow of the SM100 scheduler uses of upstream, for g++: a pair of CTAs is a thread, its warp is one lane, and the
// counters are atomics that all threads share. Upstream's own walk is only noted. Ours, not upstream's text.

#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#define CUTLASS_DEVICE inline

namespace deep_gemm {

namespace math {
inline uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }
}

namespace ptx {
inline uint32_t get_lane_idx() { return 0; }
inline uint32_t get_sm_idx() { return 0; }
inline uint32_t exchange(uint32_t value, uint32_t) { return value; }
inline uint32_t ld_volatile(const uint32_t* address) {
    std::this_thread::yield();
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
}

namespace layout {
struct Workspace {
    uint32_t grid_sync_count[4] = {}, l1_tasks[2] = {}, l2_tasks[2] = {};
    template <uint32_t kIndex> uint32_t* get_grid_sync_count_ptr() const {
        return const_cast<uint32_t*>(grid_sync_count) + kIndex;
    }
    uint32_t* get_l1_task_count_ptr() const { return const_cast<uint32_t*>(l1_tasks); }
    uint32_t* get_l2_task_count_ptr() const { return const_cast<uint32_t*>(l2_tasks); }
};
}

namespace sched {

enum class BlockPhase : uint32_t { None = 0, Linear1 = 1, Linear2 = 2 };

struct StandInTask {
    BlockPhase block_phase = BlockPhase::None;
    uint32_t row = 0, n_cluster_idx = 0, shape_n = 0, shape_k = 0;
    bool is_valid() const { return block_phase != BlockPhase::None; }
};

struct StandInBarrier {
    void wait(uint32_t) const {}
};

template <uint32_t kRowTokens, uint32_t kTileN, uint32_t kTileK, uint32_t kL1N, uint32_t kL1K, uint32_t kL2N, uint32_t kL2K,
          uint32_t kExperts, uint32_t kSMs, uint32_t kRanks, uint32_t kRing, uint32_t kDomains, uint32_t kShared = 0>
struct MegaMoEScheduler {
    using task_info_t = StandInTask;
    static constexpr bool kHasShared = kShared > 0;

    const layout::Workspace& workspace;  // of the rank
    uint32_t num_rows_received;
    uint32_t num_total_m_blocks = 0, sm_locality_domain_idx = 0, sched_stage_idx = 0, sched_phase = 0;
    StandInBarrier task_info_empty_barriers[2];
    std::vector<StandInTask> published;
    bool is_upstreams_walk = false;

    MegaMoEScheduler(const layout::Workspace& workspace, uint32_t num_rows)
        : workspace(workspace), num_rows_received(num_rows) {}

    void fetch_expert_recv_count() { num_total_m_blocks = num_rows_received; }

    void mainloop(const uint32_t&, const uint8_t*) { is_upstreams_walk = true; }

    void publish_task(const StandInTask& task, uint32_t) { published.push_back(task); }

    StandInTask create_task(const BlockPhase& phase, const uint32_t& row, const uint32_t& n,
                            const uint32_t& shape_n, const uint32_t& shape_k) const {
        return {phase, row, n, shape_n, shape_k};
    }

    template <uint32_t kTasks>
    bool get_next_task_idx(uint32_t* counters, const uint32_t& num_rows, uint32_t& row, uint32_t& n) const {
        constexpr uint32_t kOwn = kTasks / kDomains;
        for (uint32_t turn = 0; turn < kDomains; ++ turn) {
            const uint32_t domain = sm_locality_domain_idx ^ turn;
            const uint32_t place = __atomic_fetch_add(counters + domain, 1, __ATOMIC_ACQ_REL);
            row = place / kOwn;
            n = domain * kOwn + place % kOwn;
            if (place < num_rows * kOwn) return true;
        }
        return false;
    }
};

}
}
