// Runs the shadow of the SM90 scheduler: arguments are the lead, the capacity of a table and the tokens of each expert. Prints
// "upstream", or for every CTA, in the order of the visits, what the visitor and the table saw.

#include <cstdio>
#include <cstdlib>
#include <vector>

#include <deep_gemm/scheduler/sm90_mega_moe.cuh>

constexpr uint32_t kExperts = 3, kCTAs = 6, kRowTokens = 128, kL1Tiles = 4, kL2Tiles = 6;

using namespace deep_gemm;
template <uint32_t kLag>
using Scheduler = sched::SM90MegaMoEScheduler<kRowTokens, 256, 128, 1024, 256, 1536, 512, kExperts, kExperts, kCTAs, 2, true, 1,
                                              kL1Tiles, kL2Tiles, 2, 4, layout::Workspace, kLag, 64, 8192, 2>;

template <uint32_t kLag>
int walk(uint32_t lead, uint32_t capacity, const uint32_t* tokens) {
    layout::Workspace workspace;
    workspace.grid_sync_count[3] = lead;
    uint32_t counter = 0;
    // Pairs take their tickets one after the other: the first ones fill their tables, the last one takes what is left.
    for (uint32_t pair = 0; pair < kCTAs / 2; ++ pair) {
        std::vector<sched::StandInEntry> tables(2 * capacity, {0xffffffff, 0});
        for (uint32_t cta = 0; cta < 2; ++ cta) {
            blockIdx.x = 2 * pair + cta;
            Scheduler<kLag> scheduler(workspace, tokens, capacity);
            auto* table = tables.data() + cta * capacity;
            uint32_t place = 0;
            const auto visit = [&](sched::BlockPhase phase, uint32_t expert, uint32_t num_ks, uint32_t m, uint32_t n) {
                if (place + 1 >= capacity) std::exit(3);
                std::printf("%u %u %u %u %u %u %u %u %u %u\n", blockIdx.x, place, uint32_t(phase), expert,
                            scheduler.current_pool_block_offset, scheduler.current_num_tokens, m, n, num_ks,
                            uint32_t(scheduler.current_pair_valid));
                if (table[place].word >> 30 != uint32_t(phase)) std::exit(4);
                const bool is_paired = scheduler.current_pair_valid;
                const uint32_t word = scheduler.make_compact_tag_word(expert, m, n, is_paired, uint32_t(phase));
                if (table[place].word != word) std::exit(5);
                ++ place;
            };
            scheduler.template for_each_block_publish_dynamic_tail<2>(table, &counter, cta, capacity, visit);
            if (scheduler.is_upstreams_walk) {
                std::puts("upstream");
                return 0;
            }
            if (table[place].word >> 30 != 0) return 6;  // the end marker
        }
    }
    return 0;
}

int main(int, char** arguments) {
    const uint32_t lag = std::atoi(arguments[1]), lead = std::atoi(arguments[2]), capacity = std::atoi(arguments[3]);
    uint32_t tokens[kExperts];
    for (uint32_t expert = 0; expert < kExperts; ++ expert) tokens[expert] = std::atoi(arguments[4 + expert]);
    return lag > 0 ? walk<2003>(lead, capacity, tokens) : walk<0>(lead, capacity, tokens);
}
