// SPDX-License-Identifier: Apache-2.0
// torch.ops.vllm_cuda: attention of long queries over the paged cache.
#include <stdexcept>

#include "paged_tensors.h"
#include "prefill_attention.h"

namespace vllm_cuda {

namespace {

constexpr auto kInt = ScalarType::Int;
constexpr auto kBf16 = ScalarType::BFloat16;

// Rows of heads at 16 bytes, whose elements are adjacent.
void check_rows(const Tensor& query, const char* name, const Tensor& rows) {
  need(rows.is_cuda() && rows.scalar_type() == kBf16 && rows.dim() == 3 &&
           rows.size(0) == query.size(0) && rows.size(1) == query.size(1) &&
           rows.size(2) == query.size(2) && rows.stride(2) == 1 && rows.stride(0) % 8 == 0 &&
           rows.stride(1) % 8 == 0 && aligned(rows),
       name, rows, "be bfloat16 [tokens, heads, head dim], rows at 16 bytes");
}

void check_cache(const Tensor& cache, int64_t heads, int64_t head_dim) {
  const auto dtype = cache.scalar_type();
  need(cache.is_cuda() && (dtype == kBf16 || dtype == ScalarType::Float8_e4m3fn) &&
           cache.dim() == 5 && cache.size(1) == 2 && cache.size(2) > 0 &&
           cache.size(2) % kBoxKeys == 0 && cache.size(3) > 0 &&
           heads % cache.size(3) == 0 && cache.size(4) == head_dim && cache.stride(4) == 1 &&
           cache.stride(3) == head_dim && cache.stride(2) == cache.size(3) * head_dim &&
           cache.stride(1) == cache.size(2) * cache.stride(2) &&
           cache.stride(0) * cache.element_size() % 16 == 0 && aligned(cache),
       "kv_cache", cache,
       "be bfloat16 or float8_e4m3fn [blocks, 2, multiple of 16, heads that divide the query's,"
       " head dim], its blocks dense and at 16 bytes");
}

void prefill_attention(const Tensor& query, const Tensor& kv_cache, const Tensor& block_table,
                       const Tensor& seq_lens, const Tensor& query_start_loc, const Tensor& out,
                       OptTensor gate, OptTensor sinks, const Tensor& counter, int64_t window,
                       double scale, double v_scale) {
  need(query.dim() == 3, "query", query, "be [tokens, heads, head dim]");
  need(seq_lens.dim() == 1, "seq_lens", seq_lens, "be [sequences]");
  const int64_t heads = query.size(1), head_dim = query.size(2);
  check_rows(query, "query", query);
  check_rows(query, "out", out);
  if (gate) check_rows(query, "gate", *gate);
  check_cache(kv_cache, heads, head_dim);
  check_lengths(seq_lens.size(0), block_table, seq_lens, query_start_loc);
  need(counter.is_cuda() && counter.scalar_type() == kInt && counter.numel() == 1, "counter",
       counter, "be one int32");
  if (sinks) {
    need(sinks->is_cuda() && sinks->scalar_type() == ScalarType::Float && sinks->dim() == 1 &&
             sinks->size(0) == heads && sinks->is_contiguous(),
         "sinks", *sinks, "be dense float32 [heads]");
  }
  const int64_t kv_heads = kv_cache.size(3);
  if (heads / kv_heads > kQueryRows) {
    throw std::runtime_error("vllm_cuda: more than 64 query heads of a kv head");
  }
  if (window < 0 || !(scale > 0)) {
    throw std::runtime_error("vllm_cuda: window must be >= 0 and scale must be > 0");
  }
  if (query.size(0) == 0 || seq_lens.size(0) == 0) return;
  const int32_t device = query.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  PrefillAttentionArgs args{};
  args.query = query.data_ptr();
  args.cache = kv_cache.data_ptr();
  args.table = static_cast<const int*>(block_table.data_ptr());
  args.seq_lens = static_cast<const int*>(seq_lens.data_ptr());
  args.starts = static_cast<const int*>(query_start_loc.data_ptr());
  args.out = out.data_ptr();
  args.counter = static_cast<int*>(counter.data_ptr());
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
  if (sinks) args.sinks = static_cast<const float*>(sinks->data_ptr());
  args.scale = static_cast<float>(scale);
  args.v_scale = static_cast<float>(v_scale);
  args.tokens = static_cast<int>(query.size(0));
  args.num_seqs = static_cast<int>(seq_lens.size(0));
  args.kv_heads = static_cast<int>(kv_heads);
  args.group = static_cast<int>(heads / kv_heads);
  args.num_blocks = static_cast<int>(kv_cache.size(0));
  args.block_size = static_cast<int>(kv_cache.size(2));
  args.window = static_cast<int>(window);
  PrefillAttentionLaunch launch{};
  launch.head_dim = static_cast<int>(head_dim);
  launch.fp8_cache = kv_cache.scalar_type() != kBf16;
  launch.device = device;
  launch.stream = current_stream(device);
  throw_if("attention", launch_prefill_attention(args, launch));
}

}  // namespace

}  // namespace vllm_cuda

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cuda, m) {
  m.def(
      "prefill_attention(Tensor query, Tensor kv_cache, Tensor block_table, Tensor seq_lens,"
      " Tensor query_start_loc, Tensor(a!) out, Tensor? gate, Tensor? sinks, Tensor(b!) counter,"
      " int window, float scale, float v_scale) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cuda, CUDA, m) {
  m.impl("prefill_attention", TORCH_BOX(&vllm_cuda::prefill_attention));
}
