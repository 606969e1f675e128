// SPDX-License-Identifier: Apache-2.0
// Tensors that ranks sum: what their bytes are to the kernels.
#pragma once

#include "peers.h"
#include "stable.h"

namespace vllm_cuda {

// Throws for a dtype that is not summed; `name` is the argument's.
SumType sum_type(const char* name, const Tensor& x);

int64_t bytes_of(const Tensor& x, SumType type);

}  // namespace vllm_cuda
