// SPDX-License-Identifier: Apache-2.0
// The tensors of a scan: checked, and as its arguments.
#pragma once

#include "chunk_scan.h"
#include "stable.h"

namespace vllm_cuda::chunk_scan {

constexpr int64_t kHeadDim = 128, kChunkTokens = 64;

inline void check_tokens(const char* name, const Tensor& x, int64_t tokens, int64_t heads) {
  if (!x.is_cuda() || x.dim() != 3 || x.scalar_type() != ScalarType::BFloat16 ||
      x.size(0) != tokens || x.size(1) != heads || heads == 0 || x.size(2) != kHeadDim ||
      x.stride(2) != 1 || x.stride(1) != kHeadDim || x.stride(0) % 8 != 0 || !aligned(x)) {
    reject(name, x, "be bfloat16 [tokens, heads, 128] with dense heads and 16-byte aligned rows");
  }
}

// Of every chunk and head `rows` rows of `columns`.
inline void check_factors(const char* name, const Tensor& x, int64_t chunks, int64_t heads,
                          int64_t rows, int64_t columns, ScalarType dtype) {
  if (!x.is_cuda() || x.dim() != 4 || x.scalar_type() != dtype || !x.is_contiguous() ||
      x.size(0) != chunks || x.size(1) != heads || x.size(2) != rows || x.size(3) != columns ||
      !aligned(x)) {
    reject(name, x, "be the dense factors [chunks, heads, rows, columns] of each chunk");
  }
}

// Of Kimi delta attention's decays.
inline void check_parameter(const char* name, const Tensor& x, int64_t elements) {
  if (!x.is_cuda() || x.scalar_type() != ScalarType::Float || x.numel() != elements ||
      !x.is_contiguous() || !aligned(x)) {
    reject(name, x, "be dense float32: A_log [heads], dt_bias [heads, 128]");
  }
}

inline void check_batch(const char* name, const Tensor& x, int64_t entries, ScalarType dtype) {
  if (!x.is_cuda() || x.dim() != 1 || x.scalar_type() != dtype || x.size(0) < entries ||
      x.stride(0) != 1) {
    reject(name, x, "list the sequences, dense");
  }
}

inline void check_states(const Tensor& states, int64_t heads) {
  const ScalarType dtype = states.scalar_type();
  const bool typed = dtype == ScalarType::Float || dtype == ScalarType::BFloat16;
  if (!states.is_cuda() || !typed || states.dim() != 4 || states.size(1) != heads ||
      states.size(2) != kHeadDim || states.size(3) != kHeadDim || states.stride(3) != 1 ||
      states.stride(2) != kHeadDim || states.stride(1) != kHeadDim * kHeadDim ||
      states.stride(0) % 8 != 0 || !aligned(states)) {
    reject("states", states, "be float32 or bfloat16 [blocks, heads, 128, 128], dense blocks");
  }
}

// What every scan is given; chunks and heads follow from T and v.
struct Tensors {
  const Tensor &v, &T, &P, &rows;
  const Tensor &out, &states;
  const Tensor &state_indices, &has_initial_state, &query_start_loc, &chunk_offsets;

  int64_t tokens() const { return v.size(0); }
  int64_t heads() const { return v.size(1); }
  int64_t chunks() const { return T.size(0); }
  int64_t sequences() const { return state_indices.size(0); }
  bool empty() const { return chunks() == 0 || sequences() == 0; }

  // `rows` has the name `factors` for the caller.
  void check(const char* factors, int64_t num_rows, int64_t row_columns) const {
    check_tokens("v", v, tokens(), heads());
    check_tokens("out", out, tokens(), heads());
    check_factors("T", T, chunks(), heads(), kChunkTokens, kChunkTokens, ScalarType::BFloat16);
    check_factors("P", P, chunks(), heads(), kChunkTokens, kChunkTokens, ScalarType::BFloat16);
    check_factors(factors, rows, chunks(), heads(), num_rows, row_columns, ScalarType::Float);
    check_states(states, heads());
    check_batch("state_indices", state_indices, 0, ScalarType::Int);
    check_batch("has_initial_state", has_initial_state, sequences(), ScalarType::Bool);
    check_batch("query_start_loc", query_start_loc, sequences() + 1, ScalarType::Int);
    check_batch("chunk_offsets", chunk_offsets, sequences(), ScalarType::Int);
  }

  void fill(ChunkScanArgs& args) const {
    args.v = v.data_ptr();
    args.out = out.data_ptr();
    args.v_stride = v.stride(0);
    args.out_stride = out.stride(0);
    args.T = T.data_ptr();
    args.P = P.data_ptr();
    args.rows = static_cast<const float*>(rows.data_ptr());
    args.states = states.data_ptr();
    args.state_stride = states.stride(0);
    args.state_indices = static_cast<const int32_t*>(state_indices.data_ptr());
    args.carried = static_cast<const bool*>(has_initial_state.data_ptr());
    args.starts = static_cast<const int32_t*>(query_start_loc.data_ptr());
    args.offsets = static_cast<const int32_t*>(chunk_offsets.data_ptr());
    args.tokens = tokens();
    args.chunks = chunks();
    args.sequences = static_cast<int>(sequences());
    args.heads = static_cast<int>(heads());
  }

  ChunkScanLaunch launch() const {
    const int32_t device = v.get_device_index();
    return {states.scalar_type() == ScalarType::Float, device, current_stream(device)};
  }
};

}  // namespace vllm_cuda::chunk_scan
