// SPDX-License-Identifier: Apache-2.0
// One decode step of the gated delta rule: convolution, gates, replay of the ring's pending tokens,
// the new tokens and the gated norm, in one pass over the states at memory speed.
//
// An item is a sequence's key head with its group of value heads. A CTA goes through its items and
// claims most of them on the way; each consuming warp fetches its own tiles of the states, rows of
// dv, with bulk copies several tiles ahead, so that memory is never idle while others are computed
// on. The preparing warps are some items ahead.
#pragma once

#include "gdn_decode_pipeline.cuh"
#include "gdn_decode_tile.cuh"

namespace vllm_cuda::gdn_decode {

// A warp's tiles in the order they are computed on, on their way through its stages.
template <typename State, int ROWS>
struct Stream {
  static constexpr uint32_t BYTES = ROWS * kHeadDim * sizeof(State);
  const GdnDecodeArgs& args;
  const Tiles& tiles;
  const FirstItems& first;
  const Buffers& buffers;
  uint64_t *known, *barriers;  // of the buffers' headers, of the stages
  char* stages;
  int count;
  Place next;
  bool more;
  int turn = 0, index = 0, number = 0, pass = 0, stage = 0;

  __device__ Stream(const GdnDecodeArgs& args_, const Tiles& tiles_, const FirstItems& first_,
                    const Buffers& buffers_, uint64_t* known_, uint64_t* barriers_, char* stages_,
                    int count_)
      : args(args_), tiles(tiles_), first(first_), buffers(buffers_), known(known_),
        barriers(barriers_), stages(stages_), count(count_), more(first_.any()) {}
  __device__ void take() {
    Header header;
    if (first.has(turn)) {
      header = first[turn];
    } else {
      wait_parity(known + next.index, next.phase);
      header = *buffers[next.index].headers;
    }
    index = header.index, number = header.number, more = header.more;
    ++turn;
    next.advance();
  }
  // Fetches the next tile, if there is one, into the stage after the last one fetched. An item
  // that has no state has tiles all the same, which are not fetched: no warp may be further ahead
  // than the preparing ones.
  __device__ void fetch() {
    if (pass == 0) {
      if (!more) return;
      take();
    }
    if (index >= 0) {
      fetch_tile<State, ROWS>(args, index, number, tiles.row(pass), stages + stage * BYTES,
                              barriers + stage);
      if (++stage == count) stage = 0;
    }
    if (++pass == tiles.passes) pass = 0;
  }
};

template <typename State, int R, bool SEVERAL>
__device__ void run_consumers(const GdnDecodeArgs& args, const FirstItems& first,
                              const Barriers& barriers, const Buffers& buffers, char* stages,
                              int count) {
  constexpr int ROWS = 4 * R;
  using Tiled = Stream<State, ROWS>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Tiles tiles(args.heads, warp, ROWS);
  uint64_t* full = barriers.tiles + warp * kMaxStages;
  char* own = stages + warp * count * Tiled::BYTES;
  Tiled stream(args, tiles, first, buffers, barriers.known, full, own, count);
  for (int i = 0; i < count; ++i) stream.fetch();
  const Consumer<State, R, SEVERAL> consumer{args, lane / 8, lane % 8};
  uint32_t tile_phase = 0;
  int stage = 0;
  bool more = first.any();
  for (Place place; more; place.advance()) {
    const Buffer buffer = buffers[place.index];
    wait_parity(barriers.ring + place.index, place.phase);
    const Header header = *buffer.headers;
    more = header.more;
    if (header.index < 0) {
      for (int pass = 0; pass < tiles.passes; ++pass) stream.fetch();
      wait_parity(barriers.vectors + place.index, place.phase);
    }
    const int passes = header.index < 0 ? 0 : tiles.passes;
    Vectors vectors;
    for (int pass = 0; pass < passes; ++pass) {
      Tile<State, R> tile;
      wait_parity(full + stage, tile_phase);
      tile.load(own + stage * Tiled::BYTES, consumer.group, consumer.member);
      if (++stage == count) {
        stage = 0;
        tile_phase ^= 1;
      }
      __syncwarp();
      stream.fetch();
      consumer.replay(tile, buffer, header.pending, tiles.row(pass));
      consumer.steps(
          tile, buffer, vectors, header, tiles.row(pass), pass,
          [&](int) { wait_parity(barriers.vectors + place.index, place.phase); }, [](int) {});
    }
    __syncwarp();
    if (lane == 0) arrive(barriers.done + place.index);
  }
}

template <typename State, int R, bool SEVERAL>
__global__ void __launch_bounds__(kThreads, 1)
    gdn_decode_kernel(const __grid_constant__ GdnDecodeArgs args, int stages) {
  extern __shared__ __align__(128) char shared[];
  const Layout layout(args, Stream<State, 4 * R>::BYTES, stages);
  FirstItems first(args, args.n * args.items);
  const Barriers barriers(shared);
  barriers.init();
  if (gridDim.x < first.count) {
    const int used = count_sequences(args, reinterpret_cast<int*>(shared + layout.words));
    first.count = count_items(args, used);
  } else {
    __syncthreads();
  }
  launch_dependents();
  const Buffers buffers{args, shared + layout.buffers, layout.buffer_bytes};
  if (threadIdx.x < 32 * kConsumers) {
    run_consumers<State, R, SEVERAL>(args, first, barriers, buffers, shared + layout.stages,
                                     stages);
  } else {
    Preparation<SEVERAL>(args, barriers, buffers, first).run();
  }
}

}  // namespace vllm_cuda::gdn_decode
