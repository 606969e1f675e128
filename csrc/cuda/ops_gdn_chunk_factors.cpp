// SPDX-License-Identifier: Apache-2.0
// torch.ops.vllm_cuda: the chunk factors of the gated delta rule.
#include <stdexcept>

#include "gdn_chunk_factors.h"
#include "stable.h"

namespace vllm_cuda {

namespace {

constexpr int64_t kChunk = 64, kHeadDim = 128;

void check_vectors(const char* name, const Tensor& x, const Tensor& k) {
  if (!x.is_cuda() || x.dim() != 3 || x.scalar_type() != ScalarType::BFloat16 ||
      x.size(2) != kHeadDim || x.stride(2) != 1 || x.stride(1) != kHeadDim ||
      x.stride(0) % 8 != 0 || !aligned(x) || x.size(0) != k.size(0) || x.size(1) != k.size(1)) {
    reject(name, x, "be bfloat16 [tokens, k heads, 128] with dense heads, 16-byte aligned");
  }
}

void check_gates(const char* name, const Tensor& x, const Tensor& k) {
  const ScalarType dtype = x.scalar_type();
  if (!x.is_cuda() || x.dim() != 2 || x.size(0) != k.size(0) || x.size(1) % k.size(1) != 0 ||
      x.size(1) == 0 || x.stride(1) != 1 ||
      (dtype != ScalarType::BFloat16 && dtype != ScalarType::Float)) {
    reject(name, x, "be bfloat16 or float32 [tokens, v heads], a multiple of the k heads");
  }
}

void check_heads(const char* name, const Tensor& x, int64_t heads) {
  if (!x.is_cuda() || x.dim() != 1 || x.size(0) != heads || x.scalar_type() != ScalarType::Float ||
      !x.is_contiguous()) {
    reject(name, x, "be dense float32 [v heads]");
  }
}

void check_table(const char* name, const Tensor& x, bool right) {
  if (!right || !x.is_cuda() || x.scalar_type() != ScalarType::Int || !x.is_contiguous()) {
    reject(name, x, "be dense int32: query_start_loc [sequences + 1], chunk_indices [chunks, 2]");
  }
}

void check_result(const char* name, const Tensor& x, ScalarType dtype, int64_t chunks,
                  int64_t heads, int64_t rows) {
  if (!x.is_cuda() || x.dim() != 4 || x.scalar_type() != dtype || !x.is_contiguous() ||
      !aligned(x) || x.size(0) != chunks || x.size(1) != heads || x.size(2) != rows ||
      x.size(3) != kChunk) {
    reject(name, x, "be dense: T, P bfloat16 [chunks, v heads, 64, 64], rows float32 [.., 4, 64]");
  }
}

void gdn_chunk_factors(
    const Tensor& q, const Tensor& k, const Tensor& a, const Tensor& b, OptTensor A_log,
    OptTensor dt_bias, const Tensor& query_start_loc, const Tensor& chunk_indices, double scale,
    bool l2norm, Tensor T, Tensor P, Tensor rows) {
  check_vectors("k", k, k);
  check_vectors("q", q, k);
  check_gates("a", a, k);
  check_gates("b", b, k);
  const int64_t heads = a.size(1);
  if (b.size(1) != heads) reject("b", b, "have as many heads as a");
  if (A_log.has_value() != dt_bias.has_value()) {
    throw std::runtime_error("vllm_cuda: A_log and dt_bias are given both or neither");
  }
  if (A_log) check_heads("A_log", *A_log, heads);
  if (dt_bias) check_heads("dt_bias", *dt_bias, heads);
  check_table("query_start_loc", query_start_loc, query_start_loc.dim() == 1);
  check_table("chunk_indices", chunk_indices,
              chunk_indices.dim() == 2 && chunk_indices.size(1) == 2);
  const int64_t chunks = chunk_indices.size(0);
  check_result("T", T, ScalarType::BFloat16, chunks, heads, kChunk);
  check_result("P", P, ScalarType::BFloat16, chunks, heads, kChunk);
  check_result("rows", rows, ScalarType::Float, chunks, heads, 4);
  if (chunks == 0) return;

  const int32_t device = k.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  ChunkFactorsArgs args{};
  args.q = q.data_ptr();
  args.k = k.data_ptr();
  args.a = a.data_ptr();
  args.b = b.data_ptr();
  args.A_log = A_log ? static_cast<const float*>(A_log->data_ptr()) : nullptr;
  args.dt_bias = dt_bias ? static_cast<const float*>(dt_bias->data_ptr()) : nullptr;
  args.starts = static_cast<const int32_t*>(query_start_loc.data_ptr());
  args.chunks = static_cast<const int32_t*>(chunk_indices.data_ptr());
  args.T = T.data_ptr();
  args.P = P.data_ptr();
  args.rows = static_cast<float*>(rows.data_ptr());
  args.q_stride = q.stride(0);
  args.k_stride = k.stride(0);
  args.a_stride = a.stride(0);
  args.b_stride = b.stride(0);
  args.num_chunks = static_cast<int>(chunks);
  args.k_heads = static_cast<int>(k.size(1));
  args.group = static_cast<int>(heads / k.size(1));
  args.scale = static_cast<float>(scale);
  args.l2norm = l2norm;
  args.a_is_float = a.scalar_type() == ScalarType::Float;
  args.b_is_float = b.scalar_type() == ScalarType::Float;
  throw_if("chunk factors", launch_chunk_factors(args, current_stream(device)));
}

}  // namespace

}  // namespace vllm_cuda

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cuda, m) {
  m.def(
      "gdn_chunk_factors(Tensor q, Tensor k, Tensor a, Tensor b, Tensor? A_log, Tensor? dt_bias,"
      " Tensor query_start_loc, Tensor chunk_indices, float scale, bool l2norm, Tensor(a!) T,"
      " Tensor(b!) P, Tensor(c!) rows) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cuda, CUDA, m) {
  m.impl("gdn_chunk_factors", TORCH_BOX(&vllm_cuda::gdn_chunk_factors));
}
