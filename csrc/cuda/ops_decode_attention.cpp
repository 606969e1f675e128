// SPDX-License-Identifier: Apache-2.0
// torch.ops.vllm_cuda: attention of short queries over the paged cache.
#include <stdexcept>

#include "decode_attention.h"
#include "paged_tensors.h"

namespace vllm_cuda {

namespace {

constexpr auto kInt = ScalarType::Int;
constexpr auto kBf16 = ScalarType::BFloat16;

struct Sizes {
  int64_t tokens, heads, head_dim, kv_heads, block_size, num_seqs;
};

// Rows of heads at 8 bytes, whose elements are adjacent.
bool at_8_bytes(const Tensor& rows) {
  return rows.stride(2) == 1 && rows.stride(0) % 4 == 0 && rows.stride(1) % 4 == 0 &&
         reinterpret_cast<uintptr_t>(rows.data_ptr()) % 8 == 0;
}

void check_rows(const Sizes& s, const char* name, const Tensor& rows) {
  need(is(rows, kBf16, {s.tokens, s.heads, s.head_dim}) && at_8_bytes(rows), name, rows,
       "be bfloat16 [tokens, heads, head dim], rows at 8 bytes");
}

void check_cache(const Sizes& s, const Tensor& cache) {
  const auto dtype = cache.scalar_type();
  need((dtype == kBf16 || dtype == ScalarType::Float8_e4m3fn) && aligned(cache) &&
           s.block_size % kTileKeys == 0 && (s.head_dim == 128 || s.head_dim == 256) &&
           cache.stride(0) * cache.element_size() % 16 == 0 &&
           cache.stride(1) == s.block_size * s.kv_heads * s.head_dim &&
           cache.stride(2) == s.kv_heads * s.head_dim && cache.stride(3) == s.head_dim &&
           cache.stride(4) == 1,
       "kv_cache", cache,
       "be bfloat16 or float8_e4m3fn [blocks, 2, multiple of 16, kv heads, 128 or 256], its blocks"
       " dense and at 16 bytes");
}

void check_shares(const Sizes& s, int64_t splits, const Tensor& part, const Tensor& lse,
                  const Tensor& arrived) {
  constexpr auto f32 = ScalarType::Float;
  need(is(part, f32, {s.tokens, s.heads, splits, s.head_dim}) && part.is_contiguous() &&
           aligned(part),
       "part", part, "be dense float32 [tokens, heads, splits, head dim]");
  need(is(lse, f32, {s.tokens, s.heads, splits}) && lse.is_contiguous(), "lse", lse,
       "be dense float32 [tokens, heads, splits]");
  need(arrived.is_cuda() && arrived.scalar_type() == kInt && arrived.is_contiguous() &&
           arrived.numel() >= s.num_seqs * s.kv_heads,
       "arrived", arrived, "be dense int32 with an entry per sequence and kv head");
}

void decode_attention(
    const Tensor& query, const Tensor& kv_cache, const Tensor& block_table, const Tensor& seq_lens,
    const Tensor& query_start_loc, const Tensor& out, OptTensor gate, OptTensor part, OptTensor lse,
    OptTensor arrived, int64_t max_query_len, int64_t splits, int64_t split_keys, int64_t window,
    double scale, double v_scale, bool overlap) {
  if (query.dim() != 3 || kv_cache.dim() != 5) reject("query", query, "be [tokens, heads, dim]");
  const Sizes s{query.size(0),    query.size(1),    query.size(2),
                kv_cache.size(3), kv_cache.size(2), seq_lens.size(0)};
  need(s.kv_heads > 0 && s.heads % s.kv_heads == 0 && kv_cache.size(1) == 2 &&
           kv_cache.size(4) == s.head_dim,
       "kv_cache", kv_cache, "have two parts and heads that divide the query's");
  const int64_t group = s.heads / s.kv_heads, rows = group * max_query_len;
  if (rows < 1 || rows > kMaxQueryRows) throw std::runtime_error("vllm_cuda: too many query rows");
  if (splits < 1 || splits > kMaxShares || split_keys < 1 || window < 0 ||
      s.num_seqs * s.kv_heads * splits >= int64_t{1} << 30) {
    throw std::runtime_error("vllm_cuda: so many shares are not supported");
  }
  check_rows(s, "query", query);
  check_rows(s, "out", out);
  if (gate) check_rows(s, "gate", *gate);
  check_cache(s, kv_cache);
  check_lengths(s.num_seqs, block_table, seq_lens, query_start_loc);
  if (splits > 1) {
    if (!part || !lse || !arrived) throw std::runtime_error("vllm_cuda: shares need memory");
    check_shares(s, splits, *part, *lse, *arrived);
  }
  if (s.tokens == 0 || s.num_seqs == 0) return;
  const int32_t device = query.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  DecodeAttentionArgs args{};
  args.query = query.data_ptr();
  args.cache = kv_cache.data_ptr();
  args.table = static_cast<const int*>(block_table.data_ptr());
  args.seq_lens = static_cast<const int*>(seq_lens.data_ptr());
  args.starts = static_cast<const int*>(query_start_loc.data_ptr());
  args.out = out.data_ptr();
  args.q_token = query.stride(0);
  args.q_head = query.stride(1);
  args.out_token = out.stride(0);
  args.out_head = out.stride(1);
  args.block_stride = kv_cache.stride(0);
  args.table_stride = block_table.stride(0);
  if (gate) {
    args.gate = gate->data_ptr();
    args.gate_token = gate->stride(0);
    args.gate_head = gate->stride(1);
  }
  if (splits > 1) {
    args.part = static_cast<float*>(part->data_ptr());
    args.lse = static_cast<float*>(lse->data_ptr());
    args.arrived = static_cast<int*>(arrived->data_ptr());
  }
  args.scale = static_cast<float>(scale);
  args.v_scale = static_cast<float>(v_scale);
  args.num_seqs = static_cast<int>(s.num_seqs);
  args.kv_heads = static_cast<int>(s.kv_heads);
  args.group = static_cast<int>(group);
  args.rows = static_cast<int>(rows);
  args.block_size = static_cast<int>(s.block_size);
  args.window = static_cast<int>(window);
  args.num_blocks = static_cast<int>(kv_cache.size(0));
  args.splits = static_cast<int>(splits);
  args.split_keys = static_cast<int>(split_keys);
  DecodeAttentionLaunch launch{};
  launch.head_dim = static_cast<int>(s.head_dim);
  launch.fp8_cache = kv_cache.scalar_type() != kBf16;
  launch.overlap = overlap;
  launch.device = device;
  launch.stream = current_stream(device);
  throw_if("attention", launch_decode_attention(args, launch));
}

}  // namespace

}  // namespace vllm_cuda

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cuda, m) {
  m.def(
      "decode_attention(Tensor query, Tensor kv_cache, Tensor block_table, Tensor seq_lens,"
      " Tensor query_start_loc, Tensor(a!) out, Tensor? gate, Tensor(b!)? part, Tensor(c!)? lse,"
      " Tensor(d!)? arrived, int max_query_len, int splits, int split_keys, int window,"
      " float scale, float v_scale, bool overlap) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cuda, CUDA, m) {
  m.impl("decode_attention", TORCH_BOX(&vllm_cuda::decode_attention));
}
