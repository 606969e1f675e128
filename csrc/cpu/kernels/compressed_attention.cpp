// SPDX-License-Identifier: Apache-2.0
// Attention over a window and compressed entries: `vllm.kernels.compressed_attention`. One token at
// a time, so its bits depend neither on the batch nor on where a prompt is cut.
#include <algorithm>
#include <limits>

#include "../runtime.h"
#include "../simd/math.h"
#include "../table.h"
#include "norm.h"

namespace vllm_cpu {
namespace VLLM_ISA {

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
// Heads that attend together: a row that is loaded serves all of them.
constexpr int64_t kHeads = 8;

// Row `index` of a sequence, null where it has no block.
template <typename T>
const T* row_of(const PagedRows& rows, int64_t seq, int64_t index) {
  const int64_t column = index / rows.rows;
  if (column >= rows.columns) return nullptr;
  const int64_t block = rows.table[seq * rows.table_stride + column];
  if (block <= 0) return nullptr;
  const T* data = static_cast<const T*>(rows.data) + block * rows.block_stride;
  return data + index % rows.rows * rows.width;
}

// x as floats, zero up to the next multiple of kLanes.
template <typename T>
void widen(const T* x, int64_t n, float* out) {
  for_lanes(n, [&](int64_t i, int64_t lanes) { store(out + i, load_upto(x + i, lanes)); });
}

// Of two rows that are zero up to a multiple of kLanes.
float dot(const float* x, const float* y, int64_t padded) {
  vf partial[2] = {};
  for (int64_t i = 0; i < padded; i += kLanes) {
    vf& p = partial[i / kLanes % 2];
    p = fma(load(x + i), load(y + i), p);
  }
  return sum(partial[0] + partial[1]);
}

// The weighted sums of `count` rows, channel by channel. Their scores lie `score` floats behind.
void blend(const float* const* rows, int64_t count, int64_t score, int64_t lanes, float* out) {
  vf most = set1(kNever);
  for (int64_t r = 0; r < count; ++r) most = max(most, load_upto(rows[r] + score, lanes));
  vf total = {}, value = {};
  for (int64_t r = 0; r < count; ++r) {
    const vf weight = exp(load_upto(rows[r] + score, lanes) - most);
    total = total + weight;
    value = fma(weight, load_upto(rows[r], lanes), value);
  }
  store_upto(out, value / total, lanes);
}

template <typename T>
void compress_token(const CompressArgs& args, const float* weight, int64_t token) {
  const int64_t position = args.step.positions[token], ratio = args.step.ratio;
  if (args.slots[token] < 0 || (position + 1) % ratio) return;
  const int64_t seq = token / args.step.tokens_per_seq, first = position + 1 - ratio;
  T* out = const_cast<T*>(row_of<T>(args.entries, seq, first / ratio));
  if (!out) return;
  const int64_t n = args.entries.width, columns = args.tokens.width / 2;
  const int64_t start = args.overlap ? std::max<int64_t>(first - ratio, 0) : first;
  const float* rows[kMostRows];
  for (int64_t t = start; t <= position; ++t) {
    const float* row = row_of<float>(args.tokens, seq, t);
    if (!row) return;
    // With overlap the second half describes a token in its own window.
    rows[t - start] = row + (args.overlap && t >= first ? n : 0);
  }
  const int64_t padded = round_up(n, kLanes);
  float* made = scratch(Scratch::kPlan, 2 * padded);
  float* row = made + padded;
  for_lanes(n, [&](int64_t c, int64_t lanes) {
    const float* shifted[kMostRows];
    for (int64_t r = 0; r <= position - start; ++r) shifted[r] = rows[r] + c;
    blend(shifted, position + 1 - start, columns, lanes, made + c);
  });
  const float inv = normaliser(made, n, args.eps, row);
  for (int64_t i = 0; i < padded; i += kLanes) {
    store(row + i, load(row + i) * inv * load(weight + i));
  }
  const int64_t rot = args.angles.rot;
  const float* angles = args.angles.of(first);
  for (int64_t i = 0; i < rot / 2; ++i) {
    float* pair = row + n - rot + 2 * i;
    const float cos = angles[i], sin = angles[rot / 2 + i], x = pair[0], y = pair[1];
    pair[0] = x * cos - y * sin;
    pair[1] = y * cos + x * sin;
  }
  for_lanes(n, [&](int64_t i, int64_t lanes) { store_upto(out + i, load(row + i), lanes); });
}

struct Scored {
  float score;
  int32_t entry;
};

template <typename T>
void choose_token(const ChooseArgs& args, int64_t token) {
  const int64_t seq = token / args.step.tokens_per_seq;
  const int64_t n = args.keys.width, padded = round_up(n, kLanes);
  const int64_t visible = (args.step.positions[token] + 1) / args.step.ratio;
  float* query = scratch(Scratch::kKernel, (args.heads + 1) * padded);
  float* key = query + args.heads * padded;
  const T* source = static_cast<const T*>(args.query) + token * args.query_strides[0];
  for (int64_t h = 0; h < args.heads; ++h) {
    widen(source + h * args.query_strides[1], n, query + h * padded);
  }
  const float* weights = args.head_weights + token * args.weights_stride;
  auto* scored = reinterpret_cast<Scored*>(scratch(Scratch::kPlan, 2 * visible));
  int64_t count = 0;
  for (int64_t entry = 0; entry < visible; ++entry) {
    const T* found = row_of<T>(args.keys, seq, entry);
    if (!found) continue;
    widen(found, n, key);
    float score = 0;
    for (int64_t h = 0; h < args.heads; ++h) {
      score += std::max(dot(query + h * padded, key, padded), 0.0f) * weights[h];
    }
    // NaN has no order.
    scored[count++] = {score == score ? score : kNever, static_cast<int32_t>(entry)};
  }
  const int64_t kept = std::min(count, args.topk);
  std::partial_sort(scored, scored + kept, scored + count, [](const Scored& a, const Scored& b) {
    return a.score != b.score ? a.score > b.score : a.entry < b.entry;
  });
  int32_t* chosen = args.chosen + token * args.topk;
  for (int64_t i = 0; i < args.topk; ++i) chosen[i] = i < kept ? scored[i].entry : -1;
}

// The rows that a token sees, in the order in which they are added up; returns how many.
template <typename T>
int64_t seen_rows(const AttendArgs& args, int64_t token, const T** rows) {
  const int64_t seq = token / args.step.tokens_per_seq, position = args.step.positions[token];
  int64_t count = 0;
  const auto add = [&](const PagedRows& of, int64_t index) {
    const T* row = row_of<T>(of, seq, index);
    if (row) rows[count++] = row;
  };
  for (int64_t t = std::max<int64_t>(position + 1 - args.window, 0); t <= position; ++t) {
    add(args.tokens, t);
  }
  if (args.chosen) {
    const int32_t* chosen = args.chosen + token * args.topk;
    for (int64_t i = 0; i < args.topk; ++i) {
      if (chosen[i] >= 0) add(args.entries, chosen[i]);
    }
  } else if (args.entries.data) {
    for (int64_t i = 0; i < (position + 1) / args.step.ratio; ++i) add(args.entries, i);
  }
  return count;
}

template <typename T>
void attend(const AttendArgs& args, int64_t token, int64_t first_head) {
  const int64_t n = args.tokens.width, padded = round_up(n, kLanes);
  const int64_t heads = std::min(kHeads, args.heads - first_head);
  const int64_t position = args.step.positions[token];
  const int64_t visible = args.entries.data ? (position + 1) / args.step.ratio : 0;
  const int64_t most = args.window + (args.chosen ? args.topk : visible);
  const T** rows = reinterpret_cast<const T**>(scratch(Scratch::kPlan, 2 * most));
  const int64_t count = seen_rows(args, token, rows);
  const int64_t stride = round_up(count, kLanes);
  float* row = scratch(Scratch::kKernel, (1 + 2 * heads) * padded + heads * stride);
  float *query = row + padded, *sums = query + heads * padded, *scores = sums + heads * padded;
  const T* source = static_cast<const T*>(args.query) + token * args.query_strides[0];
  for (int64_t h = 0; h < heads; ++h) {
    widen(source + (first_head + h) * args.query_strides[1], n, query + h * padded);
    for (int64_t i = 0; i < padded; i += kLanes) store(sums + h * padded + i, vf{});
    for (int64_t j = count; j < stride; ++j) scores[h * stride + j] = kNever;
  }
  for (int64_t j = 0; j < count; ++j) {
    widen(rows[j], n, row);
    for (int64_t h = 0; h < heads; ++h) {
      scores[h * stride + j] = dot(query + h * padded, row, padded) * args.scale;
    }
  }
  for (int64_t h = 0; h < heads; ++h) {
    float* of_head = scores + h * stride;
    vf most_seen = set1(args.sinks[first_head + h]);
    for (int64_t j = 0; j < stride; j += kLanes) most_seen = max(most_seen, load(of_head + j));
    const vf peak = set1(max(most_seen));
    vf total = {};
    for (int64_t j = 0; j < stride; j += kLanes) {
      const vf weight = exp(load(of_head + j) - peak);
      store(of_head + j, weight);
      total = total + weight;
    }
    const float sink = exp(set1(args.sinks[first_head + h]) - peak)[0];
    const vf inv = set1(1.0f / (sum(total) + sink));
    for (int64_t j = 0; j < stride; j += kLanes) store(of_head + j, load(of_head + j) * inv);
  }
  for (int64_t j = 0; j < count; ++j) {
    widen(rows[j], n, row);
    for (int64_t h = 0; h < heads; ++h) {
      const vf weight = set1(scores[h * stride + j]);
      float* into = sums + h * padded;
      for (int64_t i = 0; i < padded; i += kLanes) {
        store(into + i, fma(weight, load(row + i), load(into + i)));
      }
    }
  }
  T* out = static_cast<T*>(args.out) + token * args.out_strides[0];
  for (int64_t h = 0; h < heads; ++h) {
    for_lanes(n, [&](int64_t i, int64_t lanes) {
      const vf made = load(sums + h * padded + i);
      store_upto(out + (first_head + h) * args.out_strides[1] + i, made, lanes);
    });
  }
}

}  // namespace

void compress(const CompressArgs& args) {
  const int64_t n = args.entries.width;
  with_dtype(args.dtype, [&](auto t) {
    parallel_ranges(args.step.num_tokens, 64, [&](int64_t begin, int64_t end) {
      float* weight = scratch(Scratch::kKernel, round_up(n, kLanes));
      load_param(args.weight, n, weight);
      for (int64_t i = begin; i < end; ++i) compress_token<decltype(t)>(args, weight, i);
    });
  });
}

void choose_entries(const ChooseArgs& args) {
  with_dtype(args.dtype, [&](auto t) {
    parallel_items(args.step.num_tokens, [&](int64_t i) { choose_token<decltype(t)>(args, i); });
  });
}

void compressed_attention(const AttendArgs& args) {
  const int64_t parts = (args.heads + kHeads - 1) / kHeads;
  with_dtype(args.dtype, [&](auto t) {
    parallel_items(args.step.num_tokens * parts, [&](int64_t i) {
      attend<decltype(t)>(args, i / parts, i % parts * kHeads);
    });
  });
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
