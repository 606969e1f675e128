// SPDX-License-Identifier: Apache-2.0
#include "ops.h"
#include "table.h"

namespace vllm_cpu {

namespace {

PagedRows paged_rows(const Tensor& cache, const Tensor& table, int64_t num_seqs, Arg arg) {
  check_shape(cache, {-1, -1, -1}, 2, arg);
  PagedRows rows;
  rows.table = int32s_of(table, {num_seqs, -1}, 1, arg);
  rows.data = cache.data_ptr();
  rows.block_stride = cache.stride(0);
  rows.rows = cache.size(1);
  rows.width = cache.size(2);
  rows.table_stride = table.stride(0);
  rows.columns = table.size(1);
  return rows;
}

CompressedStep step_of(
    const Tensor& positions, int64_t num_seqs, int64_t ratio, const char* op) {
  STD_TORCH_CHECK(ratio > 0, op, ": ratio must be positive, got ", ratio);
  const int64_t tokens = positions.size(0);
  if (num_seqs == 0 ? tokens != 0 : tokens % num_seqs != 0) {
    reject({op, "positions"}, positions, "must have equally many tokens of each sequence");
  }
  const int64_t* found = int64_vector(positions, tokens, {op, "positions"});
  return {tokens, num_seqs == 0 ? 1 : tokens / num_seqs, found, ratio};
}

}  // namespace

void compress(
    const Tensor& tokens, const Tensor& tokens_table, const Tensor& entries,
    const Tensor& entries_table, const Tensor& positions, const Tensor& slot_mapping, int64_t ratio,
    bool overlap, const Tensor& norm_weight, double eps, const Tensor& cos_sin) {
  constexpr const char* op = "compress";
  const int64_t num_seqs = tokens_table.size(0);
  CompressArgs args;
  args.step = step_of(positions, num_seqs, ratio, op);
  args.slots = int64_vector(slot_mapping, args.step.num_tokens, {op, "slot_mapping"});
  check_dtype(tokens, DType::kF32, {op, "tokens"});
  args.tokens = paged_rows(tokens, tokens_table, num_seqs, {op, "tokens"});
  args.dtype = float_dtype(entries, {op, "entries"});
  args.entries = paged_rows(entries, entries_table, num_seqs, {op, "entries"});
  if (args.tokens.width != 2 * (overlap ? 2 : 1) * args.entries.width) {
    reject({op, "tokens"}, tokens, "must have values and scores of an entry, or two, per row");
  }
  STD_TORCH_CHECK(
      ratio * (overlap ? 2 : 1) <= kMostRows, op, ": an entry is made of at most ", kMostRows,
      " tokens");
  args.overlap = overlap;
  args.weight = param(norm_weight, args.entries.width, {op, "norm_weight"});
  args.eps = static_cast<float>(eps);
  args.angles = angles_of(cos_sin, args.entries.width, {op, "cos_sin"});
  kernels().compress(args);
}

void choose_entries(
    const Tensor& query, const Tensor& head_weights, const Tensor& keys, const Tensor& table,
    const Tensor& positions, int64_t ratio, const Tensor& chosen) {
  constexpr const char* op = "choose_entries";
  const int64_t num_seqs = table.size(0);
  ChooseArgs args;
  args.step = step_of(positions, num_seqs, ratio, op);
  args.dtype = float_dtype(query, {op, "query"});
  check_dtype(keys, args.dtype, {op, "keys"});
  args.keys = paged_rows(keys, table, num_seqs, {op, "keys"});
  check_shape(query, {args.step.num_tokens, -1, args.keys.width}, 1, {op, "query"});
  args.query = query.data_ptr();
  args.query_strides[0] = query.stride(0);
  args.query_strides[1] = query.stride(1);
  args.heads = query.size(1);
  args.head_weights =
      floats_of(head_weights, {args.step.num_tokens, args.heads}, 1, {op, "head_weights"});
  args.weights_stride = head_weights.stride(0);
  args.chosen = int32s_of(chosen, {args.step.num_tokens, -1}, 2, {op, "chosen"});
  args.topk = chosen.size(1);
  kernels().choose_entries(args);
}

void compressed_attention(
    const Tensor& query, const Tensor& tokens, const Tensor& tokens_table, int64_t window,
    const Tensor& sinks, double scale, const Tensor& positions, const Tensor& out,
    OptTensor entries, OptTensor entries_table, int64_t ratio, OptTensor chosen) {
  constexpr const char* op = "compressed_attention";
  STD_TORCH_CHECK(window > 0, op, ": window must be positive, got ", window);
  const int64_t num_seqs = tokens_table.size(0);
  AttendArgs args;
  args.step = step_of(positions, num_seqs, ratio, op);
  args.dtype = float_dtype(query, {op, "query"});
  check_dtype(tokens, args.dtype, {op, "tokens"});
  args.tokens = paged_rows(tokens, tokens_table, num_seqs, {op, "tokens"});
  check_shape(query, {args.step.num_tokens, -1, args.tokens.width}, 1, {op, "query"});
  args.heads = query.size(1);
  check_dtype(out, args.dtype, {op, "out"});
  check_shape(out, {args.step.num_tokens, args.heads, args.tokens.width}, 1, {op, "out"});
  args.query = query.data_ptr();
  args.out = out.data_ptr();
  for (int d = 0; d < 2; ++d) {
    args.query_strides[d] = query.stride(d);
    args.out_strides[d] = out.stride(d);
  }
  args.sinks = floats_of(sinks, {args.heads}, 1, {op, "sinks"});
  args.window = window;
  args.scale = static_cast<float>(scale);
  STD_TORCH_CHECK(
      entries.has_value() == entries_table.has_value() && (entries || !chosen), op,
      ": entries need their table, and chosen ones need entries");
  if (entries) {
    check_dtype(*entries, args.dtype, {op, "entries"});
    args.entries = paged_rows(*entries, *entries_table, num_seqs, {op, "entries"});
    if (args.entries.width != args.tokens.width) {
      reject({op, "entries"}, *entries, "must have rows as wide as the window's");
    }
  }
  if (chosen) {
    args.chosen = int32s_of(*chosen, {args.step.num_tokens, -1}, 2, {op, "chosen"});
    args.topk = chosen->size(1);
  }
  kernels().compressed_attention(args);
}

}  // namespace vllm_cpu
