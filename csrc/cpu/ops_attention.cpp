// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "ops.h"
#include "runtime.h"
#include "table.h"

namespace vllm_cpu {

namespace {

void copy_rows(const WriteRowsArgs& args) {
  const int64_t row_bytes = args.columns * args.column_bytes;
  if (row_bytes == 0) return;
  parallel_ranges(args.tokens, 65536 / row_bytes + 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t slot = args.slots[t];
      if (slot < 0) continue;
      char* target = args.cache + slot / args.block_size * args.block_stride +
          slot % args.block_size * row_bytes;
      const char* source = args.rows + t * args.token_stride;
      if (args.column_stride == args.column_bytes) {
        std::memcpy(target, source, row_bytes);
        continue;
      }
      for (int64_t c = 0; c < args.columns; ++c) {
        std::memcpy(
            target + c * args.column_bytes, source + c * args.column_stride, args.column_bytes);
      }
    }
  });
}

// rows [tokens, columns, width] into `cache`, whose blocks hold block_size dense rows.
WriteRowsArgs write_args(const Tensor& rows, const int64_t* slots) {
  const int64_t element = static_cast<int64_t>(rows.element_size());
  WriteRowsArgs args;
  args.rows = static_cast<const char*>(rows.data_ptr());
  args.token_stride = rows.stride(0) * element;
  args.columns = rows.size(1);
  args.column_stride = rows.stride(1) * element;
  args.column_bytes = rows.size(2) * element;
  args.tokens = rows.size(0);
  args.slots = slots;
  return args;
}

void check_heads(const KvCache& cache, int64_t num_heads, Arg arg, const Tensor& query) {
  if (cache.heads == 0 || num_heads % cache.heads) {
    reject(arg, query, "must have a multiple of the cache's kv heads");
  }
}

}  // namespace

Tensor qk_norm_rope_cache(
    const Tensor& qkv, const Tensor& positions, const Tensor& cos_sin, OptTensor q_norm_weight,
    OptTensor k_norm_weight, const Tensor& kv_cache, const Tensor& slot_mapping, int64_t num_heads,
    int64_t num_kv_heads, int64_t head_dim, bool gated, double eps, bool one_plus) {
  constexpr const char* op = "qk_norm_rope_cache";
  const int64_t q_width = head_dim * (gated ? 2 : 1);
  check_shape(qkv, {-1, num_heads * q_width + 2 * num_kv_heads * head_dim}, 1, {op, "qkv"});
  RopeCacheArgs args;
  args.dtype = float_dtype(qkv, {op, "qkv"});
  args.qkv = qkv.data_ptr();
  args.qkv_stride = qkv.stride(0);
  args.tokens = qkv.size(0);
  args.positions = int64_vector(positions, args.tokens, {op, "positions"});
  args.angles = angles_of(cos_sin, head_dim, {op, "cos_sin"});
  if (q_norm_weight) args.q_weight = param(*q_norm_weight, head_dim, {op, "q_norm_weight"});
  if (k_norm_weight) args.k_weight = param(*k_norm_weight, head_dim, {op, "k_norm_weight"});
  check_shape(kv_cache, {-1, 2, -1, num_kv_heads, head_dim}, 4, {op, "kv_cache"});
  args.cache = kv_cache_of(kv_cache, args.dtype, {op, "kv_cache"});
  args.slots = int64_vector(slot_mapping, args.tokens, {op, "slot_mapping"});
  args.heads = num_heads;
  args.gated = gated;
  args.one_plus = one_plus;
  args.eps = static_cast<float>(eps);
  Tensor q = empty({args.tokens, num_heads, head_dim}, qkv);
  args.q_out = q.data_ptr();
  kernels().qk_norm_rope_cache(args);
  return q;
}

