// SPDX-License-Identifier: Apache-2.0
#include "ops.h"
#include "table.h"

namespace vllm_cpu {

namespace {

Streams streams_of(const Tensor& streams, Arg arg) {
  const DType dtype = float_dtype(streams, arg);
  check_shape(streams, {-1, -1, -1}, 3, arg);
  return {dtype, streams.data_ptr(), streams.size(0), streams.size(1), streams.size(2)};
}

ReadStreamsArgs read_args(
    const char* op, const Tensor& streams, const Tensor& weight, const Tensor& base,
    const Tensor& scale, double norm_eps, double eps, bool connects) {
  ReadStreamsArgs args;
  args.streams = streams_of(streams, {op, "streams"});
  const int64_t n = args.streams.count, outputs = connects ? (2 + n) * n : n;
  args.weight = floats_of(weight, {outputs, n * args.streams.hidden}, 2, {op, "weight"});
  args.base = floats_of(base, {outputs}, 1, {op, "base"});
  args.scale = floats_of(scale, {connects ? 3 : 1}, 1, {op, "scale"});
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
  const int64_t tokens = args.streams.tokens, n = args.streams.count;
  Tensor out = empty({tokens, args.streams.hidden}, streams);
  Tensor post = empty({tokens, n}, weight), mix = empty({tokens, n, n}, weight);
  args.out = out.data_ptr();
  args.post = static_cast<float*>(post.data_ptr());
  args.mix = static_cast<float*>(mix.data_ptr());
  if (tokens) kernels().read_streams(args);
  return {out, post, mix};
}

Tensor collapse_streams(
    const Tensor& streams, const Tensor& weight, const Tensor& base, const Tensor& scale,
    double norm_eps, double eps) {
  ReadStreamsArgs args =
      read_args("collapse_streams", streams, weight, base, scale, norm_eps, eps, false);
  Tensor out = empty({args.streams.tokens, args.streams.hidden}, streams);
  args.out = out.data_ptr();
  if (args.streams.tokens) kernels().read_streams(args);
  return out;
}

Tensor join_streams(
    const Tensor& streams, const Tensor& branch, const Tensor& post, const Tensor& mix) {
  constexpr const char* op = "join_streams";
  JoinStreamsArgs args;
  args.streams = streams_of(streams, {op, "streams"});
  const int64_t tokens = args.streams.tokens, n = args.streams.count;
  check_dtype(branch, args.streams.dtype, {op, "branch"});
  check_shape(branch, {tokens, args.streams.hidden}, 1, {op, "branch"});
  args.branch = branch.data_ptr();
  args.branch_stride = branch.stride(0);
  args.post = floats_of(post, {tokens, n}, 2, {op, "post"});
  args.mix = floats_of(mix, {tokens, n, n}, 3, {op, "mix"});
  Tensor out = empty({tokens, n, args.streams.hidden}, streams);
  args.out = out.data_ptr();
  kernels().join_streams(args);
  return out;
}

}  // namespace vllm_cpu
