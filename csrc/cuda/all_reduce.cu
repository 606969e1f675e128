// SPDX-License-Identifier: Apache-2.0
// Sums over ranks, alone or with the residual stream's addition and norm.
//
// One shot: every rank sends its rows to all others and adds up all rows. Two shots: row r goes to
// rank r % ranks, which adds it up and sends the result. Either way an element is added in fp32 in
// the order of ranks and rounded once, so all ranks have the same bits, and those of the other way.
#include <algorithm>

#include "launch.h"
#include "rank_words.cuh"
#include "skinny_norm.cuh"
#include "sum_chunk.cuh"

namespace vllm_cuda {

namespace {

constexpr int kPieceChunks = 256;

// One thread's view of the parts of inboxes that a sum uses.
template <int RANKS>
struct Mail {
  const Peers& peers;
  uint32_t count;
  Patience patience;

  __device__ Mail(const Peers& peers_, uint32_t count_)
      : peers(peers_), count(count_), patience(peers_.timeout_ns) {}

  // Rows are of `width` chunks; the first halves of a row's words come first.
  __device__ static int64_t low(int64_t row, int width, int chunk) {
    return (row * width * 2 + chunk) * 16;
  }
  __device__ static int64_t high(int64_t row, int width, int chunk) {
    return low(row, width, chunk + width);
  }
  __device__ void send(int receiver, int64_t row, int width, int chunk, const uint4& data) {
    uint8_t* part = inbox_part(peers, receiver, peers.rank, count);
    send_words(part + low(row, width, chunk), part + high(row, width, chunk), data, count);
  }
  __device__ uint4 receive(int sender, int64_t row, int width, int chunk) {
    const uint8_t* part = inbox_part(peers, peers.rank, sender, count);
    uint4 data;
    while (!take_words(part + low(row, width, chunk), part + high(row, width, chunk), count, data))
      patience.wait();
    return data;
  }
  __device__ void send_all(int64_t row, int width, int chunk, const uint4& data) {
#pragma unroll
    for (int i = 1; i < RANKS; ++i) {
      const int receiver = peers.rank + i;
      send(receiver < RANKS ? receiver : receiver - RANKS, row, width, chunk, data);
    }
  }
  // The sum of all ranks' chunks, of which this rank's is `own`.
  template <typename T>
  __device__ uint4 add_up(int64_t row, int width, int chunk, const uint4& own) {
    uint4 all[RANKS];
    bool there = false;
    while (!there) {  // all loads are on their way at once
      there = true;
#pragma unroll
      for (int sender = 0; sender < RANKS; ++sender) {
        if (sender == peers.rank) {
          all[sender] = own;
        } else {
          const uint8_t* part = inbox_part(peers, peers.rank, sender, count);
          there &= take_words(part + low(row, width, chunk), part + high(row, width, chunk), count,
                              all[sender]);
        }
      }
      if (!there) patience.wait();
    }
    Chunk<T> sum(all[0]);
#pragma unroll
    for (int sender = 1; sender < RANKS; ++sender) sum += all[sender];
    return sum.rounded();
  }
};

// A block has rows blockIdx.x, blockIdx.x + gridDim.x, ...; a thread chunks threadIdx.x,
// threadIdx.x + blockDim.x, ... of each, GROUPS in all. The last row may be shorter.
template <typename T, int RANKS, int GROUPS, bool NORM>
__global__ void __launch_bounds__(512)
    sum_kernel(const __grid_constant__ SumArgs args, const __grid_constant__ Peers peers,
               int64_t rows, int width, int64_t chunks) {
  __shared__ float shared[32];
  asm volatile("griddepcontrol.launch_dependents;");
  uint4 weight[GROUPS];
  if constexpr (NORM) {
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      const int chunk = g * blockDim.x + threadIdx.x;
      if (chunk < width) weight[g] = static_cast<const uint4*>(args.norm)[chunk];
    }
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const uint32_t count = *const_cast<volatile uint32_t*>(peers.counts + blockIdx.x);
  if (count % kCleanEvery < 2) clean_next_slot(peers, count);
  Mail<RANKS> mail(peers, count);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    uint4 data[GROUPS], residual[GROUPS];
    const int owner = static_cast<int>(row % RANKS);
    const bool sums = !args.two_shot || owner == peers.rank;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      const int chunk = g * blockDim.x + threadIdx.x;
      const int64_t place = row * width + chunk;
      const bool exists = chunk < width && place < chunks;
      data[g] = residual[g] = make_uint4(0, 0, 0, 0);
      if (!exists) continue;
      data[g] = static_cast<const uint4*>(args.x)[place];
      if constexpr (NORM) residual[g] = static_cast<const uint4*>(args.residual)[place];
      if (!args.two_shot) {
        mail.send_all(row, width, chunk, data[g]);
      } else if (!sums) {
        mail.send(owner, row, width, chunk, data[g]);
      }
    }
    float squares = 0;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      const int chunk = g * blockDim.x + threadIdx.x;
      const int64_t place = row * width + chunk;
      if (chunk >= width || place >= chunks) continue;
      if (sums) {
        data[g] = mail.template add_up<T>(row, width, chunk, data[g]);
        if (args.two_shot) mail.send_all(row, width, chunk, data[g]);
      } else {
        data[g] = mail.receive(owner, row, width, chunk);
      }
      if constexpr (NORM) {
        Chunk<T> total(data[g]);
        total += residual[g];
        data[g] = total.rounded();
        static_cast<uint4*>(args.total)[place] = data[g];
        squares = add_squares<T>(squares, data[g]);
      } else {
        static_cast<uint4*>(args.out)[place] = data[g];
      }
    }
    if constexpr (NORM) {
      const float inverse =
          block_inverse(squares, static_cast<int>(args.columns), args.eps, shared);
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        const int chunk = g * blockDim.x + threadIdx.x;
        if (chunk >= width) continue;
        static_cast<uint4*>(args.out)[row * width + chunk] =
            scale_chunk<T>(data[g], weight[g], inverse, args.one_plus);
      }
    }
  }
  // Only this block reads the number at its own place, whatever the grid of the next sum.
  __syncthreads();
  for (int i = blockIdx.x + threadIdx.x * gridDim.x; i < kMaxPeerBlocks;
       i += blockDim.x * gridDim.x) {
    peers.counts[i] = next_count(count);
  }
}

