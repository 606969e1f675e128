// SPDX-License-Identifier: Apache-2.0
// Who makes the factors of a chunk in a prefill of Kimi delta attention: warps beside those that
// scan it or, where many multiprocessors would have none of those CTAs, helpers, which hand them
// over in global memory. Bits do not depend on it.
#pragma once

#include "hopper/boxes.cuh"
#include "hopper/kda_prefill_factors.cuh"

namespace vllm_cuda {

namespace kda_prefill {

// Joins what the state decays by after the chunk before to what it does before this one: the scan
// reads and multiplies once, and only a half that decays. Either factor is one, a power of two, or
// multiplies where no state is ever stored (`Reference`), so bits do not depend on that. A warp
// does.
template <int GROUPS>
__device__ inline void join_decays(int chunk, const Turn& turn, Shared<GROUPS>& shared) {
  Scales& own = shared.scales[turn.stage];
  uint32_t halves = own.flags() & EITHER * BEFORE;
  if (chunk > 0) {
    const bool wraps = turn.stage == 0;
    const int stage = wraps ? STAGES - 1 : turn.stage - 1;
    const Scales& last = shared.scales[stage];
    wait_parity(&shared.made[stage], turn.phase ^ wraps);
    const uint32_t after = last.flags() & EITHER * AFTER;
    if (after) {
      float4* const to = reinterpret_cast<float4*>(own.before) + own_lane();
      const float4 by = reinterpret_cast<const float4*>(last.after)[own_lane()], x = *to;
      *to = {x.x * by.x, x.y * by.y, x.z * by.z, x.w * by.w};
      halves |= after / AFTER;
    }
  }
  if (own_lane() == 0) own.when[2] = halves | halves >> 7;
}

// Beside those that scan: every TEAMS-th chunk is a team's. The next one is fetched as soon as a
// stage is free.
template <int GROUPS>
__device__ inline void make(const Maps& maps, const KdaPrefillArgs& args, const Place& place,
                            int maker, Shared<GROUPS>& shared) {
  const Role role(maker);
  if (role.team >= place.chunks) return;
  const bool first = threadIdx.x % 32 == 0;
  const int end = place.first + place.length;
  // One thread does.
  const auto fetch = [&](int chunk, int to) {
    const int token = place.first + chunk * CHUNK;
    fetch_inputs(maps, place.head, token, shared.stages[to].factors, &shared.decays_fetched[to],
                 &shared.fetched[to], GROUPS * HALF_BYTES);
    load_tile(shared.stages[to].v, &maps.v, 0, token, place.part, &shared.fetched[to]);
  };
  Turn turn(role.team);
  // One after the other: the first is waited for.
  if (role.team > 0) wait_parity(&shared.fetched[role.team - 1], 0);
  if (first && role.part == 0) fetch(role.team, turn.stage);
  __nv_bfloat16 b = load_beta(args, place.head, place.first + role.team * CHUNK, end);
  for (int chunk = role.team; chunk < place.chunks; chunk += TEAMS) {
    Factors& factors = shared.stages[turn.stage].factors;
    const float beta = strength_of(b);
    b = load_beta(args, place.head, place.first + (chunk + TEAMS) * CHUNK, end);
    wait_parity(&shared.decays_fetched[turn.stage], turn.phase);
    const Arrival others{&shared.fetched[turn.stage], turn.phase};
    const int length = place.length - chunk * CHUNK;
    if (length < CHUNK) {
      others.wait();
      clear_rows(factors, length);
      role.sync_team();
    }
    make_chunk(role, args.scale, beta, chunk % 2, others,
               {shared.gates, shared.teams[role.team], factors, shared.scales[turn.stage]},
               [&] { join_decays(chunk, turn, shared); });
    __syncwarp();
    if (first) arrive(&shared.made[turn.stage]);
    turn.advance(TEAMS);
    if (role.part == 0 && chunk + TEAMS < place.chunks) {
      // A stage that nobody has used is free. All lanes wait: one by itself asks over and over.
      wait_parity(&shared.used[turn.stage], turn.phase ^ 1);
      if (first) fetch(chunk + TEAMS, turn.stage);
    }
    __syncwarp();
  }
}

// Where the factors of a sequence's chunk are handed over.
struct Slot {
  char* factors;
  int32_t* ready;  // not zero once they are there
  __device__ Slot(const KdaPrefillArgs& args, int seq, int chunk, int head) {
    const int64_t slot = int64_t{2 * args.chunk_offsets[seq] + chunk} * args.heads + head;
    factors = static_cast<char*>(args.handed) + slot * kHandedBytes;
    ready = args.ready + slot;
  }
};
// Whole sectors of memory: what is written in parts is read first.
static_assert(kHandedBytes >= sizeof(Factors) + sizeof(Scales) && kHandedBytes % 128 == 0);

// One thread of a CTA that scans: what helpers hand over, and values.
template <int GROUPS>
__device__ inline void receive(const Maps& maps, const KdaPrefillArgs& args, const Place& place,
                               Shared<GROUPS>& shared) {
  Turn turn(0);
  for (int chunk = 0; chunk < place.chunks; ++chunk, turn.advance(1)) {
    Stage& stage = shared.stages[turn.stage];
    uint64_t* const made = &shared.made[turn.stage];
    wait_parity(&shared.used[turn.stage], turn.phase ^ 1);
    arrive_expecting(made, sizeof(Factors) + sizeof(Scales) + GROUPS * HALF_BYTES);
    load_tile(stage.v, &maps.v, 0, place.first + chunk * CHUNK, place.part, made);
    const Slot slot(args, place.seq, chunk, place.head);
    int32_t ready;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
                   : "=r"(ready)
                   : "l"(slot.ready)
                   : "memory");
    } while (ready == 0);
    asm volatile("fence.proxy.async.global;" ::: "memory");
    bulk_copy(&stage.factors, slot.factors, sizeof(Factors), made);
    bulk_copy(&shared.scales[turn.stage], slot.factors + sizeof(Factors), sizeof(Scales), made);
  }
}

