// Burst-Gap probe: what a kernel sees of its own remote stores. Section 3.1 of the paper.
//
// Counting. A producer is one CTA; the grid is K producers. A burst is the burst_bytes that one producer writes, in 16-byte
// words; V = K * burst_bytes. Issue runs from a block barrier before the first store to the block barrier after the last
// store instruction of every thread (bulk copies: after the staging may be reused), on the SM's clock64. A period runs from
// burst start to burst start. A gap runs from issue end to the next burst start and holds no remote store; book-keeping lies
// in it. Rates: a producer's bursts that began inside the window, over the %globaltimer between the first and the last
// start. The window is a time, not a number of bursts: a saturated link serves producers unequally, and a run that counts
// bursts ends with a tail of slow ones. All producers go on storing after the window, for cooldown_ns, for the same reason.
//
// STORE_KIND 0: one st.global of 16 bytes per word, spread over the threads. 1: cp.async.bulk out of shared memory, by one
// thread. No headers: compiled by NVRTC at run time (or nvcc), free of torch.

#ifndef STORE_KIND
#error "define STORE_KIND: 0 = 16-byte st.global, 1 = bulk copy out of shared memory"
#endif

using u32 = unsigned int;
using u64 = unsigned long long;

// ------------------------------------------------------------------------------------------------------------ config

constexpr u32 kNumMaxDestinations = 8;
constexpr u32 kNumMaxThreads = 512;  // 1024 would leave 64 registers a thread, which spills on sm_100
constexpr u32 kWordBytes = 16;
constexpr u32 kMagic = 0x58535447;   // "XSTG"
constexpr u32 kPoison = 0xDEADBEEF;
constexpr u64 kLeadNs = 5000;        // announced start of a common moment; longer than a poll of L2 takes everywhere
// A bulk burst carries its index in every 32nd word only: restamping all of the staging would need as long as the burst.
constexpr u32 kStampStride = STORE_KIND == 0 ? 1 : 32;

enum StuckAt : u32 { kNotStuck = 0, kStuckAtLatch = 1, kStuckAtMeeting = 2 };

// --------------------------------------------------------------------------------------------------------- arguments
// Each struct is mirrored in probe.py; 8-byte members first, so that neither side pads.

struct State {  // in the source GPU's memory, zero at launch
    u64 num_arrived;      // producers that came to a meeting, over all meetings
    u64 start_ns;         // the moment at which they leave the latest one
    u64 seen, expected;   // of the first producer that got stuck
    u32 stuck_at, stuck_producer;
};

struct ProducerRecord {
    u64 first_ns, last_ns;          // %globaltimer at the first and the last burst start inside the window
    u64 first_clock, last_clock;    // clock64 at the same moments
    u32 first_burst, last_burst;    // their burst indices
    u32 num_bursts, num_samples;    // bursts of the whole launch; samples written (the ring keeps the last ones)
};

struct Sample {
    u32 issue_cycles, period_cycles;  // the period is the one that ended with this burst's start
};

struct Args {
    u64 base[kNumMaxDestinations];  // producer p writes to base[p % num_destinations], region p / num_destinations
    State* state;
    ProducerRecord* records;        // [num_producers]
    Sample* samples;                // [num_producers][num_samples]
    const volatile u32* latch;      // host word that holds the launch until it is not 0; null: do not wait
    u64 window_start_ns, window_ns, cooldown_ns;  // from the common start
    u64 gap_ns, clock_khz;          // clock_khz only turns gap_ns into cycles; the achieved gap is measured
    u64 bound_ns;                   // from kernel entry: no wait lasts longer
    u32 burst_bytes, num_slots, num_destinations, num_samples;
    u32 isolated, num_bursts, chunk_bytes, rank;  // num_bursts: of isolated mode; rank: for messages
};

struct Mismatch {  // in the verifying GPU's memory, zero at launch
    u64 num_mismatches;
    u32 region, slot, word, unused;  // of the first one found, and what stood there
    u32 got[4], expected[4];
};

static_assert(sizeof(State) == 40 && sizeof(ProducerRecord) == 48 && sizeof(Sample) == 8);
static_assert(sizeof(Args) == 176 && sizeof(Mismatch) == 56);

// -------------------------------------------------------------------------------------------------------- primitives

__device__ __forceinline__ u64 globaltimer() {
    u64 ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns) :: "memory");
    return ns;
}

__device__ __forceinline__ u64 sm_clock() {
    u64 cycles;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles) :: "memory");
    return cycles;
}

template <typename T>
__device__ __forceinline__ T load_fresh(const T* word) { return *static_cast<const volatile T*>(word); }

