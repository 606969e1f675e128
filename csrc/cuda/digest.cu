// SPDX-License-Identifier: Apache-2.0
// XXH3-64 on the device, after the algorithm's specification (csrc/xxh3.h).
//
// Between two scrambles the accumulators are plain sums modulo 2^64. So all blocks of all inputs
// are summed side by side, which takes as long as reading the data; then one warp per input adds
// its blocks' sums in order and scrambles, some 25 cycles per block.
#include <algorithm>

#include "../xxh3.h"
#include "digest.h"
#include "launch.h"

namespace vllm_cuda {

namespace {

using namespace vllm_xxh3;

constexpr int kThreads = 256;
constexpr int kLanes = 8;
constexpr int kAhead = 16;  // sums that are on their way while as many are added

__constant__ const Secret kDeviceSecret = kSecret;
__constant__ const Initial kDeviceInitial = kInitial;

// Little-endian, at any address.
__device__ uint64_t read64(const uint8_t* p) {
  uint64_t x = 0;
  for (int i = 0; i < 8; ++i) x |= static_cast<uint64_t>(p[i]) << 8 * i;
  return x;
}

__device__ uint64_t secret_at(int byte) { return read64(kDeviceSecret.bytes + byte); }

__device__ uint64_t product(uint64_t key) { return (key & 0xFFFFFFFF) * (key >> 32); }

// The input with block `index` of `sums`: the last whose blocks begin at most there.
__device__ int input_of(const DigestArgs& args, int64_t index) {
  int low = 0, high = args.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (args.firsts[middle] <= index ? low : high) = middle;
  }
  return low;
}

// A warp per block: thread t takes two neighbouring lanes of the stripes t / 4 and t / 4 + 8.
__global__ void __launch_bounds__(kThreads) sum_blocks(const DigestArgs args) {
  const int thread = threadIdx.x % 32, stripe = thread / 4, lane = thread % 4 * 2;
  uint64_t keys[2][2];
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 2; ++i) keys[half][i] = secret_at(8 * (stripe + 8 * half + lane + i));
  }
  const int64_t warps = int64_t{gridDim.x} * (kThreads / 32);
  int64_t block = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  for (; block < args.num_blocks; block += warps) {
    const int input = input_of(args, block);
    const uint8_t* data = args.data + args.starts[input] + (block - args.firsts[input]) * kBlock;
    data += stripe * kStripe + lane * 8;
    const bool aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0;
    uint64_t even = 0, odd = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint8_t* at = data + half * 8 * kStripe;
      const ulonglong2 pair = aligned ? *reinterpret_cast<const ulonglong2*>(at)
                                      : make_ulonglong2(read64(at), read64(at + 8));
      even += pair.y + product(pair.x ^ keys[half][0]);
      odd += pair.x + product(pair.y ^ keys[half][1]);
    }
#pragma unroll
    for (int apart = 4; apart < 32; apart *= 2) {
      even += __shfl_xor_sync(~0u, even, apart);
      odd += __shfl_xor_sync(~0u, odd, apart);
    }
    if (stripe == 0) {
      *reinterpret_cast<ulonglong2*>(args.sums + block * kLanes + lane) =
          make_ulonglong2(even, odd);
    }
  }
}

__device__ uint64_t scrambled(uint64_t lane, uint64_t key) {
  return (lane ^ lane >> 47 ^ key) * kPrime32_1;
}

// What a stripe adds to a lane; `data`: the lane's 8 bytes.
__device__ uint64_t added(const uint8_t* data, uint64_t key) {
  const uint64_t own = read64(data);
  return __shfl_xor_sync(~0u, own, 1) + product(own ^ key);
}

// A warp per input, four threads per lane, which do the same.
__global__ void __launch_bounds__(32) chain_blocks(const DigestArgs args) {
  const int input = blockIdx.x, lane = threadIdx.x % kLanes;
  const int64_t size = args.sizes[input], blocks = (size - 1) / kBlock;
  const uint64_t* sums = args.sums + args.firsts[input] * kLanes + lane;
  const uint64_t key = secret_at(kScrambleSecret + 8 * lane);
  uint64_t sum = kDeviceInitial.words[lane];

  uint64_t coming[kAhead];
  const auto fetch = [&](int64_t first) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      coming[i] = first + i < blocks ? sums[(first + i) * kLanes] : 0;
    }
  };
  fetch(0);
  int64_t block = 0;
  for (; block + kAhead <= blocks; block += kAhead) {
    uint64_t now[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) now[i] = coming[i];
    fetch(block + kAhead);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) sum = scrambled(sum + now[i], key);
  }
  for (; block < blocks; ++block) sum = scrambled(sum + sums[block * kLanes], key);

  const uint8_t* data = args.data + args.starts[input];
  const uint8_t* rest = data + blocks * kBlock + 8 * lane;
  const int stripes = static_cast<int>((size - 1 - blocks * kBlock) / kStripe);
  for (int i = 0; i < stripes; ++i) sum += added(rest + i * kStripe, secret_at(8 * (i + lane)));
  sum += added(data + size - kStripe + 8 * lane, secret_at(kLastSecret + 8 * lane));

  const uint64_t mixed = sum ^ secret_at(kFoldSecret + 8 * lane);
  const uint64_t other = __shfl_xor_sync(~0u, mixed, 1);
  uint64_t folded = mixed * other ^ __umul64hi(mixed, other);
  for (int apart = 2; apart < kLanes; apart *= 2) folded += __shfl_xor_sync(~0u, folded, apart);
  uint64_t result = static_cast<uint64_t>(size) * kPrime64_1 + folded;
  result = (result ^ result >> 37) * kAvalanche;
  if (threadIdx.x == 0) args.out[input] = result ^ result >> 32;
}

}  // namespace

const char* launch_digest(const DigestArgs& args, int device, void* stream) {
  int count = 0;
  const cudaError_t error = multiprocessors(device, count);
  if (error != cudaSuccess) return describe(error);
  const auto queue = static_cast<cudaStream_t>(stream);
  if (args.num_blocks > 0) {
    const int64_t wanted = (args.num_blocks + kThreads / 32 - 1) / (kThreads / 32);
    const int grid = static_cast<int>(std::min<int64_t>(wanted, int64_t{count} * 8));
    sum_blocks<<<grid, kThreads, 0, queue>>>(args);
  }
  chain_blocks<<<args.count, 32, 0, queue>>>(args);
  return describe(cudaGetLastError());
}

}  // namespace vllm_cuda
