// SPDX-License-Identifier: Apache-2.0
// torch.ops.vllm_cuda: both stages of a prefill of Kimi delta attention.
#include "chunk_scan_tensors.h"
#include "kda_factors.h"
#include "kda_scan.h"

namespace vllm_cuda {

namespace {

using namespace chunk_scan;

void check_heads(const Tensor& queries, const Tensor& keys, const Tensor& ends, int64_t chunks,
                 int64_t heads) {
  constexpr ScalarType bf16 = ScalarType::BFloat16;
  check_factors("queries", queries, chunks, heads, kChunkTokens, kHeadDim, bf16);
  check_factors("keys", keys, chunks, heads, kChunkTokens, kHeadDim, bf16);
  check_factors("ends", ends, chunks, heads, kChunkTokens, kHeadDim, bf16);
}

}  // namespace

void kda_factors(const Tensor& q, const Tensor& k, const Tensor& a, const Tensor& b,
                 const Tensor& A_log, const Tensor& dt_bias, const Tensor& query_start_loc,
                 const Tensor& chunk_indices, double scale, Tensor queries, Tensor keys,
                 Tensor ends, Tensor T, Tensor P, Tensor decays) {
  const int64_t tokens = q.size(0), heads = q.size(1), chunks = chunk_indices.size(0);
  check_tokens("q", q, tokens, heads);
  check_tokens("k", k, tokens, heads);
  check_tokens("a", a, tokens, heads);
  if (!b.is_cuda() || b.dim() != 2 || b.scalar_type() != ScalarType::BFloat16 ||
      b.size(0) != tokens || b.size(1) != heads || b.stride(1) != 1) {
    reject("b", b, "be bfloat16 [tokens, heads]");
  }
  check_parameter("A_log", A_log, heads);
  check_parameter("dt_bias", dt_bias, heads * kHeadDim);
  check_batch("query_start_loc", query_start_loc, 0, ScalarType::Int);
  if (!chunk_indices.is_cuda() || chunk_indices.dim() != 2 || chunk_indices.size(1) != 2 ||
      chunk_indices.scalar_type() != ScalarType::Int || !chunk_indices.is_contiguous()) {
    reject("chunk_indices", chunk_indices, "be dense int32 [chunks, 2]");
  }
  check_heads(queries, keys, ends, chunks, heads);
  check_factors("T", T, chunks, heads, kChunkTokens, kChunkTokens, ScalarType::BFloat16);
  check_factors("P", P, chunks, heads, kChunkTokens, kChunkTokens, ScalarType::BFloat16);
  check_factors("decays", decays, chunks, heads, 1, kHeadDim, ScalarType::Float);
  if (chunks == 0) return;
  const int32_t device = q.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  KdaFactorsArgs args{};
  args.q = q.data_ptr();
  args.k = k.data_ptr();
  args.a = a.data_ptr();
  args.b = b.data_ptr();
  args.A_log = static_cast<const float*>(A_log.data_ptr());
  args.dt_bias = static_cast<const float*>(dt_bias.data_ptr());
  args.starts = static_cast<const int32_t*>(query_start_loc.data_ptr());
  args.chunks = static_cast<const int32_t*>(chunk_indices.data_ptr());
  args.queries = queries.data_ptr();
  args.keys = keys.data_ptr();
  args.ends = ends.data_ptr();
  args.T = T.data_ptr();
  args.P = P.data_ptr();
  args.decays = static_cast<float*>(decays.data_ptr());
  args.q_stride = q.stride(0);
  args.k_stride = k.stride(0);
  args.a_stride = a.stride(0);
  args.b_stride = b.stride(0);
  args.tokens = tokens;
  args.num_chunks = static_cast<int>(chunks);
  args.heads = static_cast<int>(heads);
  args.scale = static_cast<float>(scale);
  throw_if("kda_factors", launch_kda_factors(args, device, current_stream(device)));
}

void kda_scan(const Tensor& v, const Tensor& queries, const Tensor& keys, const Tensor& ends,
              const Tensor& T, const Tensor& P, const Tensor& decays, Tensor out, Tensor states,
              const Tensor& state_indices, const Tensor& has_initial_state,
              const Tensor& query_start_loc, const Tensor& chunk_offsets) {
  const Tensors tensors{
      v, T, P, decays, out, states,
      state_indices, has_initial_state, query_start_loc, chunk_offsets};
  tensors.check("decays", 1, kHeadDim);
  check_heads(queries, keys, ends, tensors.chunks(), tensors.heads());
  if (tensors.empty()) return;
  const ChunkScanLaunch launch = tensors.launch();
  const torch::stable::accelerator::DeviceGuard guard(launch.device);
  KdaScanArgs args{};
  tensors.fill(args);
  args.queries = queries.data_ptr();
  args.keys = keys.data_ptr();
  args.ends = ends.data_ptr();
  throw_if("kda_scan", launch_kda_scan(args, launch));
}

}  // namespace vllm_cuda

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cuda, m) {
  m.def(
      "kda_factors(Tensor q, Tensor k, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias,"
      " Tensor query_start_loc, Tensor chunk_indices, float scale, Tensor(a!) queries,"
      " Tensor(b!) keys, Tensor(c!) ends, Tensor(d!) T, Tensor(e!) P, Tensor(f!) decays) -> ()");
  m.def(
      "kda_scan(Tensor v, Tensor queries, Tensor keys, Tensor ends, Tensor T, Tensor P,"
      " Tensor decays, Tensor(a!) out, Tensor(b!) states, Tensor state_indices,"
      " Tensor has_initial_state, Tensor query_start_loc, Tensor chunk_offsets) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cuda, CUDA, m) {
  m.impl("kda_factors", TORCH_BOX(&vllm_cuda::kda_factors));
  m.impl("kda_scan", TORCH_BOX(&vllm_cuda::kda_scan));
}