// A helper's warps are all in teams, with a place in shared memory each.
constexpr int HELPER_TEAMS = 6, HELPER_THREADS = HELPER_TEAMS * TEAM_THREADS;
struct HelperShared {
  Factors factors[HELPER_TEAMS];
  Scales scales[HELPER_TEAMS];
  Team teams[HELPER_TEAMS];
  HeadGates gates[HELPER_TEAMS];
  uint64_t decays_fetched[HELPER_TEAMS], fetched[HELPER_TEAMS];
};

// A chunk that a helper makes.
struct Item {
  int seq, chunk, head;
  int token, end;  // its first and its sequence's, in the batch
};

// The first of a team's items from the `at`-th on. Early chunks of all sequences come first.
__device__ inline bool find_item(const KdaPrefillArgs& args, int& at, Item& item) {
  const int count = args.most_chunks * args.sequences * args.heads;
  for (; at < count; at += gridDim.x * HELPER_TEAMS) {
    item.head = at % args.heads;
    item.seq = at / args.heads % args.sequences;
    item.chunk = at / args.heads / args.sequences;
    item.token = args.starts[item.seq] + item.chunk * CHUNK;
    item.end = args.starts[item.seq + 1];
    if (item.token < item.end && args.state_indices[item.seq] >= 0) return true;
  }
  return false;
}

// Grid (helpers).
__global__ void __launch_bounds__(HELPER_THREADS, 1)
    help(const __grid_constant__ Maps maps, const KdaPrefillArgs args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<HelperShared*>(memory);
  // CTAs that scan begin beside this one.
  launch_dependents();
  if (threadIdx.x < HELPER_TEAMS) {
    init_barrier(&shared.decays_fetched[threadIdx.x], 1);
    init_barrier(&shared.fetched[threadIdx.x], 1);
  }
  barriers_fence();
  __syncthreads();
  const Role role(__shfl_sync(~0u, threadIdx.x / 32, 0));
  clear_zeros(shared.factors[role.team], role.part);
  shared_fence();
  const int thread = threadIdx.x % TEAM_THREADS;
  const bool first = threadIdx.x % 32 == 0 && role.part == 0;
  Factors& factors = shared.factors[role.team];
  Scales& scales = shared.scales[role.team];
  HeadGates& gates = shared.gates[role.team];
  uint64_t* const decays = &shared.decays_fetched[role.team];
  uint64_t* const others = &shared.fetched[role.team];
  // One thread does.
  const auto fetch = [&](const Item& item) {
    fetch_inputs(maps, item.head, item.token, factors, decays, others, 0);
  };
  int at = blockIdx.x * HELPER_TEAMS + role.team;
  Item item;
  bool more = find_item(args, at, item);
  if (!more) return;
  if (first) fetch(item);
  __nv_bfloat16 b = load_beta(args, item.head, item.token, item.end);
  GateInputs inputs(args, item.head, thread);
  for (uint32_t phase = 0; more; phase ^= 1) {
    // While its inputs are under way, what the next one needs besides.
    const float beta = strength_of(b);
    inputs.publish(thread, gates);
    const Slot slot(args, item.seq, item.chunk, item.head);
    const int length = item.end - item.token;
    const bool odd = item.chunk % 2;
    at += gridDim.x * HELPER_TEAMS;
    more = find_item(args, at, item);
    if (more) {
      b = load_beta(args, item.head, item.token, item.end);
      inputs = GateInputs(args, item.head, thread);
    }
    wait_parity(decays, phase);
    if (length < CHUNK) {
      wait_parity(others, phase);
      clear_rows(factors, length);
    }
    role.sync_team();
    make_chunk(role, args.scale, beta, odd, {others, phase},
               {gates, shared.teams[role.team], factors, scales}, [] {});
    role.sync_team();
    if (first) {
      bulk_store(slot.factors, &factors, sizeof(Factors));
      bulk_store(slot.factors + sizeof(Factors), &scales, sizeof(Scales));
      commit_stores();
      wait_for_stores();
      if (more) fetch(item);
      wait_for_written_stores();
      asm volatile("fence.proxy.async.global;" ::: "memory");
      asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(slot.ready) : "memory");
    }
    __syncwarp();
  }
}

}  // namespace kda_prefill

}  // namespace vllm_cuda
