// SPDX-License-Identifier: Apache-2.0
// Launch of prefills of Kimi delta attention.
#include "hopper/kda_prefill.cuh"

#include "hopper/tensor_map.h"
#include "launch.h"

namespace vllm_cuda {

namespace {

template <auto KERNEL, typename Shared>
const char* launch(unsigned threads, dim3 ctas, bool overlap, const kda_prefill::Maps& maps,
                   const KdaPrefillArgs& args, int device, void* stream) {
  static_assert(sizeof(Shared) <= kMaxSharedBytes);
  const cudaError_t error = allow_shared_memory<KERNEL>(device);
  if (error != cudaSuccess) return describe(error);
  return launch_kernel<KERNEL>({ctas, threads, sizeof(Shared), stream, overlap}, maps, args);
}

template <int GROUPS, bool HANDED>
const char* launch_scan(const kda_prefill::Maps& maps, const KdaPrefillArgs& args,
                        bool wide_states, int device, void* stream) {
  using kda_prefill::kernel;
  constexpr auto wide = kernel<GROUPS, HANDED, float>;
  constexpr auto narrow = kernel<GROUPS, HANDED, __nv_bfloat16>;
  constexpr auto run_wide = launch<wide, kda_prefill::Shared<GROUPS>>;
  constexpr auto run_narrow = launch<narrow, kda_prefill::Shared<GROUPS>>;
  const dim3 ctas(args.heads * 2 / GROUPS, args.sequences);
  return (wide_states ? run_wide : run_narrow)(kda_prefill::THREADS<GROUPS, HANDED>, ctas, HANDED,
                                               maps, args, device, stream);
}

const char* launch_helpers(const kda_prefill::Maps& maps, const KdaPrefillArgs& args, int device,
                           void* stream) {
  return launch<kda_prefill::help, kda_prefill::HelperShared>(
      kda_prefill::HELPER_THREADS, dim3(args.helpers), false, maps, args, device, stream);
}

}  // namespace

const char* launch_kda_prefill(const KdaPrefillArgs& args, bool wide_states, int device,
                               void* stream) {
  kda_prefill::Maps maps;
  using kda_prefill::CHUNK, kda_prefill::HALF;
  const auto tokens = [&args](const void* data, int64_t stride) {
    return Matrices{data, args.tokens, 2 * args.heads, stride, HALF};
  };
  int count = 0;
  const cudaError_t error = multiprocessors(device, count);
  if (error != cudaSuccess) return describe(error);
  // Bits do not depend on it: rows of the state do not meet. Both halves share the operands, which
  // pays once there are more of them than multiprocessors.
  const bool halves = int64_t{2} * args.heads * args.sequences <= count;
  const int groups = args.helpers > 0 || halves ? 1 : 2;
  const auto bytes = [](int64_t elements) { return static_cast<cuuint64_t>(elements) * 2; };
  const cuuint64_t heads = args.heads;
  const char* wrong = encode_boxes<4>(
      maps.queries_keys, args.qkv, {HALF, static_cast<cuuint64_t>(args.tokens), 2, 2 * heads},
      {bytes(args.qkv_stride), bytes(args.heads * kda_prefill::DIM), bytes(HALF)},
      {HALF, CHUNK, 2, 1});
  const void* values = static_cast<const __nv_bfloat16*>(args.qkv) + 2 * heads * kda_prefill::DIM;
  if (wrong == nullptr) wrong = encode_map(maps.a, tokens(args.a, args.a_stride), 1, CHUNK);
  if (wrong == nullptr) wrong = encode_map(maps.v, tokens(values, args.qkv_stride), groups, CHUNK);
  const Matrix out{args.out, args.tokens, args.heads * kda_prefill::DIM, args.out_stride};
  if (wrong == nullptr) wrong = encode_map(maps.out, out, Box{CHUNK, kda_prefill::PART, true});
  if (wrong != nullptr) return wrong;
  if (args.helpers > 0) {
    wrong = launch_helpers(maps, args, device, stream);
    return wrong ? wrong : launch_scan<1, true>(maps, args, wide_states, device, stream);
  }
  return groups == 1 ? launch_scan<1, false>(maps, args, wide_states, device, stream)
                     : launch_scan<2, false>(maps, args, wide_states, device, stream);
}

}  // namespace vllm_cuda
