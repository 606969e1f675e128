// SPDX-License-Identifier: Apache-2.0
// torch.ops.vllm_cuda.gdn_scan: the sequential part of the chunked gated delta rule.
#include <stdexcept>

#include "gdn_scan.h"
#include "stable.h"

namespace vllm_cuda {

namespace {

constexpr int64_t kHeadDim = 128, kChunkTokens = 64;

void check_tokens(const char* name, const Tensor& x, int64_t tokens) {
  if (!x.is_cuda() || x.dim() != 3 || x.scalar_type() != ScalarType::BFloat16 ||
      x.size(0) != tokens || x.size(1) == 0 || x.size(2) != kHeadDim || x.stride(2) != 1 ||
      x.stride(1) != kHeadDim || x.stride(0) % 8 != 0 || !aligned(x)) {
    reject(name, x, "be bfloat16 [tokens, heads, 128] with dense heads and 16-byte aligned rows");
  }
}

void check_factors(const char* name, const Tensor& x, int64_t chunks, int64_t heads, int64_t rows,
                   ScalarType dtype) {
  if (!x.is_cuda() || x.dim() != 4 || x.scalar_type() != dtype || !x.is_contiguous() ||
      x.size(0) != chunks || x.size(1) != heads || x.size(2) != rows ||
      x.size(3) != kChunkTokens || !aligned(x)) {
    reject(name, x, "be the dense factors [chunks, heads, rows, 64] of each chunk");
  }
}

void check_states(const Tensor& states, int64_t heads) {
  const ScalarType dtype = states.scalar_type();
  const bool typed = dtype == ScalarType::Float || dtype == ScalarType::BFloat16;
  if (!states.is_cuda() || !typed || states.dim() != 4 || states.size(1) != heads ||
      states.size(2) != kHeadDim || states.size(3) != kHeadDim || states.stride(3) != 1 ||
      states.stride(2) != kHeadDim || states.stride(1) != kHeadDim * kHeadDim ||
      states.stride(0) % 8 != 0 || !aligned(states)) {
    reject("states", states, "be float32 or bfloat16 [blocks, heads, 128, 128], dense blocks");
  }
}

void check_batch(const char* name, const Tensor& x, int64_t entries, ScalarType dtype) {
  if (!x.is_cuda() || x.dim() != 1 || x.scalar_type() != dtype || x.size(0) < entries ||
      x.stride(0) != 1) {
    reject(name, x, "list the sequences, dense");
  }
}

}  // namespace

void gdn_scan(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& T, const Tensor& P,
              const Tensor& rows, Tensor out, Tensor states, const Tensor& state_indices,
              const Tensor& has_initial_state, const Tensor& query_start_loc,
              const Tensor& chunk_offsets) {
  const int64_t tokens = q.size(0), heads = v.size(1), chunks = T.size(0);
  const int64_t sequences = state_indices.size(0);
  check_tokens("q", q, tokens);
  check_tokens("k", k, tokens);
  check_tokens("v", v, tokens);
  check_tokens("out", out, tokens);
  if (k.size(1) != q.size(1) || heads % k.size(1) != 0) reject("k", k, "have heads as q and v do");
  if (out.size(1) != heads) reject("out", out, "have v's shape");
  check_factors("T", T, chunks, heads, kChunkTokens, ScalarType::BFloat16);
  check_factors("P", P, chunks, heads, kChunkTokens, ScalarType::BFloat16);
  check_factors("rows", rows, chunks, heads, 4, ScalarType::Float);
  check_states(states, heads);
  check_batch("state_indices", state_indices, 0, ScalarType::Int);
  check_batch("has_initial_state", has_initial_state, sequences, ScalarType::Bool);
  check_batch("query_start_loc", query_start_loc, sequences + 1, ScalarType::Int);
  check_batch("chunk_offsets", chunk_offsets, sequences, ScalarType::Int);
  if (chunks == 0 || sequences == 0) return;
  const int32_t device = q.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  GdnScanArgs args{};
  args.q = q.data_ptr();
  args.k = k.data_ptr();
  args.v = v.data_ptr();
  args.out = out.data_ptr();
  args.q_stride = q.stride(0);
  args.k_stride = k.stride(0);
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
  args.tokens = tokens;
  args.chunks = chunks;
  args.sequences = static_cast<int>(sequences);
  args.heads = static_cast<int>(heads);
  args.key_heads = static_cast<int>(k.size(1));
  GdnScanLaunch launch{};
  launch.wide_states = states.scalar_type() == ScalarType::Float;
  launch.device = device;
  launch.stream = current_stream(device);
  const char* error = launch_gdn_scan(args, launch);
  if (error != nullptr) throw std::runtime_error(std::string("vllm_cuda: gdn_scan: ") + error);
}

}  // namespace vllm_cuda

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cuda, m) {
  m.def(
      "gdn_scan(Tensor q, Tensor k, Tensor v, Tensor T, Tensor P, Tensor rows, Tensor(a!) out,"
      " Tensor(b!) states, Tensor state_indices, Tensor has_initial_state, Tensor query_start_loc,"
      " Tensor chunk_offsets) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cuda, CUDA, m) {
  m.impl("gdn_scan", TORCH_BOX(&vllm_cuda::gdn_scan));
}
