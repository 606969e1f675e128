// SPDX-License-Identifier: Apache-2.0
// torch.ops.vllm_cuda: both stages of a prefill of Kimi delta attention.
#include <stdexcept>

#include "kda_factors.h"
#include "kda_scan.h"
#include "stable.h"

namespace vllm_cuda {

namespace {

constexpr int64_t kHeadDim = 128, kChunkTokens = 64;

void check_tokens(const char* name, const Tensor& x, int64_t tokens, int64_t heads) {
  if (!x.is_cuda() || x.dim() != 3 || x.scalar_type() != ScalarType::BFloat16 ||
      x.size(0) != tokens || x.size(1) != heads || x.size(2) != kHeadDim || x.stride(2) != 1 ||
      x.stride(1) != kHeadDim || x.stride(0) % 8 != 0 || !aligned(x)) {
    reject(name, x, "be bfloat16 [tokens, heads, 128] with dense heads and 16-byte aligned rows");
  }
}

void check_parameter(const char* name, const Tensor& x, int64_t elements) {
  if (!x.is_cuda() || x.scalar_type() != ScalarType::Float || x.numel() != elements ||
      !x.is_contiguous() || !aligned(x)) {
    reject(name, x, "be dense float32: A_log [heads], dt_bias [heads, 128]");
  }
}

// Of every chunk and head `rows` rows of `columns`.
void check_factors(const char* name, const Tensor& x, int64_t chunks, int64_t heads, int64_t rows,
                   int64_t columns, ScalarType dtype) {
  if (!x.is_cuda() || x.dim() != 4 || x.scalar_type() != dtype || !x.is_contiguous() ||
      x.size(0) != chunks || x.size(1) != heads || x.size(2) != rows || x.size(3) != columns ||
      !aligned(x)) {
    reject(name, x, "be the dense factors [chunks, heads, rows, columns] of each chunk");
  }
}

void check_all_factors(const Tensor& queries, const Tensor& keys, const Tensor& ends,
                       const Tensor& T, const Tensor& P, const Tensor& decays, int64_t chunks,
                       int64_t heads) {
  constexpr ScalarType bf16 = ScalarType::BFloat16;
  check_factors("queries", queries, chunks, heads, kChunkTokens, kHeadDim, bf16);
  check_factors("keys", keys, chunks, heads, kChunkTokens, kHeadDim, bf16);
  check_factors("ends", ends, chunks, heads, kChunkTokens, kHeadDim, bf16);
  check_factors("T", T, chunks, heads, kChunkTokens, kChunkTokens, bf16);
  check_factors("P", P, chunks, heads, kChunkTokens, kChunkTokens, bf16);
  check_factors("decays", decays, chunks, heads, 1, kHeadDim, ScalarType::Float);
}

void check_batch(const char* name, const Tensor& x, int64_t entries, ScalarType dtype) {
  if (!x.is_cuda() || x.dim() != 1 || x.scalar_type() != dtype || x.size(0) < entries ||
      x.stride(0) != 1) {
    reject(name, x, "list the sequences, dense");
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

void throw_if(const char* error, const char* op) {
  if (error != nullptr) throw std::runtime_error(std::string("vllm_cuda: ") + op + ": " + error);
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
  check_all_factors(queries, keys, ends, T, P, decays, chunks, heads);
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
  args.num_chunks = static_cast<int>(chunks);
  args.heads = static_cast<int>(heads);
  args.scale = static_cast<float>(scale);
  throw_if(launch_kda_factors(args, device, current_stream(device)), "kda_factors");
}

void kda_scan(const Tensor& v, const Tensor& queries, const Tensor& keys, const Tensor& ends,
              const Tensor& T, const Tensor& P, const Tensor& decays, Tensor out, Tensor states,
              const Tensor& state_indices, const Tensor& has_initial_state,
              const Tensor& query_start_loc, const Tensor& chunk_offsets) {
  const int64_t tokens = v.size(0), heads = v.size(1), chunks = T.size(0);
  const int64_t sequences = state_indices.size(0);
  check_tokens("v", v, tokens, heads);
  check_tokens("out", out, tokens, heads);
  check_all_factors(queries, keys, ends, T, P, decays, chunks, heads);
  check_states(states, heads);
  check_batch("state_indices", state_indices, 0, ScalarType::Int);
  check_batch("has_initial_state", has_initial_state, sequences, ScalarType::Bool);
  check_batch("query_start_loc", query_start_loc, sequences + 1, ScalarType::Int);
  check_batch("chunk_offsets", chunk_offsets, sequences, ScalarType::Int);
  if (chunks == 0 || sequences == 0) return;
  const int32_t device = v.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  KdaScanArgs args{};
  args.v = v.data_ptr();
  args.out = out.data_ptr();
  args.v_stride = v.stride(0);
  args.out_stride = out.stride(0);
  args.queries = queries.data_ptr();
  args.keys = keys.data_ptr();
  args.ends = ends.data_ptr();
  args.T = T.data_ptr();
  args.P = P.data_ptr();
  args.decays = static_cast<const float*>(decays.data_ptr());
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
  KdaScanLaunch launch{};
  launch.wide_states = states.scalar_type() == ScalarType::Float;
  launch.device = device;
  launch.stream = current_stream(device);
  throw_if(launch_kda_scan(args, launch), "kda_scan");
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
