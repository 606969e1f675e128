// SPDX-License-Identifier: Apache-2.0
// The decode step of few sequences: every CTA has one item, and nothing hides how long its loads
// take. They go to registers, as few as can be after another.
//
// Of several tokens of a sequence each takes the state that the one before it left, by the
// operations of a step of its own and its replay: the bits are those of as many steps.
#pragma once

#include "gdn_decode_prepare.cuh"
#include "gdn_decode_tile.cuh"

namespace vllm_cuda::gdn_decode {

// Before a CTA writes what it shares with the others of its cluster, all have read it.
__device__ inline void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ inline void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// One item on its way through the only buffer.
template <bool SEVERAL>
struct SinglePreparation {
  using Own = Preparer<SEVERAL>;
  Own preparer;
  const Barriers& barriers;
  Buffer buffer;
  Header header;

  __device__ SinglePreparation(const GdnDecodeArgs& args, const Barriers& barriers_,
                               const Buffer& buffer_, int seq, int number)
      : preparer(args), barriers(barriers_), buffer(buffer_),
        header(look_up(args, seq, number)) {}

  // What no kernel ahead writes is fetched before they are complete.
  __device__ void make_vectors() {
    const GdnDecodeArgs& args = preparer.args;
    const int heads = header.number * args.heads;
    float A_log = 0, dt_bias = 0;
    preparer.each_gate([&](int, int, int head) {
      A_log = args.A_log[heads + head], dt_bias = args.dt_bias[heads + head];
    });
    uint2 inputs[Own::PARTS][4];
    preparer.each_part([&](int i, int part) {
      const int c = preparer.channel(part, header.number);
#pragma unroll
      for (int j = 0; j < 3; ++j) {
        inputs[i][j] = *reinterpret_cast<const uint2*>(preparer.past_input(header, j, c));
      }
    });
    if (args.sharing > 0) arrive_at_cluster();
    preparer.load_taps(header.number);
    wait_for_predecessors();
    float a = 0, b = 0;
    preparer.each_gate([&](int, int t, int head) {
      a = to_float(*preparer.gate_input(args.a, args.a_stride, header, t, head));
      b = to_float(*preparer.gate_input(args.b, args.b_stride, header, t, head));
    });
    preparer.each_part([&](int i, int part) {
      const int c = preparer.channel(part, header.number);
      if constexpr (SEVERAL) {
        for (int t = 0; t < preparer.tokens(); ++t) {
          copy_word<8>(preparer.waiting(buffer, t, part), preparer.new_input(header, t, c));
        }
      } else {
        inputs[i][3] = *reinterpret_cast<const uint2*>(preparer.new_input(header, 0, c));
      }
    });
    if constexpr (SEVERAL) {
      end_group();
      wait_groups<0>();
    }
    if (args.sharing > 0) wait_for_cluster();
    for (int t = 0; t < preparer.tokens(); ++t) {
      preparer.each_part([&](int i, int part) {
        if constexpr (SEVERAL) {
          preparer.convolve_next(part, header, t, preparer.taps[i], inputs[i], buffer);
        } else {
          preparer.convolve(part, header, 0, preparer.taps[i], inputs[i], buffer);
        }
      });
      if (t == 0) {
        preparer.each_gate([&](int, int of, int head) {
          preparer.make_gates(header, buffer, of, head, A_log, dt_bias, a, b);
        });
      }
      __syncwarp();
      if (preparer.lane == 0) arrive(barriers.vectors + t);
    }
  }
  __device__ void fetch_norm_gates() const {
    if (preparer.args.gate == nullptr) return;
    preparer.each_head([&](int i, int t, int head) {
      buffer.z[i * 32 + preparer.lane] =
          *reinterpret_cast<const uint2*>(preparer.norm_gate(header, t, head));
    });
  }

  __device__ void run() {
    if (preparer.lane == 0) buffer.headers[preparer.warp] = header;
    __syncwarp();
    if (preparer.warp == 0) preparer.announce(header, buffer, barriers.ring);
    if (header.index < 0) {
      wait_for_predecessors();
      return;
    }
    make_vectors();
    fetch_norm_gates();
    preparer.each_head([&](int, int t, int head) {
      preparer.finish(header, buffer, t, head, [&] { wait_parity(barriers.done + t, 0); });
    });
  }
};

template <typename State, int R, bool SEVERAL>
__device__ void consume_single(const GdnDecodeArgs& args, int seq, int number,
                               const Barriers& barriers, const Buffer& buffer, char* stages,
                               int count) {
  constexpr int ROWS = 4 * R, BYTES = ROWS * kHeadDim * sizeof(State);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (args.sharing > 0) arrive_at_cluster();
  const Tiles tiles(args.heads, warp, ROWS);
  uint64_t* full = barriers.tiles + warp * kMaxStages;
  char* own = stages + warp * count * BYTES;
  const int index = __ldg(args.indices + seq), passes = index < 0 ? 0 : tiles.passes;
  const auto fetch = [&](int pass) {
    if (pass >= passes) return;
    const int stage = pass % count;
    fetch_tile<State, ROWS>(args, index, number, tiles.row(pass), own + stage * BYTES,
                            full + stage);
  };
  for (int i = 0; i < count; ++i) fetch(i);
  const Consumer<State, R, SEVERAL> consumer{args, lane / 8, lane % 8};
  wait_parity(barriers.ring, 0);
  const Header header = *buffer.headers;
  Vectors vectors;
  for (int pass = 0; pass < passes; ++pass) {
    Tile<State, R> tile;
    wait_parity(full + pass % count, pass / count & 1);
    tile.load(own + pass % count * BYTES, consumer.group, consumer.member);
    __syncwarp();
    fetch(pass + count);
    consumer.replay(tile, buffer, header.pending, tiles.row(pass));
    consumer.steps(
        tile, buffer, vectors, header, tiles.row(pass), pass,
        [&](int t) { wait_parity(barriers.vectors + t, 0); },
        [&](int t) {
          if (pass + 1 < passes) return;
          __syncwarp();
          if (lane == 0) arrive(barriers.done + t);
        });
  }
}

// As many CTAs as items, of which those that share a key head are a cluster. SEVERAL: tokens of each
// sequence.
template <typename State, int R, bool SEVERAL>
__global__ void __launch_bounds__(kThreads, 1)
    gdn_decode_single_kernel(const __grid_constant__ GdnDecodeArgs args, int stages) {
  extern __shared__ __align__(128) char shared[];
  const Layout layout(args, 4 * R * kHeadDim * sizeof(State), stages);
  const Barriers barriers(shared);
  barriers.init();
  __syncthreads();
  launch_dependents();
  const int seq = blockIdx.x / args.items, number = blockIdx.x % args.items;
  const Buffer buffer(shared + layout.buffers, args);
  char* tiles = shared + layout.stages;
  if (threadIdx.x < 32 * kConsumers) {
    consume_single<State, R, SEVERAL>(args, seq, number, barriers, buffer, tiles, stages);
  } else {
    SinglePreparation<SEVERAL>(args, barriers, buffer, seq, number).run();
  }
}

}  // namespace vllm_cuda::gdn_decode