struct SumLaunch {
  bool overlap;
  void* stream;
};

template <typename T, int RANKS, int GROUPS, bool NORM>
const char* launch(const SumArgs& args, const Peers& peers, const SumLaunch& how) {
  const int64_t chunks = args.rows * args.columns / Chunk<T>::kElements;
  int64_t rows = (chunks + kPieceChunks - 1) / kPieceChunks;
  int width = kPieceChunks, threads = kPieceChunks;
  if constexpr (NORM) {
    rows = args.rows;
    width = static_cast<int>(args.columns / Chunk<T>::kElements);
    threads = 128;  // as many as of the Triton kernel, whose order of addition is this one's
    while (threads * GROUPS < width) threads *= 2;
  }
  const unsigned blocks = static_cast<unsigned>(std::min<int64_t>(rows, kMaxPeerBlocks));
  const LaunchGrid grid{blocks, static_cast<unsigned>(threads), 0, how.stream, how.overlap};
  return launch_kernel<sum_kernel<T, RANKS, GROUPS, NORM>>(grid, args, peers, rows, width, chunks);
}

template <typename T, int RANKS>
const char* choose_norm(const SumArgs& args, const Peers& peers, const SumLaunch& how) {
  if (args.norm == nullptr) return launch<T, RANKS, 1, false>(args, peers, how);
  if constexpr (Chunk<T>::kElements == 8) {
    if (args.columns > kSumNormColumns[0] && args.columns <= kSumNormColumns[1]) {
      return launch<T, RANKS, 2, true>(args, peers, how);
    }
  }
  return "a norm of fewer or more columns, or of a wider type, than it is made for";
}

template <typename T>
const char* choose_ranks(const SumArgs& args, const Peers& peers, const SumLaunch& how) {
  switch (peers.ranks) {
    case 2:
      return choose_norm<T, 2>(args, peers, how);
    case 3:
      return choose_norm<T, 3>(args, peers, how);
    case 4:
      return choose_norm<T, 4>(args, peers, how);
    case 5:
      return choose_norm<T, 5>(args, peers, how);
    case 6:
      return choose_norm<T, 6>(args, peers, how);
    case 7:
      return choose_norm<T, 7>(args, peers, how);
    case 8:
      return choose_norm<T, 8>(args, peers, how);
  }
  return "a sum of fewer than 2 or more than 8 ranks";
}

}  // namespace

const char* launch_sum(const SumArgs& args, const Peers& peers, SumType type, bool overlap,
                       void* stream) {
  const SumLaunch how{overlap, stream};
  switch (type) {
    case SumType::kFloat:
      return choose_ranks<float>(args, peers, how);
    case SumType::kHalf:
      return choose_ranks<__half>(args, peers, how);
    case SumType::kBfloat16:
      return choose_ranks<__nv_bfloat16>(args, peers, how);
  }
  return "an unknown type";
}

}  // namespace vllm_cuda
