// SPDX-License-Identifier: Apache-2.0
// torch.ops.vllm_cuda.gdn_scan: the sequential part of the chunked gated delta rule.
#include "chunk_scan_tensors.h"
#include "gdn_scan.h"

namespace vllm_cuda {

void gdn_scan(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& T, const Tensor& P,
              const Tensor& rows, Tensor out, Tensor states, const Tensor& state_indices,
              const Tensor& has_initial_state, const Tensor& query_start_loc,
              const Tensor& chunk_offsets) {
  const chunk_scan::Tensors tensors{
      v, T, P, rows, out, states,
      state_indices, has_initial_state, query_start_loc, chunk_offsets};
  tensors.check("rows", 4, chunk_scan::kChunkTokens);
  chunk_scan::check_tokens("q", q, tensors.tokens(), q.size(1));
  chunk_scan::check_tokens("k", k, tensors.tokens(), q.size(1));
  if (v.size(1) % k.size(1) != 0) reject("k", k, "have heads as q and v do");
  if (tensors.empty()) return;
  const ChunkScanLaunch launch = tensors.launch();
  const torch::stable::accelerator::DeviceGuard guard(launch.device);
  GdnScanArgs args{};
  tensors.fill(args);
  args.q = q.data_ptr();
  args.k = k.data_ptr();
  args.q_stride = q.stride(0);
  args.k_stride = k.stride(0);
  args.key_heads = static_cast<int>(k.size(1));
  throw_if("gdn_scan", launch_gdn_scan(args, launch));
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
