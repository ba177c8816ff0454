// Runs the shadow of the SM100 scheduler in one thread a pair of CTAs: arguments are the lead and the number of rows. Prints
// "upstream", or for every pair what it published.

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include <deep_gemm/scheduler/mega_moe.cuh>

constexpr uint32_t kPairs = 6, kRing = 40, kL1Tasks = 4, kL2Tasks = 16;

using namespace deep_gemm;
template <uint32_t kDomains, uint32_t kShared>
using Scheduler = sched::MegaMoEScheduler<128, 128, 128, kL1Tasks * 256, 256, kL2Tasks * 256, 512, 8, 2 * kPairs, 2, kRing,
                                          kDomains, kShared>;

template <uint32_t kDomains, uint32_t kShared = 0>
int walk(uint32_t lead, uint32_t num_rows) {
    layout::Workspace workspace;
    workspace.grid_sync_count[3] = lead;
    std::vector<Scheduler<kDomains, kShared>> schedulers(kPairs, {workspace, num_rows});
    std::vector<std::thread> threads;
    for (uint32_t pair = 0; pair < kPairs; ++ pair) {
        threads.emplace_back([&, pair] {
            const uint8_t domain = pair % 2;
            schedulers[pair].mainloop(0, &domain);
        });
    }
    for (auto& thread : threads) thread.join();
    if (schedulers[0].is_upstreams_walk) {
        std::puts("upstream");
        return 0;
    }
    for (uint32_t pair = 0; pair < kPairs; ++ pair) {
        for (const auto& task : schedulers[pair].published)
            std::printf("%u %u %u %u %u %u\n", pair, uint32_t(task.block_phase), task.row, task.n_cluster_idx, task.shape_n,
                        task.shape_k);
    }
    return 0;
}

int main(int, char** arguments) {
    const uint32_t kind = std::atoi(arguments[1]), lead = std::atoi(arguments[2]), num_rows = std::atoi(arguments[3]);
    return kind == 1 ? walk<1>(lead, num_rows) : kind == 2 ? walk<2>(lead, num_rows) : walk<2, 1>(lead, num_rows);
}
