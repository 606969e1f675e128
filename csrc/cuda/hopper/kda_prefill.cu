// SPDX-License-Identifier: Apache-2.0
// Launch of prefills of Kimi delta attention.
#include "hopper/kda_prefill.cuh"

#include "hopper/tensor_map.h"
#include "launch.h"

namespace vllm_cuda {

namespace {

template <int GROUPS, typename State>
const char* launch_typed(const kda_prefill::Maps& maps, const KdaPrefillArgs& args, int device,
                         void* stream) {
  constexpr auto kernel = kda_prefill::kernel<GROUPS, State>;
  const cudaError_t error = allow_shared_memory<kernel>(device);
  if (error != cudaSuccess) return describe(error);
  const dim3 ctas(args.heads * 2 / GROUPS, args.sequences);
  const size_t bytes = sizeof(kda_prefill::Shared<GROUPS>);
  static_assert(sizeof(kda_prefill::Shared<GROUPS>) <= kMaxSharedBytes);
  return launch_kernel<kernel>({ctas, kda_prefill::THREADS<GROUPS>, bytes, stream}, maps, args);
}

template <int GROUPS>
const char* launch(const kda_prefill::Maps& maps, const KdaPrefillArgs& args, bool wide_states,
                   int device, void* stream) {
  return wide_states ? launch_typed<GROUPS, float>(maps, args, device, stream)
                     : launch_typed<GROUPS, __nv_bfloat16>(maps, args, device, stream);
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
  const int groups = int64_t{2} * args.heads * args.sequences <= count ? 1 : 2;
  const auto bytes = [](int64_t elements) { return static_cast<cuuint64_t>(elements) * 2; };
  const cuuint64_t heads = args.heads;
  const char* wrong = encode_boxes<4>(
      maps.queries_keys, args.qkv, {HALF, static_cast<cuuint64_t>(args.tokens), 2, 2 * heads},
      {bytes(args.qkv_stride), bytes(args.heads * kda_prefill::DIM), bytes(HALF)}, {HALF, CHUNK, 2, 1});
  const void* values = static_cast<const __nv_bfloat16*>(args.qkv) + 2 * heads * kda_prefill::DIM;
  if (wrong == nullptr) wrong = encode_map(maps.a, tokens(args.a, args.a_stride), 1, CHUNK);
  if (wrong == nullptr) wrong = encode_map(maps.v, tokens(values, args.qkv_stride), groups, CHUNK);
  if (wrong != nullptr) return wrong;
  return groups == 1 ? launch<1>(maps, args, wide_states, device, stream)
                     : launch<2>(maps, args, wide_states, device, stream);
}

}  // namespace vllm_cuda
