// SPDX-License-Identifier: Apache-2.0
#include "ops.h"
#include "table.h"

namespace vllm_cpu {

namespace {

const float* floats_of(const Tensor& tensor, Sizes sizes, Arg arg) {
  if (float_dtype(tensor, arg) != DType::kF32) reject(arg, tensor, "must be float32");
  check_shape(tensor, sizes, static_cast<int64_t>(sizes.size()), arg);
  return static_cast<const float*>(tensor.data_ptr());
}

ReadStreamsArgs read_args(
    const char* op, const Tensor& streams, const Tensor& weight, const Tensor& base,
    const Tensor& scale, double norm_eps, double eps, bool connects) {
  ReadStreamsArgs args;
  args.dtype = float_dtype(streams, {op, "streams"});
  check_shape(streams, {-1, -1, -1}, 3, {op, "streams"});
  args.streams = streams.data_ptr();
  args.tokens = streams.size(0);
  args.num_streams = streams.size(1);
  args.hidden = streams.size(2);
  const int64_t n = args.num_streams, outputs = connects ? (2 + n) * n : n;
  args.weight = floats_of(weight, {outputs, n * args.hidden}, {op, "weight"});
  args.base = floats_of(base, {outputs}, {op, "base"});
  args.scale = floats_of(scale, {connects ? 3 : 1}, {op, "scale"});
  args.norm_eps = static_cast<float>(norm_eps);
  args.eps = static_cast<float>(eps);
  return args;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> connect_streams(
    const Tensor& streams, const Tensor& weight, const Tensor& base, const Tensor& scale,
    double norm_eps, double eps, int64_t iterations) {
  ReadStreamsArgs args =
      read_args("connect_streams", streams, weight, base, scale, norm_eps, eps, true);
  args.iterations = iterations;
  const int64_t n = args.num_streams;
  Tensor out = empty({args.tokens, args.hidden}, streams);
  Tensor post = empty({args.tokens, n}, weight), mix = empty({args.tokens, n, n}, weight);
  args.out = out.data_ptr();
  args.post = static_cast<float*>(post.data_ptr());
  args.mix = static_cast<float*>(mix.data_ptr());
  if (args.tokens) kernels().read_streams(args);
  return {out, post, mix};
}

Tensor collapse_streams(
    const Tensor& streams, const Tensor& weight, const Tensor& base, const Tensor& scale,
    double norm_eps, double eps) {
  ReadStreamsArgs args =
      read_args("collapse_streams", streams, weight, base, scale, norm_eps, eps, false);
  Tensor out = empty({args.tokens, args.hidden}, streams);
  args.out = out.data_ptr();
  if (args.tokens) kernels().read_streams(args);
  return out;
}

Tensor join_streams(
    const Tensor& streams, const Tensor& branch, const Tensor& post, const Tensor& mix) {
  constexpr const char* op = "join_streams";
  JoinStreamsArgs args;
  args.dtype = float_dtype(streams, {op, "streams"});
  check_shape(streams, {-1, -1, -1}, 3, {op, "streams"});
  args.streams = streams.data_ptr();
  args.tokens = streams.size(0);
  args.num_streams = streams.size(1);
  args.hidden = streams.size(2);
  const int64_t n = args.num_streams;
  check_dtype(branch, args.dtype, {op, "branch"});
  check_shape(branch, {args.tokens, args.hidden}, 1, {op, "branch"});
  args.branch = branch.data_ptr();
  args.branch_stride = branch.stride(0);
  args.post = floats_of(post, {args.tokens, n}, {op, "post"});
  args.mix = floats_of(mix, {args.tokens, n, n}, {op, "mix"});
  Tensor out = empty({args.tokens, n, args.hidden}, streams);
  args.out = out.data_ptr();
  kernels().join_streams(args);
  return out;
}

}  // namespace vllm_cpu