void write_kv_cache(
    const Tensor& key, const Tensor& value, const Tensor& kv_cache, const Tensor& slot_mapping) {
  constexpr const char* op = "write_kv_cache";
  const DType dtype = float_dtype(key, {op, "key"});
  check_dtype(value, dtype, {op, "value"});
  const KvCache cache = kv_cache_of(kv_cache, dtype, {op, "kv_cache"});
  const int64_t tokens = key.size(0);
  check_shape(key, {-1, cache.heads, cache.head_dim}, 1, {op, "key"});
  check_shape(value, {tokens, cache.heads, cache.head_dim}, 1, {op, "value"});
  const int64_t* slots = int64_vector(slot_mapping, tokens, {op, "slot_mapping"});
  const int64_t element = static_cast<int64_t>(key.element_size());
  for (const bool is_value : {false, true}) {
    WriteRowsArgs args = write_args(is_value ? value : key, slots);
    args.cache = cache.data + (is_value ? cache.value_offset() * element : 0);
    args.block_stride = cache.block_stride * element;
    args.block_size = cache.block_size;
    copy_rows(args);
  }
}

void write_rows(const Tensor& rows, const Tensor& cache, const Tensor& slot_mapping) {
  constexpr const char* op = "write_rows";
  check_shape(rows, {-1, -1, -1}, 1, {op, "rows"});
  check_dtype(cache, float_dtype(rows, {op, "rows"}), {op, "cache"});
  check_shape(cache, {-1, -1, rows.size(1), rows.size(2)}, 3, {op, "cache"});
  const int64_t* slots = int64_vector(slot_mapping, rows.size(0), {op, "slot_mapping"});
  WriteRowsArgs args = write_args(rows, slots);
  args.cache = static_cast<char*>(cache.data_ptr());
  args.block_stride = cache.stride(0) * static_cast<int64_t>(cache.element_size());
  args.block_size = cache.size(1);
  copy_rows(args);
}

void paged_attention(
    const Tensor& query, const Tensor& kv_cache, const Tensor& block_table, const Tensor& seq_lens,
    const Tensor& query_start_loc, double scale, std::optional<int64_t> sliding_window,
    OptTensor sinks, const Tensor& out, int64_t rows) {
  constexpr const char* op = "paged_attention";
  AttentionArgs args;
  args.dtype = float_dtype(query, {op, "query"});
  args.cache = kv_cache_of(kv_cache, args.dtype, {op, "kv_cache"});
  check_shape(query, {-1, -1, args.cache.head_dim}, 1, {op, "query"});
  check_heads(args.cache, query.size(1), {op, "query"}, query);
  check_dtype(out, args.dtype, {op, "out"});
  check_shape(out, {query.size(0), query.size(1), args.cache.head_dim}, 1, {op, "out"});
  args.query = query.data_ptr();
  args.out = out.data_ptr();
  for (int d = 0; d < 2; ++d) {
    args.query_strides[d] = query.stride(d);
    args.out_strides[d] = out.stride(d);
  }
  args.num_seqs = seq_lens.size(0);
  args.seq_lens = int32_vector(seq_lens, args.num_seqs, {op, "seq_lens"});
  args.query_start = int32_vector(query_start_loc, args.num_seqs + 1, {op, "query_start_loc"});
  args.block_table = int32s_of(block_table, {args.num_seqs, -1}, 1, {op, "block_table"});
  args.block_table_stride = block_table.stride(0);
  args.heads = query.size(1);
  args.scale = static_cast<float>(scale);
  args.window = sliding_window.value_or(0);
  if (sinks) args.sinks = floats_of(*sinks, {args.heads}, 1, {op, "sinks"});
  STD_TORCH_CHECK(
      !sliding_window || args.window > 0, op, ": sliding_window must be positive or None");
  STD_TORCH_CHECK(rows >= 0 && rows <= 2, op, ": rows must be 0, 1 or 2, got ", rows);
  args.rows = static_cast<QueryRows>(rows);
  kernels().paged_attention(args);
}

}  // namespace vllm_cpu
