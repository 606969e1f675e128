// SPDX-License-Identifier: Apache-2.0
// Chunked gated delta rule.
//
// With G_i the cumulative log decay inside a chunk, D_ij = exp(G_i - G_j) for j <= i, and S the
// state entering the chunk [k_dim, v_dim]:
//   (I + tril(beta_i (k_i . k_j) D_ij, -1)) X = beta (V - exp(G) K S)     (UT transform)
//   O  = exp(G) Q S + tril((q_i . k_j) D_ij) X
//   S <- exp(G_last) S + K^T (exp(G_last - G) X)
// Every exponent is <= 0, so nothing overflows however strong the decay.
#include "../runtime.h"
#include "../simd/gemm.h"
#include "../simd/transpose.h"
#include "../table.h"
#include "gdn.h"

namespace vllm_cpu {
namespace VLLM_ISA {

namespace {

constexpr int64_t kChunk = 64;
constexpr int64_t kBlock = 8;  // rows solved together in the triangular system

// One thread's buffers; matrices are row-major with padded rows.
struct Work {
  int64_t k_pad, v_pad;
  float* q;      // [kChunk][k_pad]
  float* k;      // [kChunk][k_pad]
  float* k_t;    // [k_dim][kChunk]
  float* kk;     // [kChunk][kChunk]  k_i . k_j
  float* qk;     // [kChunk][kChunk]  q_i . k_j
  float* solve;  // [kChunk][kChunk]  -beta_i (k_i . k_j) D_ij below the diagonal
  float* probs;  // [kChunk][kChunk]  (q_i . k_j) D_ij up to the diagonal
  float* x;      // [kChunk][v_pad]
  float* o;      // [kChunk][v_pad]
  float* decay;  // [kChunk]  G
  float* beta;   // [kChunk]
  float* state;  // [heads of the item][k_dim][v_pad]
};

int64_t work_floats(const GdnArgs& args, int64_t heads) {
  const int64_t k_pad = round_up(args.k_dim, kLanes), v_pad = round_up(args.v_dim, kLanes);
  return kChunk * (2 * k_pad + args.k_dim + 4 * kChunk + 2 * v_pad + 2) +
      heads * args.k_dim * v_pad;
}

Work make_work(const GdnArgs& args, float* memory) {
  Work w;
  w.k_pad = round_up(args.k_dim, kLanes);
  w.v_pad = round_up(args.v_dim, kLanes);
  auto take = [&](int64_t floats) {
    float* p = memory;
    memory += floats;
    return p;
  };
  w.q = take(kChunk * w.k_pad);
  w.k = take(kChunk * w.k_pad);
  w.k_t = take(kChunk * args.k_dim);
  w.kk = take(kChunk * kChunk);
  w.qk = take(kChunk * kChunk);
  w.solve = take(kChunk * kChunk);
  w.probs = take(kChunk * kChunk);
  w.x = take(kChunk * w.v_pad);
  w.o = take(kChunk * w.v_pad);
  w.decay = take(kChunk);
  w.beta = take(kChunk);
  w.state = memory;
  return w;
}

// Normalised q and k of a key head, and their products.
template <typename T>
void prepare_keys(const GdnArgs& args, int64_t token, int64_t n, int64_t key_head, Work& w) {
  const float scale = 1.0f / ::sqrtf(static_cast<float>(args.k_dim));
  for (int64_t i = 0; i < n; ++i) {
    const T* q = static_cast<const T*>(args.qkv) + (token + i) * args.qkv_stride +
        key_head * args.k_dim;
    const T* k = q + args.k_heads * args.k_dim;
    float* q_row = w.q + i * w.k_pad;
    float* k_row = w.k + i * w.k_pad;
    for_lanes(args.k_dim, [&](int64_t d, int64_t lanes) {
      store(q_row + d, load_upto(q + d, lanes));
      store(k_row + d, load_upto(k + d, lanes));
    });
    l2_normalise(q_row, w.k_pad, scale);
    l2_normalise(k_row, w.k_pad, 1.0f);
  }
  load_transposed(w.k, w.k_pad, n, args.k_dim, w.k_t, kChunk);
  // Columns right of a strip of rows are above the diagonal and never read.
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t rows = n - i < kLanes ? n - i : kLanes, columns = i + kLanes;
    gemm<Init::kZero>(
        rows, columns, args.k_dim, {w.k + i * w.k_pad, w.k_pad, 1}, w.k_t, kChunk,
        w.kk + i * kChunk, kChunk);
    gemm<Init::kZero>(
        rows, columns, args.k_dim, {w.q + i * w.k_pad, w.k_pad, 1}, w.k_t, kChunk,
        w.qk + i * kChunk, kChunk);
  }
}

// G, beta and the two decayed triangles of a value head.
template <typename T>
void prepare_gates(const GdnArgs& args, int64_t token, int64_t n, int64_t head, Work& w) {
  const DecayParams params = decay_params(args, head);
  float total = 0;
  for (int64_t i = 0; i < kChunk; ++i) {
    const Gates gate = i < n ? gates<T>(args, params, token + i, head) : Gates{0, 0};
    total += gate.g;
    w.decay[i] = total;
    w.beta[i] = gate.beta;
  }
  for (int64_t i = 0; i < n; ++i) {
    const vi row = set1(static_cast<int32_t>(i));
    // Products read the triangles in blocks, so rows are zero up to the end of their block.
    for (int64_t j = 0; j < round_up(i + 1, kBlock); j += kLanes) {
      const vi column = iota() + static_cast<int32_t>(j);
      const vf d = exp(w.decay[i] - load(w.decay + j));
      const int64_t at = i * kChunk + j;
      const vf a = load(w.kk + at) * d * -w.beta[i], p = load(w.qk + at) * d;
      store(w.solve + at, column < row ? a : vf{});
      store(w.probs + at, column <= row ? p : vf{});
    }
  }
}

// X <- (I - solve)^-1 X by forward substitution, kBlock rows at a time.
void solve_lower(int64_t n, Work& w) {
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t rows = n - i < kBlock ? n - i : kBlock;
    gemm<Init::kAdd>(
        rows, w.v_pad, i, {w.solve + i * kChunk, kChunk, 1}, w.x, w.v_pad, w.x + i * w.v_pad,
        w.v_pad);
    for (int64_t c = 0; c < w.v_pad; c += kLanes) {
      vf x[kBlock];
      for (int64_t r = 0; r < rows; ++r) {
        x[r] = load(w.x + (i + r) * w.v_pad + c);
        for (int64_t j = 0; j < r; ++j) {
          x[r] = fma(set1(w.solve[(i + r) * kChunk + i + j]), x[j], x[r]);
        }
        store(w.x + (i + r) * w.v_pad + c, x[r]);
      }
    }
  }
}

template <typename T>
void chunk_head(
    const GdnArgs& args, int64_t token, int64_t n, int64_t head, float* state, Work& w) {
  prepare_gates<T>(args, token, n, head, w);
  gemm<Init::kZero>(
      n, w.v_pad, args.k_dim, {w.k, w.k_pad, 1}, state, w.v_pad, w.x, w.v_pad);
  const T* v = static_cast<const T*>(args.qkv) + token * args.qkv_stride +
      2 * args.k_heads * args.k_dim + head * args.v_dim;
  for (int64_t i = 0; i < n; ++i) {
    const vf carry = -exp(set1(w.decay[i]));
    float* x = w.x + i * w.v_pad;
    for_lanes(args.v_dim, [&](int64_t d, int64_t lanes) {
      const vf value = load_upto(v + i * args.qkv_stride + d, lanes);
      store(x + d, fma(carry, load(x + d), value) * w.beta[i]);
    });
  }
  solve_lower(n, w);
  gemm<Init::kZero>(
      n, w.v_pad, args.k_dim, {w.q, w.k_pad, 1}, state, w.v_pad, w.o, w.v_pad);
  T* out = static_cast<T*>(args.out) + token * args.out_strides[0] + head * args.out_strides[1];
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t rows = n - i < kBlock ? n - i : kBlock;
    float* o = w.o + i * w.v_pad;
    for (int64_t r = 0; r < rows; ++r) {
      const vf carry = exp(set1(w.decay[i + r]));
      for (int64_t d = 0; d < w.v_pad; d += kLanes) {
        store(o + r * w.v_pad + d, load(o + r * w.v_pad + d) * carry);
      }
    }
    gemm<Init::kAdd>(
        rows, w.v_pad, i + rows, {w.probs + i * kChunk, kChunk, 1}, w.x, w.v_pad, o, w.v_pad);
    for (int64_t r = 0; r < rows; ++r) {
      for_lanes(args.v_dim, [&](int64_t d, int64_t lanes) {
        store_upto(out + (i + r) * args.out_strides[0] + d, load(o + r * w.v_pad + d), lanes);
      });
    }
  }
  const float last = w.decay[n - 1];
  for (int64_t i = 0; i < n; ++i) {
    const vf rest = exp(set1(last - w.decay[i]));
    float* x = w.x + i * w.v_pad;
    for (int64_t d = 0; d < w.v_pad; d += kLanes) store(x + d, load(x + d) * rest);
  }
  const vf carry = exp(set1(last));
  for (int64_t i = 0; i < args.k_dim * w.v_pad; i += kLanes) {
    store(state + i, load(state + i) * carry);
  }
  gemm<Init::kAdd>(
      args.k_dim, w.v_pad, n, {w.k, 1, w.k_pad}, w.x, w.v_pad, state, w.v_pad);
}

