// SPDX-License-Identifier: Apache-2.0
// torch.ops.vllm_cuda: attention of few queries to a paged cache of latents.
#include <stdexcept>

#include "latent_attention.h"
#include "paged_tensors.h"

namespace vllm_cuda {

namespace {

constexpr auto kBf16 = ScalarType::BFloat16;

// Whether rows of adjacent elements lie at multiples of 16 bytes.
bool at_16_bytes(const Tensor& rows) {
  return rows.stride(2) == 1 && rows.stride(0) % 8 == 0 && rows.stride(1) % 8 == 0 && aligned(rows);
}

void latent_attention(const Tensor& query, const Tensor& shared, const Tensor& cache,
                      const Tensor& block_table, const Tensor& seq_lens,
                      const Tensor& query_start_loc, const Tensor& out, OptTensor part,
                      OptTensor lse, int64_t max_query_len, int64_t rows, int64_t splits,
                      int64_t split_keys, double scale) {
  if (query.dim() != 3) reject("query", query, "be [heads, tokens, 512]");
  const int64_t heads = query.size(0), tokens = query.size(1), num_seqs = seq_lens.size(0);
  need(is(query, kBf16, {heads, tokens, kLatentDims}) && at_16_bytes(query), "query", query,
       "be bfloat16 [heads, tokens, 512], rows at 16 bytes");
  need(is(shared, kBf16, {tokens, heads, kLatentShared}) && at_16_bytes(shared), "shared", shared,
       "be bfloat16 [tokens, heads, 64], rows at 16 bytes");
  need(is(out, kBf16, {heads, tokens, kLatentDims}) && at_16_bytes(out), "out", out,
       "be bfloat16 [heads, tokens, 512], rows at 16 bytes");
  need(cache.is_cuda() && cache.scalar_type() == kBf16 && cache.dim() == 3 &&
           cache.size(1) % 16 == 0 && cache.size(2) == kLatentDims + kLatentShared &&
           cache.stride(2) == 1 && cache.stride(1) == cache.size(2) && cache.stride(0) % 8 == 0 &&
           aligned(cache),
       "cache", cache,
       "be bfloat16 [blocks, multiple of 16, 576], its blocks dense and at 16 bytes");
  check_lengths(num_seqs, block_table, seq_lens, query_start_loc);
  if (splits < 1 || split_keys < 1 || max_query_len < 1) {
    throw std::runtime_error("vllm_cuda: shares and queries have at least one key and token");
  }
  if (rows != 32 && rows != 64) throw std::runtime_error("vllm_cuda: tiles have 32 or 64 rows");
  if (splits > 1) {
    if (!part || !lse) throw std::runtime_error("vllm_cuda: shares need memory");
    constexpr auto f32 = ScalarType::Float;
    need(is(*part, f32, {tokens, heads, splits, kLatentDims}) && part->is_contiguous(), "part",
         *part, "be dense float32 [tokens, heads, splits, 512]");
    need(is(*lse, f32, {tokens, heads, splits}) && lse->is_contiguous(), "lse", *lse,
         "be dense float32 [tokens, heads, splits]");
  }
  if (tokens == 0 || num_seqs == 0) return;
  LatentAttentionLaunch launch{};
  launch.rows = static_cast<int>(rows);
  launch.max_query_len = static_cast<int>(max_query_len);
  const int64_t tiles = (heads * max_query_len + rows - 1) / rows;
  if (num_seqs * splits * tiles >= int64_t{1} << 30) {
    throw std::runtime_error("vllm_cuda: so many shares are not supported");
  }
  const int32_t device = query.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  LatentAttentionArgs args{};
  args.query = query.data_ptr();
  args.shared = shared.data_ptr();
  args.cache = cache.data_ptr();
  args.table = static_cast<const int*>(block_table.data_ptr());
  args.seq_lens = static_cast<const int*>(seq_lens.data_ptr());
  args.starts = static_cast<const int*>(query_start_loc.data_ptr());
  args.out = out.data_ptr();
  if (splits > 1) {
    args.part = static_cast<float*>(part->data_ptr());
    args.lse = static_cast<float*>(lse->data_ptr());
  }
  args.q_head = query.stride(0);
  args.q_token = query.stride(1);
  args.shared_token = shared.stride(0);
  args.shared_head = shared.stride(1);
  args.out_head = out.stride(0);
  args.out_token = out.stride(1);
  args.block_stride = cache.stride(0);
  args.table_stride = block_table.stride(0);
  args.scale = static_cast<float>(scale);
  args.num_seqs = static_cast<int>(num_seqs);
  args.heads = static_cast<int>(heads);
  args.tiles = static_cast<int>(tiles);
  args.num_blocks = static_cast<int>(cache.size(0));
  args.block_size = static_cast<int>(cache.size(1));
  args.splits = static_cast<int>(splits);
  args.split_keys = static_cast<int>(split_keys);
  launch.device = device;
  launch.stream = current_stream(device);
  throw_if("latent attention", launch_latent_attention(args, launch));
}

}  // namespace

}  // namespace vllm_cuda

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cuda, m) {
  m.def(
      "latent_attention(Tensor query, Tensor shared, Tensor cache, Tensor block_table,"
      " Tensor seq_lens, Tensor query_start_loc, Tensor(a!) out, Tensor(b!)? part,"
      " Tensor(c!)? lse, int max_query_len, int rows, int splits, int split_keys, float scale)"
      " -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cuda, CUDA, m) {
  m.impl("latent_attention", TORCH_BOX(&vllm_cuda::latent_attention));
}
