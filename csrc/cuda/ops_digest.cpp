// SPDX-License-Identifier: Apache-2.0
// torch.ops.vllm_cuda: XXH3-64 digests.
#include "digest.h"
#include "stable.h"

namespace vllm_cuda {

namespace {

bool dense(const Tensor& tensor, ScalarType dtype) {
  return tensor.is_cuda() && tensor.scalar_type() == dtype && tensor.is_contiguous();
}

// The values of `spans` are on the device and taken on trust.
void xxh3_64(
    const Tensor& data, const Tensor& spans, int64_t num_blocks, const Tensor& sums,
    const Tensor& out) {
  if (!dense(data, ScalarType::Byte) || data.dim() != 1) reject("data", data, "be uint8 [bytes]");
  if (!dense(spans, ScalarType::Long) || spans.dim() != 2 || spans.size(0) != 3 ||
      spans.size(1) >= 1 << 30) {
    reject("spans", spans, "be dense int64 [3, inputs]: starts, sizes, first blocks");
  }
  const int64_t count = spans.size(1);
  if (!dense(sums, ScalarType::Long) || !aligned(sums) || sums.dim() != 2 || sums.size(1) != 8 ||
      num_blocks < 0 || sums.size(0) < num_blocks) {
    reject("sums", sums, "be dense int64 [at least num_blocks, 8]");
  }
  if (!dense(out, ScalarType::Long) || out.dim() != 1 || out.size(0) != count) {
    reject("out", out, "be dense int64 [inputs]");
  }
  if (count == 0) return;
  const int32_t device = data.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  DigestArgs args{};
  args.data = static_cast<const uint8_t*>(data.data_ptr());
  args.starts = static_cast<const int64_t*>(spans.data_ptr());
  args.sizes = args.starts + count;
  args.firsts = args.sizes + count;
  args.sums = static_cast<uint64_t*>(sums.data_ptr());
  args.out = static_cast<uint64_t*>(out.data_ptr());
  args.num_blocks = num_blocks;
  args.count = static_cast<int>(count);
  throw_if("xxh3_64", launch_digest(args, device, current_stream(device)));
}

}  // namespace

}  // namespace vllm_cuda

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cuda, m) {
  m.def(
      "xxh3_64(Tensor data, Tensor spans, int num_blocks, Tensor(a!) sums, Tensor(b!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cuda, CUDA, m) {
  m.impl("xxh3_64", TORCH_BOX(&vllm_cuda::xxh3_64));
}
