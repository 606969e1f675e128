// SPDX-License-Identifier: Apache-2.0
#include "../xxh3.h"
#include "ops.h"
#include "table.h"

namespace vllm_cpu {

using vllm_xxh3::kShort;

void xxh3_64(const Tensor& data, const Tensor& starts, const Tensor& sizes, const Tensor& out) {
  constexpr const char* op = "xxh3_64";
  check_uint8(data, {op, "data"});
  check_shape(data, {-1}, 1, {op, "data"});
  check_shape(starts, {-1}, 1, {op, "starts"});
  DigestArgs args;
  args.count = starts.size(0);
  args.data = static_cast<const uint8_t*>(data.data_ptr());
  args.starts = int64_vector(starts, args.count, {op, "starts"});
  args.sizes = int64_vector(sizes, args.count, {op, "sizes"});
  for (int64_t i = 0; i < args.count; ++i) {
    const int64_t start = args.starts[i], size = args.sizes[i];
    STD_TORCH_CHECK(size > kShort, op, ": sizes must be above ", kShort, ", got ", size);
    STD_TORCH_CHECK(
        start >= 0 && size <= data.size(0) - start, op, ": bytes ", start, " to ", start + size,
        " are not in data of ", data.size(0));
  }
  int64_vector(out, args.count, {op, "out"});
  args.out = static_cast<uint64_t*>(out.data_ptr());
  kernels().xxh3_64(args);
}

}  // namespace vllm_cpu