// One sequence and `heads` value heads of one key head.
template <typename T, typename S>
void run_item(const GdnArgs& args, int64_t seq, int64_t first_head, int64_t heads) {
  const int64_t index = args.state_indices[seq];
  const int64_t begin = args.query_start[seq], end = args.query_start[seq + 1];
  if (index < 0 || begin >= end) return;
  Work w = make_work(args, scratch(Scratch::kKernel, work_floats(args, heads)));
  const int64_t head_floats = args.k_dim * w.v_pad;
  auto stored = [&](int64_t h) {
    return static_cast<S*>(args.state) + index * args.state_stride +
        (first_head + h) * args.v_dim * args.k_dim;
  };
  for (int64_t h = 0; h < heads; ++h) {
    float* state = w.state + h * head_floats;
    if (args.has_initial_state[seq]) {
      load_transposed(stored(h), args.k_dim, args.v_dim, args.k_dim, state, w.v_pad);
    } else {
      for (int64_t i = 0; i < head_floats; ++i) state[i] = 0;
    }
  }
  const int64_t key_head = first_head / (args.v_heads / args.k_heads);
  for (int64_t token = begin; token < end; token += kChunk) {
    const int64_t n = end - token < kChunk ? end - token : kChunk;
    prepare_keys<T>(args, token, n, key_head, w);
    for (int64_t h = 0; h < heads; ++h) {
      chunk_head<T>(args, token, n, first_head + h, w.state + h * head_floats, w);
    }
  }
  for (int64_t h = 0; h < heads; ++h) {
    const float* state = w.state + h * head_floats;
    store_transposed(state, w.v_pad, args.k_dim, args.v_dim, stored(h), args.k_dim);
  }
}

template <typename T, typename S>
void run(const GdnArgs& args) {
  const int64_t group = args.v_heads / args.k_heads;
  // Value heads of a key head share its products, unless threads would go without work.
  const int64_t together = args.num_seqs * args.k_heads >= num_threads() ? group : 1;
  const int64_t per_seq = args.v_heads / together;
  parallel_items(args.num_seqs * per_seq, [&](int64_t i) {
    run_item<T, S>(args, i / per_seq, i % per_seq * together, together);
  });
}

}  // namespace

void gdn_prefill(const GdnArgs& args) {
  with_dtype(args.dtype, [&](auto t) {
    with_dtype(args.state_dtype, [&](auto s) { run<decltype(t), decltype(s)>(args); });
  });
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
