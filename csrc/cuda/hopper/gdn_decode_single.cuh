// SPDX-License-Identifier: Apache-2.0
// The decode step of few sequences: every CTA has one item, and nothing hides how long its loads
// take. They go to registers, as few as can be after another.
#pragma once

#include "gdn_decode_prepare.cuh"
#include "gdn_decode_tile.cuh"

namespace vllm_cuda::gdn_decode {

// One item on its way through the only buffer.
struct SinglePreparation {
  Preparer preparer;
  const Barriers& barriers;
  Buffer buffer;
  Header header;

  __device__ SinglePreparation(const GdnDecodeArgs& args, const Barriers& barriers_,
                               const Buffer& buffer_, int seq, int key_head)
      : preparer(args), barriers(barriers_), buffer(buffer_),
        header(look_up(args, seq, key_head)) {}

  // What no kernel ahead writes is fetched before they are complete.
  __device__ void make_vectors() {
    const GdnDecodeArgs& args = preparer.args;
    const int lane = preparer.lane, head = header.key_head * args.group + lane;
    const bool gating = preparer.gating() && lane < args.group;
    float A_log = 0, dt_bias = 0;
    if (gating) A_log = args.A_log[head], dt_bias = args.dt_bias[head];
    uint2 inputs[Preparer::PARTS][4];
    preparer.each_part([&](int i, int part) {
      const auto* rows = preparer.conv_rows(header.index, preparer.channel(part, header.key_head));
#pragma unroll
      for (int j = 0; j < 3; ++j) {
        inputs[i][j] = *reinterpret_cast<const uint2*>(rows + j * preparer.channels());
      }
    });
    preparer.load_taps(header.key_head);
    wait_for_predecessors();
    float a = 0, b = 0;
    if (gating) {
      a = to_float(*preparer.gate_input(args.a, args.a_stride, header));
      b = to_float(*preparer.gate_input(args.b, args.b_stride, header));
    }
    const auto* qkv =
        static_cast<const __nv_bfloat16*>(args.qkv) + header.seq * args.qkv_stride;
    preparer.each_part([&](int i, int part) {
      const int c = preparer.channel(part, header.key_head);
      inputs[i][3] = *reinterpret_cast<const uint2*>(qkv + c);
    });
    preparer.each_part([&](int i, int part) {
      preparer.convolve(part, header, preparer.taps[i], inputs[i], buffer);
    });
    if (gating) preparer.make_gates(header, buffer, A_log, dt_bias, a, b);
  }
  __device__ void fetch_z() const {
    const GdnDecodeArgs& args = preparer.args;
    if (preparer.warp >= args.group || args.gate == nullptr) return;
    const auto* z = static_cast<const __nv_bfloat16*>(args.gate) + header.seq * args.gate_stride;
    const int first = (header.key_head * args.group + preparer.warp) * kHeadDim;
    buffer.z[preparer.warp * 32 + preparer.lane] =
        *reinterpret_cast<const uint2*>(z + first + 4 * preparer.lane);
  }

  __device__ void run() {
    if (preparer.lane == 0) buffer.headers[preparer.warp] = header;
    __syncwarp();
    if (preparer.warp == 0) preparer.announce(header, buffer, barriers.ring);
    if (header.index >= 0) {
      make_vectors();
    } else {
      wait_for_predecessors();
    }
    __syncwarp();
    if (preparer.lane == 0) arrive(barriers.vectors);
    if (header.index >= 0) fetch_z();
    preparer.finish(header, buffer, barriers.done, 0);
  }
};

template <typename State, int R>
__device__ void consume_single(const GdnDecodeArgs& args, int seq, int key_head,
                               const Barriers& barriers, const Buffer& buffer, char* stages,
                               int count) {
  constexpr int ROWS = 4 * R, BYTES = ROWS * kHeadDim * sizeof(State);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Tiles tiles(args.group, warp, ROWS);
  uint64_t* full = barriers.tiles + warp * kMaxStages;
  char* own = stages + warp * count * BYTES;
  const int index = __ldg(args.indices + seq), passes = index < 0 ? 0 : tiles.passes;
  const auto fetch = [&](int pass) {
    if (pass >= passes) return;
    const int stage = pass % count;
    fetch_tile<State, ROWS>(args, index, key_head, tiles.row(pass), own + stage * BYTES,
                            full + stage);
  };
  for (int i = 0; i < count; ++i) fetch(i);
  const Consumer<State, R> consumer{args, lane / 8, lane % 8};
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
    if (pass == 0) {
      wait_parity(barriers.vectors, 0);
      vectors.load(buffer, consumer.member);
    }
    consumer.step(tile, buffer, vectors, header, tiles.row(pass));
  }
  __syncwarp();
  if (lane == 0) arrive(barriers.done);
}

// As many CTAs as items.
template <typename State, int R>
__global__ void __launch_bounds__(kThreads, 1)
    gdn_decode_single_kernel(const __grid_constant__ GdnDecodeArgs args, int stages) {
  extern __shared__ __align__(128) char shared[];
  const Layout layout(args, 4 * R * kHeadDim * sizeof(State), stages);
  const Barriers barriers(shared);
  barriers.init();
  __syncthreads();
  launch_dependents();
  const int seq = blockIdx.x / args.k_heads, key_head = blockIdx.x % args.k_heads;
  const Buffer buffer(shared + layout.buffers, args.group, args.slots);
  if (threadIdx.x < 32 * kConsumers) {
    consume_single<State, R>(args, seq, key_head, barriers, buffer, shared + layout.stages, stages);
  } else {
    SinglePreparation(args, barriers, buffer, seq, key_head).run();
  }
}

}  // namespace vllm_cuda::gdn_decode
