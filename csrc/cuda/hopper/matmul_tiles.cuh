// SPDX-License-Identifier: Apache-2.0
// Shapes of a matmul's tiles, which tile comes when, and how operands come to shared memory.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "hopper/boxes.cuh"
#include "hopper/wgmma.cuh"
#include "ptx.cuh"

namespace vllm_cuda::matmul {

constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;  // warpgroups
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kColumns = 64;  // of k, per stage

// A tile is TOKENS tokens (128 or 256) by OUTPUTS outputs, each of two rows of the weight, the
// gate's and the up projection's. A cluster makes ROWS by COLUMNS tiles; what several of its CTAs
// need is fetched once.
template <int TOKENS_, int OUTPUTS_, int STAGES_, int ROWS_, int COLUMNS_>
struct Shape {
  static constexpr int TOKENS = TOKENS_, OUTPUTS = OUTPUTS_, STAGES = STAGES_;
  static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, CLUSTER = ROWS * COLUMNS;
  static constexpr int BLOCKS = TOKENS / (64 * kConsumers);  // of 64 tokens, per warpgroup
  static constexpr int BOX = TOKENS / COLUMNS;               // tokens that a CTA fetches
  static constexpr int WRITERS = ROWS + COLUMNS - 1;         // CTAs that fill a stage

  // Outputs leave in boxes of 64 tokens and so many columns: swizzled, or of a length that spreads
  // rows over the banks.
  static constexpr int WIDTH = OUTPUTS % 64 == 0 ? 64 : OUTPUTS % 32 == 0 ? 32 : OUTPUTS;
  static constexpr bool SWIZZLED = WIDTH % 32 == 0;
  static constexpr int BOXES = OUTPUTS / WIDTH;
  static_assert(TOKENS % 128 == 0 && OUTPUTS % 8 == 0 && OUTPUTS <= 256);
  static_assert(BOX % 8 == 0 && BOX <= 256);
  static_assert(SWIZZLED || WIDTH / 8 % 2 == 1);
  static_assert(ROWS == 1 || ROWS == 2, "each fetches the gate's rows or the up projection's");
};

// This CTA's place in its cluster.
template <typename S>
struct Place {
  int row = 0, column = 0;
  __device__ Place() {
    if (S::CLUSTER > 1) {
      const int rank = cluster_rank();
      row = rank % S::ROWS;
      column = rank / S::ROWS;
    }
  }
  __device__ static int rank(int row, int column) { return row + S::ROWS * column; }
  // Those that need the same tokens, and the same rows of the weight, as bits.
  __device__ uint16_t row_ctas() const {
    uint16_t bits = 0;
#pragma unroll
    for (int i = 0; i < S::COLUMNS; ++i) bits |= 1 << rank(row, i);
    return bits;
  }
  __device__ uint16_t column_ctas() const {
    uint16_t bits = 0;
#pragma unroll
    for (int i = 0; i < S::ROWS; ++i) bits |= 1 << rank(i, column);
    return bits;
  }
  // The i-th of those that fill this CTA's stages, and whose stages it fills.
  __device__ int partner(int i) const {
    return i < S::COLUMNS ? rank(row, i) : rank((row + i - S::COLUMNS + 1) % S::ROWS, column);
  }
};

template <typename S>
struct alignas(1024) Stage {
  __nv_bfloat16 x[S::TOKENS][kColumns];
  __nv_bfloat16 weight[2][S::OUTPUTS][kColumns];  // gate, up
};

template <typename S>
struct Shared {
  Stage<S> stages[S::STAGES];
  alignas(1024) __nv_bfloat16 out[kConsumers][S::BOXES][64 * S::WIDTH];
  uint64_t barriers[2 * S::STAGES];
};

struct Maps {
  CUtensorMap x, weight, out;
};

// Tiles of a cluster, in rows (tokens) and columns (outputs).
struct Grid {
  int rows, columns;
  int group;  // rows that go through all columns together
  int apart;  // rows of the weight from the gate's of an output to the up projection's
  int box;    // tokens that a CTA fetches

  // First token and first output of this CTA's tile in the cluster's tile `index`.
  template <typename S>
  __device__ void place(int index, int& token, int& output) const {
    const int per_group = group * columns;
    const int first = index / per_group * group, inside = index % per_group;
    const int height = min(group, rows - first);
    const Place<S> own;
    token = ((first + inside % height) * S::ROWS + own.row) * S::TOKENS;
    output = (inside / height * S::COLUMNS + own.column) * S::OUTPUTS;
  }
};

// One thread fetches all tiles. It waits for a stage to be free in all CTAs that it writes to.
template <typename S>
struct Producer {
  const Maps& maps;
  const Grid& grid;
  Shared<S>& shared;
  const Place<S> own;

  __device__ void load_weight(Ring& ring, int step, int output) const {
    auto& to = shared.stages[ring.index].weight;
    const int column = step * kColumns;
    if constexpr (S::ROWS == 2) {
      load_box_to(to[own.row], &maps.weight, column, output + own.row * grid.apart, ring.full(),
                  own.column_ctas());
    } else {
      load_box(to[0], &maps.weight, column, output, ring.full());
      load_box(to[1], &maps.weight, column, output + grid.apart, ring.full());
    }
  }
  __device__ void load_tokens(Ring& ring, int step, int token) const {
    auto& to = shared.stages[ring.index].x;
    const int column = step * kColumns, first = own.column * grid.box;
    if constexpr (S::COLUMNS > 1) {
      load_box_to(to[first], &maps.x, column, token + first, ring.full(), own.row_ctas());
    } else {
      load_box(to, &maps.x, column, token, ring.full());
    }
  }

  __device__ void run(int steps) const {
    Ring ring(shared.barriers, S::STAGES);
    const int bytes = sizeof(Stage<S>) - (S::BOX - grid.box) * S::COLUMNS * kTileRowBytes;
    const auto claim = [&] {
      ring.wait_empty();
      ring.expect(bytes);
    };
    const int first = blockIdx.x / S::CLUSTER, apart = gridDim.x / S::CLUSTER;
    int token, output;
    grid.template place<S>(first, token, output);
    // The weight is constant, so the first stages' are fetched before the kernels that make x have
    // finished.
    const int early = min(S::STAGES, steps);
    for (int step = 0; step < early; ++step, ring.advance()) {
      claim();
      load_weight(ring, step, output);
    }
    wait_for_predecessors();
    Ring again(shared.barriers, S::STAGES);
    for (int step = 0; step < early; ++step, again.advance()) load_tokens(again, step, token);
    int begin = early;
    for (int tile = first; tile < grid.rows * grid.columns; tile += apart) {
      grid.template place<S>(tile, token, output);
      for (int step = begin; step < steps; ++step, ring.advance()) {
        claim();
        load_tokens(ring, step, token);
        load_weight(ring, step, output);
      }
      begin = 0;
    }
  }
};

}  // namespace vllm_cuda::matmul
