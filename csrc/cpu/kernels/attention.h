// SPDX-License-Identifier: Apache-2.0
// Attention of a few query rows over one tile of keys.
//
// Keys are tiled at absolute positions, each tile gets its own softmax (maximum, sum, weighted
// values) and tiles are merged in order. A row's result therefore does not depend on which other
// rows were computed with it, on chunked prefill, or on how tiles were spread over threads.
#pragma once

#include "../args.h"
#include "../simd/gemm.h"
#include "../simd/math.h"
#include "../simd/transpose.h"

namespace vllm_cpu {
namespace VLLM_ISA {

constexpr int64_t kTileKeys = 128;
constexpr float kMinusInf = -__builtin_inff();

// Rows of one work item: `count` consecutive queries of a sequence times the query heads of one
// kv head, `row = query * group + head in group`.
struct QueryTile {
  const float* q;  // [rows][padded]
  int64_t rows;
  int64_t group;
  int64_t position;  // of the first query
  int64_t anchor;    // of the sequence's first query
  int64_t end;       // of the sequence
  int64_t count;
  int64_t padded;  // head_dim rounded up to kLanes
};

// Softmax state per row.
struct Partial {
  float* out;      // [rows][padded]
  float* maximum;  // [rows]
  float* sum;      // [rows]
};

// The keys [first, last) of a tile that some row sees, relative to `base`; pointers of the others
// are null.
template <typename T>
struct KeyTile {
  int64_t base;
  int64_t first;
  int64_t last;
  const T* key[kTileKeys];
};

template <typename T>
inline KeyTile<T> key_tile(
    const AttentionArgs& args, int64_t seq, int64_t kv_head, int64_t tile, int64_t kv_begin,
    int64_t kv_end) {
  const KvCache& cache = args.cache;
  KeyTile<T> keys;
  keys.base = tile * kTileKeys;
  keys.first = kv_begin > keys.base ? kv_begin - keys.base : 0;
  keys.last = kv_end - keys.base < kTileKeys ? kv_end - keys.base : kTileKeys;
  const int32_t* blocks = args.block_table + seq * args.block_table_stride;
  for (int64_t j = 0; j < kTileKeys; ++j) keys.key[j] = nullptr;
  for (int64_t j = keys.first; j < keys.last;) {
    const int64_t position = keys.base + j;
    int64_t offset = position % cache.block_size;
    const T* block = reinterpret_cast<const T*>(cache.data) +
        blocks[position / cache.block_size] * cache.block_stride + kv_head * cache.head_dim;
    for (; offset < cache.block_size && j < keys.last; ++offset, ++j) {
      keys.key[j] = block + offset * cache.heads * cache.head_dim;
    }
  }
  return keys;
}

// square[d][key]: kLanes keys from j, `lanes` dims from d.
template <typename T>
inline void load_keys(const KeyTile<T>& keys, int64_t j, int64_t d, int64_t lanes, vf* square) {
  vf(&rows)[kLanes] = *reinterpret_cast<vf(*)[kLanes]>(square);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    const T* key = keys.key[j + i];
    rows[i] = key ? load_upto(key + d, lanes) : vf{};
  }
  transpose(rows);
}

// Scores to probabilities relative to each row's own maximum in this tile.
inline void tile_softmax(
    const AttentionArgs& args, const QueryTile& query, int64_t base, int64_t last, float* scores,
    Partial& partial) {
  const int64_t columns = round_up(last, kLanes);
  for (int64_t r = 0; r < query.rows; ++r) {
    float* s = scores + r * kTileKeys;
    const int64_t position = query.position + r / query.group - base;
    const int64_t newest = args.rows == QueryRows::kWholeBlock ? query.end - 1 - base : position;
    const vi high = set1(static_cast<int32_t>(newest < kTileKeys ? newest : kTileKeys));
    const int64_t from = args.rows == QueryRows::kTokens ? position : query.anchor - base;
    const int64_t window_low = args.window ? from - args.window : -1;
    const vi low = set1(static_cast<int32_t>(window_low > -1 ? window_low : -1));
    vf maximum = set1(kMinusInf);
    for (int64_t j = 0; j < columns; j += kLanes) {
      const vi index = iota() + static_cast<int32_t>(j);
      vf x = load(s + j) * args.scale;
      x = index <= high ? x : set1(kMinusInf);
      x = index > low ? x : set1(kMinusInf);
      store(s + j, x);
      maximum = max(x, maximum);
    }
    const float row_max = max(maximum);
    partial.maximum[r] = row_max;
    const float shift = row_max == kMinusInf ? 0.0f : row_max;
    vf total = {};
    for (int64_t j = 0; j < columns; j += kLanes) {
      const vf p = exp(load(s + j) - shift);
      store(s + j, p);
      total += p;
    }
    partial.sum[r] = sum(total);
  }
}

// The general tile: keys and values are copied to scratch, transposed for the first product.
template <typename T>
inline void attend_tile(
    const AttentionArgs& args, const QueryTile& query, const KeyTile<T>& keys, float* work,
    Partial& partial) {
  const int64_t n = args.cache.head_dim, padded = query.padded;
  float* key_t = work;
  float* value = key_t + n * kTileKeys;
  float* scores = value + kTileKeys * padded;
  const int64_t columns = round_up(keys.last, kLanes);
  for (int64_t j = 0; j < columns; j += kLanes) {
    for_lanes(n, [&](int64_t d, int64_t lanes) {
      vf square[kLanes];
      load_keys(keys, j, d, lanes, square);
      for (int64_t i = 0; i < lanes; ++i) store(key_t + (d + i) * kTileKeys + j, square[i]);
    });
  }
  for (int64_t j = 0; j < keys.last; ++j) {
    const T* source = keys.key[j] ? keys.key[j] + args.cache.value_offset() : nullptr;
    for_lanes(n, [&](int64_t d, int64_t lanes) {
      store(value + j * padded + d, source ? load_upto(source + d, lanes) : vf{});
    });
  }
  gemm<Init::kZero>(
      query.rows, columns, n, {query.q, padded, 1}, key_t, kTileKeys, scores, kTileKeys);
  tile_softmax(args, query, keys.base, keys.last, scores, partial);
  gemm<Init::kZero>(
      query.rows, padded, keys.last, {scores, kTileKeys, 1}, value, padded, partial.out, padded);
}

inline int64_t attend_tile_floats(int64_t head_dim, int64_t rows) {
  return kTileKeys * (head_dim + round_up(head_dim, kLanes) + rows);
}

// Few rows (decode): keys and values stream through registers, in the general tile's order of
// operations.
template <typename T, int Rows>
inline void attend_rows(
    const AttentionArgs& args, const QueryTile& query, const KeyTile<T>& keys, float* work,
    Partial& partial) {
  const int64_t n = args.cache.head_dim, padded = query.padded;
  for (int64_t j = 0; j < keys.last; j += kLanes) {
    vf acc[Rows] = {};
    for_lanes(n, [&](int64_t d, int64_t lanes) {
      vf square[kLanes];
      load_keys(keys, j, d, lanes, square);
      const float* q = query.q + d;
      if (lanes == kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
#pragma GCC unroll 8
          for (int r = 0; r < Rows; ++r) acc[r] = fma(set1(q[r * padded + i]), square[i], acc[r]);
        }
      } else {
        for (int64_t i = 0; i < lanes; ++i) {
          for (int r = 0; r < Rows; ++r) acc[r] = fma(set1(q[r * padded + i]), square[i], acc[r]);
        }
      }
    });
    for (int r = 0; r < Rows; ++r) store(work + r * kTileKeys + j, acc[r]);
  }
  tile_softmax(args, query, keys.base, keys.last, work, partial);
  constexpr int kVecs = Rows <= 4 ? 4 : 2;
  const T* const* key = keys.key;
  const int64_t value_offset = args.cache.value_offset();
  int64_t d = 0;
  for (; d + kVecs * kLanes <= n; d += kVecs * kLanes) {
    vf acc[Rows][kVecs] = {};
    for (int64_t j = keys.first; j < keys.last; ++j) {
      vf value[kVecs];
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) value[v] = load(key[j] + value_offset + d + v * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        const vf p = set1(work[r * kTileKeys + j]);
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) acc[r][v] = fma(p, value[v], acc[r][v]);
      }
    }
    for (int r = 0; r < Rows; ++r) {
      for (int v = 0; v < kVecs; ++v) store(partial.out + r * padded + d + v * kLanes, acc[r][v]);
    }
  }
  for_lanes(n - d, [&](int64_t rest, int64_t lanes) {
    vf acc[Rows] = {};
    for (int64_t j = keys.first; j < keys.last; ++j) {
      const vf value = load_upto(key[j] + value_offset + d + rest, lanes);
      for (int r = 0; r < Rows; ++r) acc[r] = fma(set1(work[r * kTileKeys + j]), value, acc[r]);
    }
    for (int r = 0; r < Rows; ++r) store(partial.out + r * padded + d + rest, acc[r]);
  });
}

// total <- total merged with the next tile's partial.
inline void merge(int64_t rows, int64_t padded, const Partial& tile, Partial& total) {
  for (int64_t r = 0; r < rows; ++r) {
    if (tile.sum[r] == 0) continue;  // the row sees no key of this tile
    const float before = total.maximum[r], here = tile.maximum[r];
    const float now = before > here ? before : here;
    const float keep = exp(set1(before - now))[0], add = exp(set1(here - now))[0];
    total.maximum[r] = now;
    total.sum[r] = total.sum[r] * keep + tile.sum[r] * add;
    float* out = total.out + r * padded;
    const float* part = tile.out + r * padded;
    for (int64_t d = 0; d < padded; d += kLanes) {
      store(out + d, fma(load(out + d), set1(keep), load(part + d) * add));
    }
  }
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
