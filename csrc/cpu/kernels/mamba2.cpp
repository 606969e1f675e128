// SPDX-License-Identifier: Apache-2.0
// Mamba2 (arXiv 2405.21060), token by token: of one head, with a state h [P, N], a step size dt and
// the B and C of its group, h <- exp(-exp(A_log) dt) h + (dt x) B^T and y = h C + D x.
#include <string.h>

#include "../runtime.h"
#include "../table.h"
#include "conv_steps.h"
#include "gdn_steps.h"

namespace vllm_cpu {
namespace VLLM_ISA {

namespace {

constexpr int64_t kChunk = 32;

// A thread's buffers for some tokens of a head; rows are padded to whole vectors.
struct Work {
  int64_t n_pad, p_pad, tokens, state_floats;
  float *b, *c;     // [tokens][n_pad]
  float *x, *step;  // [tokens][p_pad]: the input, and dt times it
  float* decay;     // [tokens]
  float* state;

  Work(const Mamba2Args& args, int64_t tokens, int64_t state_floats)
      : n_pad(round_up(args.columns, kLanes)),
        p_pad(round_up(args.head_dim, kLanes)),
        tokens(tokens),
        state_floats(round_up(state_floats, kLanes)) {}
  int64_t floats() const { return tokens * (2 * n_pad + 2 * p_pad + 1) + state_floats; }
  void place(float* memory) {
    state = memory;
    b = state + state_floats;
    c = b + tokens * n_pad;
    x = c + tokens * n_pad;
    step = x + tokens * p_pad;
    decay = step + tokens * p_pad;
  }
};

// Step sizes of tokens [token, token + n) of a head: fills `decay` and `step`, of `x`.
template <typename T>
void take_steps(const Mamba2Args& args, int64_t token, int64_t n, int64_t head, Work& w) {
  const float rate = ::expf(param_at(args.A_log, head)), offset = param_at(args.dt_bias, head);
  for (int64_t t = 0; t < n; ++t) {
    const T* dt = static_cast<const T*>(args.dt) + (token + t) * args.dt_stride;
    float size = softplus(set1(load1(dt + head) + offset))[0];
    size = size < args.dt_low ? args.dt_low : size;
    size = size > args.dt_high ? args.dt_high : size;
    w.decay[t] = ::expf(-rate * size);
    for (int64_t i = 0; i < w.p_pad; i += kLanes) {
      store(w.step + t * w.p_pad + i, load(w.x + t * w.p_pad + i) * size);
    }
  }
}

// h <- decay h + step B^T of `Rows` rows and their outputs, before D x.
template <typename S, int Rows>
inline void scan_rows(
    S* state, int64_t columns, float decay, const float* b, const float* c, const float* step,
    float* y) {
  vf sums[Rows] = {};
  for_lanes(columns, [&](int64_t i, int64_t lanes) {
    const vf key = load(b + i), query = load(c + i);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      S* p = state + r * columns + i;
      const vf s = fma(key, set1(step[r]), load_upto(p, lanes) * decay);
      store_upto(p, s, lanes);
      sums[r] = fma(s, query, sums[r]);
    }
  });
  for (int r = 0; r < Rows; ++r) y[r] = sum(sums[r]);
}

// One token's step of `Rows` rows from `row` on, with its outputs.
template <typename T, typename S, int Rows>
inline void step_rows_of(
    const Work& w, int64_t columns, int64_t t, int64_t row, float D, S* state, T* out) {
  float y[Rows];
  scan_rows<S, Rows>(
      state, columns, w.decay[t], w.b + t * w.n_pad, w.c + t * w.n_pad,
      w.step + t * w.p_pad + row, y);
  for (int r = 0; r < Rows; ++r) {
    store_n(out + row + r, fma(set1(D), set1(w.x[t * w.p_pad + row + r]), set1(y[r])), 1);
  }
}

template <typename T>
void load_row(const T* from, int64_t count, float* to) {
  for_lanes(count, [&](int64_t i, int64_t lanes) { store(to + i, load_upto(from + i, lanes)); });
}

template <typename T, typename S>
void prefill_head(const Mamba2Args& args, int64_t seq, int64_t head) {
  const int64_t index = args.state_indices[seq];
  const int64_t begin = args.query_start[seq], end = args.query_start[seq + 1];
  if (index < 0 || begin >= end) return;
  const int64_t size = args.head_dim * args.columns;
  Work w(args, kChunk, size);
  w.place(scratch(Scratch::kKernel, w.floats()));
  S* stored = static_cast<S*>(args.state) + index * args.state_stride + head * size;
  const bool carried = args.has_initial_state[seq];
  for_lanes(size, [&](int64_t i, int64_t lanes) {
    store_upto(w.state + i, carried ? load_upto(stored + i, lanes) : vf{}, lanes);
  });
  const int64_t b_at = args.heads * args.head_dim +
      head / (args.heads / args.groups) * args.columns;
  const float D = param_at(args.D, head);
  for (int64_t token = begin; token < end; token += kChunk) {
    const int64_t n = end - token < kChunk ? end - token : kChunk;
    for (int64_t t = 0; t < n; ++t) {
      const T* row = static_cast<const T*>(args.xbc) + (token + t) * args.xbc_stride;
      load_row(row + head * args.head_dim, args.head_dim, w.x + t * w.p_pad);
      load_row(row + b_at, args.columns, w.b + t * w.n_pad);
      load_row(row + b_at + args.groups * args.columns, args.columns, w.c + t * w.n_pad);
    }
    take_steps<T>(args, token, n, head, w);
    T* out = static_cast<T*>(args.out) + token * args.out_strides[0] + head * args.out_strides[1];
    for_rows(args.head_dim, [&](int64_t row, auto rows) {
      for (int64_t t = 0; t < n; ++t) {
        step_rows_of<T, float, decltype(rows)::value>(
            w, args.columns, t, row, D, w.state + row * args.columns,
            out + t * args.out_strides[0]);
      }
    });
  }
  for_lanes(size, [&](int64_t i, int64_t lanes) {
    store_upto(stored + i, load_upto(w.state + i, lanes), lanes);
  });
}

template <typename T, typename S>
void decode_head(
    const Mamba2Args& args, int64_t seq, int64_t head, const Kept& kept, Work& w) {
  const JournalArgs& journal = args.journal;
  const int64_t tokens = args.tokens_per_seq, index = args.state_indices[seq];
  const int64_t group = head / (args.heads / args.groups), size = args.head_dim * args.columns;
  take_steps<T>(args, seq * tokens, tokens, head, w);
  for (int64_t t = 0; journal.steps && t < tokens; ++t) {
    if (!kept.keeps(t)) continue;
    const int64_t at = kept.place(t) * args.heads + head;
    journal.decays[at] = w.decay[t];
    ::memcpy(
        journal.errors + at * args.head_dim, w.step + t * w.p_pad, args.head_dim * sizeof(float));
  }
  const float D = param_at(args.D, head);
  T* out = static_cast<T*>(args.out) + seq * tokens * args.out_strides[0] +
      head * args.out_strides[1];
  S* states = static_cast<S*>(args.state) + index * args.state_stride + head * size;
  const int64_t base = kept.row * journal.places;
  for_rows(args.head_dim, [&](int64_t row, auto rows) {
    constexpr int kRows = decltype(rows)::value;
    S* stored = states + row * args.columns;
    if (!journal.steps) {
      step_rows_of<T, S, kRows>(w, args.columns, 0, row, D, stored, out);
      return;
    }
    S* held = reinterpret_cast<S*>(w.state);
    const int64_t bytes = kRows * args.columns * sizeof(S);
    ::memcpy(held, stored, bytes);
    const int64_t keys = args.groups * args.columns;
    replay_rows<S, kRows, HeadDecay>(
        held, args.columns, journal.keys + base * keys + group * args.columns, keys,
        journal.errors + (base * args.heads + head) * args.head_dim + row,
        args.heads * args.head_dim, journal.decays + base * args.heads + head, args.heads,
        kept.pending, kept.first, journal.places);
    for (int64_t t = 0; t < tokens; ++t) {
      step_rows_of<T, S, kRows>(
          w, args.columns, t, row, D, held, out + t * args.out_strides[0]);
      if (!kept.keeps(t)) ::memcpy(stored, held, bytes);
    }
  });
}

// All heads of a group, which share B and C.
template <typename T, typename S>
void decode_group(const Mamba2Args& args, int64_t seq, int64_t group, float* memory) {
  const JournalArgs& journal = args.journal;
  const int64_t tokens = args.tokens_per_seq;
  const Kept kept(journal, seq);
  Work w(args, tokens, kStateRows * args.columns);
  w.place(memory);
  const Sequence<T> sequence = sequence_of<T>(args, kept, seq, args.xbc, args.xbc_stride);
  const int64_t shared = args.groups * args.columns, per_group = args.heads / args.groups;
  const int64_t b_at = args.heads * args.head_dim + group * args.columns;
  conv_steps(args.conv, sequence, b_at, args.columns, w.b, w.n_pad);
  conv_steps(args.conv, sequence, b_at + shared, args.columns, w.c, w.n_pad);
  for (int64_t t = 0; journal.steps && t < tokens; ++t) {
    if (!kept.keeps(t)) continue;
    float* keys = journal.keys + kept.place(t) * shared + group * args.columns;
    ::memcpy(keys, w.b + t * w.n_pad, args.columns * sizeof(float));
  }
  for (int64_t head = group * per_group; head < (group + 1) * per_group; ++head) {
    conv_steps(args.conv, sequence, head * args.head_dim, args.head_dim, w.x, w.p_pad);
    decode_head<T, S>(args, seq, head, kept, w);
  }
}

template <typename T, typename S>
void decode(const Mamba2Args& args) {
  const int64_t floats = Work(args, args.tokens_per_seq, kStateRows * args.columns).floats();
  const int64_t item_cost = args.heads / args.groups * args.head_dim * args.columns;
  parallel_ranges(
      args.num_seqs * args.groups, 65536 / item_cost + 1, [&](int64_t begin, int64_t end) {
        float* memory = scratch(Scratch::kKernel, floats);
        for (int64_t i = begin; i < end; ++i) {
          const int64_t seq = i / args.groups;
          if (args.state_indices[seq] < 0) continue;
          decode_group<T, S>(args, seq, i % args.groups, memory);
        }
      });
}

}  // namespace

void mamba2_prefill(const Mamba2Args& args) {
  with_dtype(args.dtype, [&](auto t) {
    with_dtype(args.state_dtype, [&](auto s) {
      parallel_items(args.num_seqs * args.heads, [&](int64_t i) {
        prefill_head<decltype(t), decltype(s)>(args, i / args.heads, i % args.heads);
      });
    });
  });
}

void mamba2_decode(const Mamba2Args& args) {
  with_dtype(args.dtype, [&](auto t) {
    with_dtype(args.state_dtype, [&](auto s) { decode<decltype(t), decltype(s)>(args); });
  });
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
