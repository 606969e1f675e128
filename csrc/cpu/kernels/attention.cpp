// SPDX-License-Identifier: Apache-2.0
// Paged attention: work items, threads, and the split of long contexts.
#include "attention.h"

#include "../runtime.h"
#include "../table.h"

namespace vllm_cpu {
namespace VLLM_ISA {

namespace {

// Consecutive queries of one sequence and kv head.
struct Item {
  int64_t seq;
  int64_t kv_head;
  int64_t first_query;  // in the sequence
  int64_t num_queries;
  int64_t position;  // of the first query
  int64_t anchor;    // of the sequence's first query
  int64_t kv_begin;  // first and last key that some row sees
  int64_t kv_end;
  int64_t first_tile;
  int64_t num_tiles;
  int64_t tiles_before;     // of earlier items
  int64_t partials_before;  // floats of their partial results
};

Item make_item(
    const AttentionArgs& args, int64_t seq, int64_t kv_head, int64_t first, int64_t count) {
  const int64_t query_len = args.query_start[seq + 1] - args.query_start[seq];
  Item item{};
  item.seq = seq;
  item.kv_head = kv_head;
  item.first_query = first;
  item.num_queries = count;
  item.anchor = args.seq_lens[seq] - query_len;
  item.position = item.anchor + first;
  const bool whole = args.rows == QueryRows::kWholeBlock;
  item.kv_end = whole ? args.seq_lens[seq] : item.position + count;
  const bool tokens = args.rows == QueryRows::kTokens;
  const int64_t low = (tokens ? item.position : item.anchor) - args.window + 1;
  item.kv_begin = args.window && low > 0 ? low : 0;
  item.first_tile = item.kv_begin / kTileKeys;
  item.num_tiles = (item.kv_end + kTileKeys - 1) / kTileKeys - item.first_tile;
  return item;
}

int64_t group_of(const AttentionArgs& args) { return args.heads / args.cache.heads; }

int64_t queries_per_item(const AttentionArgs& args) {
  const int64_t rows = args.cache.head_dim <= 128 ? 128 : 64;
  const int64_t queries = rows / group_of(args);
  return queries > 1 ? queries : 1;
}

Partial partial_at(float* memory, int64_t rows, int64_t padded) {
  return {memory, memory + rows * padded, memory + rows * padded + rows};
}
int64_t partial_floats(int64_t rows, int64_t padded) { return round_up(rows * (padded + 2), 16); }

template <typename T>
QueryTile load_queries(const AttentionArgs& args, const Item& item, float* q) {
  const int64_t n = args.cache.head_dim, padded = round_up(n, kLanes), group = group_of(args);
  const int64_t first = args.query_start[item.seq] + item.first_query;
  for (int64_t i = 0; i < item.num_queries; ++i) {
    for (int64_t g = 0; g < group; ++g) {
      const T* source = static_cast<const T*>(args.query) + (first + i) * args.query_strides[0] +
          (item.kv_head * group + g) * args.query_strides[1];
      float* row = q + (i * group + g) * padded;
      for_lanes(n, [&](int64_t d, int64_t lanes) { store(row + d, load_upto(source + d, lanes)); });
    }
  }
  const int64_t rows = item.num_queries * group, end = args.seq_lens[item.seq];
  return {q, rows, group, item.position, item.anchor, end, item.num_queries, padded};
}

// What a row's weighted values are multiplied by: one over the sum, in which a sink has its part.
float normaliser(const AttentionArgs& args, int64_t head, float maximum, float sum) {
  if (!args.sinks) return 1.0f / sum;
  const float sink = args.sinks[head];
  const float now = maximum > sink ? maximum : sink;
  const float keep = exp(set1(maximum - now))[0], add = exp(set1(sink - now))[0];
  return keep / (sum * keep + add);
}

template <typename T>
void store_result(const AttentionArgs& args, const Item& item, const Partial& total) {
  const int64_t n = args.cache.head_dim, padded = round_up(n, kLanes), group = group_of(args);
  const int64_t first = args.query_start[item.seq] + item.first_query;
  for (int64_t r = 0; r < item.num_queries * group; ++r) {
    const int64_t head = item.kv_head * group + r % group;
    T* out = static_cast<T*>(args.out) + (first + r / group) * args.out_strides[0] +
        head * args.out_strides[1];
    const float inv = normaliser(args, head, total.maximum[r], total.sum[r]);
    const float* row = total.out + r * padded;
    for_lanes(n, [&](int64_t d, int64_t lanes) { store_upto(out + d, load(row + d) * inv, lanes); });
  }
}

void clear(Partial& total, int64_t rows, int64_t padded) {
  for (int64_t i = 0; i < rows * padded; ++i) total.out[i] = 0;
  for (int64_t r = 0; r < rows; ++r) {
    total.maximum[r] = kMinusInf;
    total.sum[r] = 0;
  }
}

template <typename T>
void attend(
    const AttentionArgs& args, const Item& item, const QueryTile& query, int64_t tile, float* work,
    Partial& partial) {
  const auto keys = key_tile<T>(args, item.seq, item.kv_head, tile, item.kv_begin, item.kv_end);
  switch (query.rows) {
    case 1:
      return attend_rows<T, 1>(args, query, keys, work, partial);
    case 2:
      return attend_rows<T, 2>(args, query, keys, work, partial);
    case 3:
      return attend_rows<T, 3>(args, query, keys, work, partial);
    case 4:
      return attend_rows<T, 4>(args, query, keys, work, partial);
    case 6:
      return attend_rows<T, 6>(args, query, keys, work, partial);
    case 8:
      return attend_rows<T, 8>(args, query, keys, work, partial);
    default:
      return attend_tile(args, query, keys, work, partial);
  }
}

// All tiles of an item, merged as they come.
template <typename T>
void run_item(const AttentionArgs& args, const Item& item) {
  const int64_t n = args.cache.head_dim, padded = round_up(n, kLanes);
  const int64_t rows = item.num_queries * group_of(args);
  const int64_t each = partial_floats(rows, padded);
  float* q = scratch(Scratch::kKernel, rows * padded + 2 * each + attend_tile_floats(n, rows));
  Partial total = partial_at(q + rows * padded, rows, padded);
  Partial partial = partial_at(q + rows * padded + each, rows, padded);
  float* work = q + rows * padded + 2 * each;
  const QueryTile query = load_queries<T>(args, item, q);
  clear(total, rows, padded);
  for (int64_t tile = 0; tile < item.num_tiles; ++tile) {
    attend<T>(args, item, query, item.first_tile + tile, work, partial);
    merge(rows, padded, partial, total);
  }
  store_result<T>(args, item, total);
}

// Fewer items than threads: every tile is computed on its own, then tiles are merged in order.
template <typename T>
void run_split(const AttentionArgs& args, const Item* items, int64_t count, int64_t tiles) {
  const int64_t n = args.cache.head_dim, padded = round_up(n, kLanes);
  const Item& last = items[count - 1];
  const int64_t last_rows = last.num_queries * group_of(args);
  float* partials = scratch(
      Scratch::kPartials,
      last.partials_before + last.num_tiles * partial_floats(last_rows, padded));
  parallel_items(tiles, [&](int64_t index) {
    int64_t i = count - 1;
    while (items[i].tiles_before > index) --i;
    const Item& item = items[i];
    const int64_t tile = index - item.tiles_before;
    const int64_t rows = item.num_queries * group_of(args);
    float* q = scratch(Scratch::kKernel, rows * padded + attend_tile_floats(n, rows));
    const QueryTile query = load_queries<T>(args, item, q);
    float* memory = partials + item.partials_before + tile * partial_floats(rows, padded);
    Partial partial = partial_at(memory, rows, padded);
    attend<T>(args, item, query, item.first_tile + tile, q + rows * padded, partial);
  });
  parallel_items(count, [&](int64_t i) {
    const Item& item = items[i];
    const int64_t rows = item.num_queries * group_of(args);
    const int64_t each = partial_floats(rows, padded);
    Partial total = partial_at(scratch(Scratch::kKernel, each), rows, padded);
    clear(total, rows, padded);
    for (int64_t tile = 0; tile < item.num_tiles; ++tile) {
      float* memory = partials + item.partials_before + tile * each;
      merge(rows, padded, partial_at(memory, rows, padded), total);
    }
    store_result<T>(args, item, total);
  });
}

// Sequences padded with length 0, or without queries, give no items.
int64_t plan(const AttentionArgs& args, Item* items) {
  const int64_t most = queries_per_item(args), padded = round_up(args.cache.head_dim, kLanes);
  int64_t count = 0, tiles = 0, partials = 0;
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
    const int64_t query_len = args.query_start[seq + 1] - args.query_start[seq];
    if (args.seq_lens[seq] <= 0 || query_len <= 0) continue;
    for (int64_t first = 0; first < query_len; first += most) {
      const int64_t queries = query_len - first < most ? query_len - first : most;
      for (int64_t kv_head = 0; kv_head < args.cache.heads; ++kv_head, ++count) {
        if (!items) continue;
        Item& item = items[count] = make_item(args, seq, kv_head, first, queries);
        item.tiles_before = tiles;
        item.partials_before = partials;
        tiles += item.num_tiles;
        partials += item.num_tiles * partial_floats(queries * group_of(args), padded);
      }
    }
  }
  return count;
}

}  // namespace

void paged_attention(const AttentionArgs& args) {
  const int64_t count = plan(args, nullptr);
  if (count == 0) return;
  constexpr int64_t kItemFloats = sizeof(Item) / sizeof(float);
  auto* items = reinterpret_cast<Item*>(scratch(Scratch::kPlan, count * kItemFloats));
  plan(args, items);
  const int64_t tiles = items[count - 1].tiles_before + items[count - 1].num_tiles;
  // Elements streamed per tile, and the products with its rows at a sixteenth of that each.
  const int64_t rows = items[0].num_queries * group_of(args);
  const int64_t tile_cost = 2 * kTileKeys * args.cache.head_dim * (1 + rows / 16);
  with_dtype(args.dtype, [&](auto t) {
    using T = decltype(t);
    if (tiles * tile_cost < 131072) {
      for (int64_t i = 0; i < count; ++i) run_item<T>(args, items[i]);
    } else if (count < num_threads() && tiles > count) {
      run_split<T>(args, items, count, tiles);
    } else {
      // Later queries of a sequence see more keys: the dearest items go first.
      parallel_items(count, [&](int64_t i) { run_item<T>(args, items[count - 1 - i]); });
    }
  });
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
