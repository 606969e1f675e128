// SPDX-License-Identifier: Apache-2.0
#include "ops.h"
#include "table.h"

namespace vllm_cpu {

namespace {

PagedRows paged_rows(const Tensor& cache, const Tensor& table, int64_t num_seqs, Arg arg) {
  check_shape(cache, {-1, -1, -1}, 2, arg);
  check_int32(table, arg);
  check_shape(table, {num_seqs, -1}, 1, arg);
  PagedRows rows;
  rows.data = cache.data_ptr();
  rows.block_stride = cache.stride(0);
  rows.rows = cache.size(1);
  rows.width = cache.size(2);
  rows.table = static_cast<const int32_t*>(table.data_ptr());
  rows.table_stride = table.stride(0);
  rows.columns = table.size(1);
  return rows;
}

// Tokens of each sequence, equally many.
int64_t tokens_per_seq(const Tensor& positions, int64_t num_seqs, const char* op) {
  const int64_t tokens = positions.size(0);
  if (num_seqs == 0 ? tokens != 0 : tokens % num_seqs != 0) {
    reject({op, "positions"}, positions, "must have equally many tokens of each sequence");
  }
  return num_seqs == 0 ? 1 : tokens / num_seqs;
}

void check_ratio(int64_t ratio, const char* op) {
  STD_TORCH_CHECK(ratio > 0, op, ": ratio must be positive, got ", ratio);
}

}  // namespace

void compress(
    const Tensor& tokens, const Tensor& tokens_table, const Tensor& entries,
    const Tensor& entries_table, const Tensor& positions, const Tensor& slot_mapping, int64_t ratio,
    bool overlap, const Tensor& norm_weight, double eps, const Tensor& cos_sin) {
  constexpr const char* op = "compress";
  check_ratio(ratio, op);
  CompressArgs args;
  const int64_t num_seqs = tokens_table.size(0);
  args.num_tokens = positions.size(0);
  args.tokens_per_seq = tokens_per_seq(positions, num_seqs, op);
  args.positions = int64_vector(positions, args.num_tokens, {op, "positions"});
  args.slots = int64_vector(slot_mapping, args.num_tokens, {op, "slot_mapping"});
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
  args.ratio = ratio;
  args.overlap = overlap;
  args.weight = param(norm_weight, args.entries.width, {op, "norm_weight"});
  args.eps = static_cast<float>(eps);
  check_dtype(cos_sin, DType::kF32, {op, "cos_sin"});
  check_shape(cos_sin, {-1, -1}, 1, {op, "cos_sin"});
  args.cos_sin = static_cast<const float*>(cos_sin.data_ptr());
  args.cos_sin_stride = cos_sin.stride(0);
  args.rot = cos_sin.size(1);
  if (args.rot % 2 || args.rot > args.entries.width) {
    reject({op, "cos_sin"}, cos_sin, "must have an even last dimension of at most an entry's");
  }
  kernels().compress(args);
}

void choose_entries(
    const Tensor& query, const Tensor& head_weights, const Tensor& keys, const Tensor& table,
    const Tensor& positions, int64_t ratio, const Tensor& chosen) {
  constexpr const char* op = "choose_entries";
  check_ratio(ratio, op);
  ChooseArgs args;
  const int64_t num_seqs = table.size(0);
  args.num_tokens = positions.size(0);
  args.tokens_per_seq = tokens_per_seq(positions, num_seqs, op);
  args.positions = int64_vector(positions, args.num_tokens, {op, "positions"});
  args.dtype = float_dtype(query, {op, "query"});
  check_dtype(keys, args.dtype, {op, "keys"});
  args.keys = paged_rows(keys, table, num_seqs, {op, "keys"});
  check_shape(query, {args.num_tokens, -1, args.keys.width}, 1, {op, "query"});
  args.query = query.data_ptr();
  args.query_strides[0] = query.stride(0);
  args.query_strides[1] = query.stride(1);
  args.heads = query.size(1);
  check_dtype(head_weights, DType::kF32, {op, "head_weights"});
  check_shape(head_weights, {args.num_tokens, args.heads}, 1, {op, "head_weights"});
  args.head_weights = static_cast<const float*>(head_weights.data_ptr());
  args.weights_stride = head_weights.stride(0);
  args.ratio = ratio;
  check_int32(chosen, {op, "chosen"});
  check_shape(chosen, {args.num_tokens, -1}, 2, {op, "chosen"});
  args.chosen = static_cast<int32_t*>(chosen.data_ptr());
  args.topk = chosen.size(1);
  kernels().choose_entries(args);
}

void compressed_attention(
    const Tensor& query, const Tensor& tokens, const Tensor& tokens_table, int64_t window,
    const Tensor& sinks, double scale, const Tensor& positions, const Tensor& out,
    OptTensor entries, OptTensor entries_table, int64_t ratio, OptTensor chosen) {
  constexpr const char* op = "compressed_attention";
  check_ratio(ratio, op);
  STD_TORCH_CHECK(window > 0, op, ": window must be positive, got ", window);
  AttendArgs args;
  const int64_t num_seqs = tokens_table.size(0);
  args.num_tokens = positions.size(0);
  args.tokens_per_seq = tokens_per_seq(positions, num_seqs, op);
  args.positions = int64_vector(positions, args.num_tokens, {op, "positions"});
  args.dtype = float_dtype(query, {op, "query"});
  check_dtype(tokens, args.dtype, {op, "tokens"});
  args.tokens = paged_rows(tokens, tokens_table, num_seqs, {op, "tokens"});
  check_shape(query, {args.num_tokens, -1, args.tokens.width}, 1, {op, "query"});
  args.heads = query.size(1);
  check_dtype(out, args.dtype, {op, "out"});
  check_shape(out, {args.num_tokens, args.heads, args.tokens.width}, 1, {op, "out"});
  args.query = query.data_ptr();
  args.out = out.data_ptr();
  for (int d = 0; d < 2; ++d) {
    args.query_strides[d] = query.stride(d);
    args.out_strides[d] = out.stride(d);
  }
  check_dtype(sinks, DType::kF32, {op, "sinks"});
  check_shape(sinks, {args.heads}, 1, {op, "sinks"});
  args.sinks = static_cast<const float*>(sinks.data_ptr());
  args.window = window;
  args.scale = static_cast<float>(scale);
  args.ratio = ratio;
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
    check_int32(*chosen, {op, "chosen"});
    check_shape(*chosen, {args.num_tokens, -1}, 2, {op, "chosen"});
    args.chosen = static_cast<const int32_t*>(chosen->data_ptr());
    args.topk = chosen->size(1);
  }
  kernels().compressed_attention(args);
}

}  // namespace vllm_cpu
