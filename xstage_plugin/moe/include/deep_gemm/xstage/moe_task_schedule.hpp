// Whose turn it is, Linear-1 or Linear-2, where CTA pairs take tasks one by one from a shared counter of each phase.
//
// A row has kNumL1Tasks tasks of Linear-1 and kNumL2Tasks of Linear-2, counted in row order. Each pair decides by what it took
// itself: it first takes `num_waves` tasks of Linear-1 and then as many of either as keep both phases at the same pace in rows.
// Linear-1 thus stays num_waves * pairs / kNumL1Tasks rows ahead, however many tasks a row has in either phase, and no phase
// runs out long before the other.
//
// A pair that took a Linear-2 task holds it back until all Linear-1 tasks of its row are taken. Were all pairs held back, the
// one at the lowest row r would lack a Linear-1 task of row r; but together they took num_waves * pairs + r * kNumL1Tasks of
// them at least, which is all of row r once the waves hold a row. The counters may be split into two halves of each row, each
// served by at least a third of the pairs, which help with the other half when theirs is done. Then the waves must hold half a
// row for the third that serves it, and what the pairs of the other half may have taken in place of the own ones: as much
// Linear-1 as stands against the one Linear-2 that each holds back, kNumL1Tasks / kNumL2Tasks waves.

#pragma once

#include <cstdint>

#include <deep_gemm/xstage/moe_schedule.hpp>

namespace xstage {

// Waves of Linear-1 (one task for each pair) before the first Linear-2, for a lead in rows: at least what rules out a deadlock.
// 0 where a lead cannot be honoured and the kernel keeps its own order: without a lead; where the rows of this call do not
// all fit into the ring, since a row would then wait for the one that had its place; and with less than two waves of tasks
// in a phase, where the halves of the counters do not help each other.
XSTAGE_HOST_DEVICE constexpr uint32_t num_warmup_waves(uint32_t lead_rows, uint32_t num_rows, uint32_t num_ring_rows,
                                                       uint32_t num_pairs, uint32_t num_l1_tasks, uint32_t num_l2_tasks) {
    const uint32_t num_fewer_tasks = num_l1_tasks < num_l2_tasks ? num_l1_tasks : num_l2_tasks;
    if (lead_rows == 0 or num_rows > num_ring_rows or num_rows * num_fewer_tasks < 2 * num_pairs) return 0;
    const uint32_t num_wanted = (lead_rows * num_l1_tasks - 1) / num_pairs + 1;
    const uint32_t num_for_a_row = (3 * num_l1_tasks - 1) / (2 * num_pairs) + 1;
    const uint32_t num_needed = num_for_a_row + (num_l1_tasks - 1) / num_l2_tasks + 1;
    return num_wanted > num_needed ? num_wanted : num_needed;
}

template <uint32_t kNumL1Tasks, uint32_t kNumL2Tasks>
struct MoeTaskTurns {
    int32_t credit = 0;  // rows that Linear-1 is ahead beyond its lead, times the tasks of a row in both phases
    bool has_l1 = true;
    bool has_l2 = true;

    XSTAGE_HOST_DEVICE void start(uint32_t num_waves) {
        credit = -static_cast<int32_t>(num_waves * kNumL2Tasks);
        has_l1 = has_l2 = true;
    }

    // Phase::None: both are exhausted.
    XSTAGE_HOST_DEVICE Phase next() const {
        if (has_l1 and (credit < 0 or not has_l2)) return Phase::Linear1;
        return has_l2 ? Phase::Linear2 : Phase::None;
    }

    XSTAGE_HOST_DEVICE void take(Phase phase) {
        credit += phase == Phase::Linear1 ? static_cast<int32_t>(kNumL2Tasks) : -static_cast<int32_t>(kNumL1Tasks);
    }

    XSTAGE_HOST_DEVICE void exhaust(Phase phase) { (phase == Phase::Linear1 ? has_l1 : has_l2) = false; }
};

}  // namespace xstage