__device__ __noinline__ void report_stuck(State* state, u32 at, u32 rank, u64 seen, u64 expected) {
    if (atomicCAS(&state->stuck_at, static_cast<u32>(kNotStuck), at) != kNotStuck) return;  // one voice is enough
    state->stuck_producer = blockIdx.x;
    state->seen = seen;
    state->expected = expected;
    printf("xstage_burst_gap: rank %u, producer %u of %u: gave up waiting for %s; saw %llu, expected %llu\n", rank, blockIdx.x,
           gridDim.x, at == kStuckAtLatch ? "the host's latch" : "the other producers", seen, expected);
}

// One thread of one producer: waits for the host, which opens the latch once every GPU has its launch. False when stuck.
__device__ bool wait_for_latch(const Args& args, u64 deadline_ns) {
    while (args.latch != nullptr && *args.latch == 0) {
        if (globaltimer() > deadline_ns) {
            report_stuck(args.state, kStuckAtLatch, args.rank, 0, 1);
            return false;
        }
    }
    return true;
}

// One thread of each producer: all arrive, then all leave at one moment, which the last to arrive puts kLeadNs ahead: leaving
// whenever a poll sees the counter would spread the starts by a trip to L2, as long as a small burst's issue.
// `num_expected` and `start_ns` carry over from meeting to meeting. False when stuck, here or anywhere.
__device__ bool meet(const Args& args, u64 deadline_ns, u64& num_expected, u64& start_ns) {
    State* state = args.state;
    num_expected += gridDim.x;
    if (atomicAdd(&state->num_arrived, 1ull) + 1 == num_expected) atomicExch(&state->start_ns, globaltimer() + kLeadNs);
    u64 next_ns;
    while ((next_ns = load_fresh(&state->start_ns)) == start_ns) {
        if (load_fresh(&state->stuck_at) != kNotStuck) return false;
        if (globaltimer() > deadline_ns) {
            report_stuck(state, kStuckAtMeeting, args.rank, load_fresh(&state->num_arrived), num_expected);
            return false;
        }
    }
    start_ns = next_ns;
    while (globaltimer() < start_ns) {}  // at most kLeadNs
    return true;
}

extern __shared__ __align__(128) unsigned char staging[];  // bulk: one burst; else it only keeps a second CTA off the SM

// Outside the timed issue: fills the staging once, then writes the burst index into it before each burst.
__device__ __forceinline__ void stage_burst(u32 producer, u32 burst, u32 num_words) {
#if STORE_KIND == 1
    uint4* words = reinterpret_cast<uint4*>(staging);
    if (burst == 0)
        for (u32 word = threadIdx.x; word < num_words; word += blockDim.x) words[word] = make_uint4(producer, word, 0, kMagic);
    else
        for (u32 word = threadIdx.x * kStampStride; word < num_words; word += blockDim.x * kStampStride) words[word].z = burst;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // each writer, before the barrier that leads to the copy
#endif
}

__device__ __forceinline__ void store_word(unsigned char* destination, u32 producer, u32 burst, u32 word) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(destination + static_cast<u64>(word) * kWordBytes), "r"(producer), "r"(word), "r"(burst), "r"(kMagic)
                 : "memory");
}

__device__ __forceinline__ void store_burst(unsigned char* destination, u32 producer, u32 burst, u32 num_words,
                                            u32 chunk_bytes) {
#if STORE_KIND == 0
    // Four at a time, without a test between them: each has its own registers, so none waits for another to have read them.
    const u32 step = blockDim.x;
    u32 word = threadIdx.x;
    #pragma unroll 1
    for (; word + 3 * step < num_words; word += 4 * step) {
        #pragma unroll
        for (u32 i = 0; i < 4; ++i) store_word(destination, producer, burst, word + i * step);
    }
    #pragma unroll 1
    for (; word < num_words; word += step) store_word(destination, producer, burst, word);
#else
    if (threadIdx.x == 0) {
        const u32 source = static_cast<u32>(__cvta_generic_to_shared(staging));
        const u32 burst_bytes = num_words * kWordBytes;
        for (u32 offset = 0; offset < burst_bytes; offset += chunk_bytes) {
            const u32 size = min(chunk_bytes, burst_bytes - offset);
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                         :: "l"(destination + offset), "r"(source + offset), "r"(size) : "memory");
        }
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // staging reusable: here the sender's issue ends
    }
#endif
}

// ----------------------------------------------------------------------------------------------------------- kernels

// Grid: K producers <= SMs, one CTA an SM (dynamic shared memory above half of the SM's): all are resident, so they can meet.
extern "C" __global__ void __launch_bounds__(kNumMaxThreads, 1) xstage_burst_gap(const __grid_constant__ Args args) {
    const u32 producer = blockIdx.x;
    const bool leader = threadIdx.x == 0;
    const u32 num_words = args.burst_bytes / kWordBytes;
    unsigned char* region = reinterpret_cast<unsigned char*>(args.base[producer % args.num_destinations]) +
                            static_cast<u64>(producer / args.num_destinations) * args.num_slots * args.burst_bytes;
    const u64 gap_cycles = args.gap_ns * args.clock_khz / 1000000;
    const u64 deadline_ns = globaltimer() + args.bound_ns;

    u64 num_expected = 0, start_ns = 0;
    bool go = true;
    if (leader) {
        // Half of the bound, so that its message comes before those of the producers that wait for this one.
        if (producer == 0) go = wait_for_latch(args, deadline_ns - args.bound_ns / 2);
        go = go && meet(args, deadline_ns, num_expected, start_ns);
    }
    const u64 open_ns = start_ns + args.window_start_ns;
    const u64 close_ns = open_ns + args.window_ns;
    const u64 stop_ns = close_ns + args.cooldown_ns;

    ProducerRecord record = {};
    Sample* samples = args.samples + static_cast<u64>(producer) * args.num_samples;
    unsigned char* destination = region;  // the slot of the next burst
    u32 burst = 0, slot = 0, ring = 0;
    u64 begin = 0, end = sm_clock();
    for (;; ++burst) {
        stage_burst(producer, burst, num_words);
        bool measured = false;
        if (leader) {
            while (sm_clock() - end < gap_cycles) {}
            if (args.isolated) go = go && burst < args.num_bursts && meet(args, deadline_ns, num_expected, start_ns);
            const u64 now_ns = args.isolated ? start_ns : globaltimer();
            if (!args.isolated) go = go && now_ns < stop_ns;
            if (go && (args.isolated || (now_ns >= open_ns && now_ns < close_ns))) {
                record.last_ns = now_ns;
                record.last_clock = sm_clock();
                record.last_burst = burst;
                measured = args.isolated || record.first_ns != 0;  // the first one's period began before the window
                if (record.first_ns == 0) {
                    record.first_ns = now_ns;
                    record.first_clock = record.last_clock;
                    record.first_burst = burst;
                }
            }
        }
        if (!__syncthreads_or(leader && go)) break;

        const u64 previous = begin;
        begin = sm_clock();
        store_burst(destination, producer, burst, num_words, args.chunk_bytes);
        __syncthreads();
        end = sm_clock();

        if (measured) {  // the leader, and in the gap
            samples[ring] = {static_cast<u32>(end - begin), static_cast<u32>(begin - previous)};
            ring = ring + 1 == args.num_samples ? 0 : ring + 1;
            ++record.num_samples;
        }
        slot = slot + 1 == args.num_slots ? 0 : slot + 1;
        destination = slot == 0 ? region : destination + args.burst_bytes;
    }
#if STORE_KIND == 1
    if (leader) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // complete, before the kernel's end says so
#endif
    if (leader) {
        record.num_bursts = burst;
        args.records[producer] = record;
    }
}

// Fills num_words 16-byte words at `region` before a checked run.
extern "C" __global__ void xstage_poison(uint4* region, u64 num_words) {
    const u64 stride = static_cast<u64>(gridDim.x) * blockDim.x;
    for (u64 index = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; index < num_words; index += stride)
        region[index] = make_uint4(kPoison, kPoison, kPoison, kPoison);
}

// Checks every word of num_regions regions, written by producers first_producer, first_producer + producer_step, ... with
// num_bursts[region] bursts each: a slot holds its latest burst, or the poison if no burst came to it.
extern "C" __global__ void xstage_verify(const uint4* region_words, const u32* num_bursts, Mismatch* mismatch, u32 num_regions,
                                         u32 first_producer, u32 producer_step, u32 num_words, u32 num_slots) {
    const u64 num_total = static_cast<u64>(num_regions) * num_slots * num_words;
    const u64 stride = static_cast<u64>(gridDim.x) * blockDim.x;
    for (u64 index = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; index < num_total; index += stride) {
        const u32 word = static_cast<u32>(index % num_words);
        const u32 slot = static_cast<u32>(index / num_words % num_slots);
        const u32 region = static_cast<u32>(index / num_words / num_slots);
        const u32 done = num_bursts[region];
        uint4 expected = make_uint4(kPoison, kPoison, kPoison, kPoison);
        if (done > slot) {
            const u32 burst = slot + (done - 1 - slot) / num_slots * num_slots;
            expected = make_uint4(first_producer + region * producer_step, word, word % kStampStride == 0 ? burst : 0, kMagic);
        }
        const uint4 got = region_words[index];
        if (got.x == expected.x && got.y == expected.y && got.z == expected.z && got.w == expected.w) continue;
        if (atomicAdd(&mismatch->num_mismatches, 1ull) != 0) continue;
        mismatch->region = region;
        mismatch->slot = slot;
        mismatch->word = word;
        mismatch->got[0] = got.x, mismatch->got[1] = got.y, mismatch->got[2] = got.z, mismatch->got[3] = got.w;
        mismatch->expected[0] = expected.x, mismatch->expected[1] = expected.y;
        mismatch->expected[2] = expected.z, mismatch->expected[3] = expected.w;
    }
}
