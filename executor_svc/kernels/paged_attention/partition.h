// Softmax over one context, in partitions that are worked out apart and folded in order.
//
// A partition is kPartition tokens at a multiple of it. Within one, chunks follow each other by the running maximum and
// sum of Milakov and Gimelshein (2018, "Online normalizer calculation for softmax"); partitions are then folded from the
// first to the last. Whether that happens in one go, on several threads or for several rows at once, the arithmetic is
// the same.
#pragma once

#include <cfloat>
#include <cstring>
#include <limits>
#include <vector>

#include "tile.h"

namespace octavo {
namespace attention {

constexpr int kPartition = 256;

// Memory that is taken once and grows when it must; aligned to a cache line.
class Floats {
 public:
  float* at_least(int64_t n) {
    if (static_cast<int64_t>(memory_.size()) < n + kSlack) memory_.resize(static_cast<size_t>(n + kSlack));
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory_.data());
    return memory_.data() + (-address % 64) / sizeof(float);
  }

 private:
  static constexpr int64_t kSlack = 16;
  std::vector<float> memory_;
};

// What query rows know of the tokens they have seen.
struct State {
  float* sums;     // [rows][width]: values, weighted by exp(score - maximum)
  float* maximum;  // [rows]
  float* total;    // [rows]: the weights' sum
};

// The values' columns, rounded up to whole vectors.
inline int64_t width_of(int64_t head_dim) { return round_up(head_dim, kLanes); }

// A partition's result for one row where it must wait for others: sums, maximum, total.
inline int64_t record_floats(int64_t head_dim) { return width_of(head_dim) + 16; }

inline void write_record(const State& state, int row, int64_t width, float* record) {
  std::memcpy(record, state.sums + row * width, static_cast<size_t>(width) * sizeof(float));
  record[width] = state.maximum[row];
  record[width + 1] = state.total[row];
}

// Put a partition behind those before it. Not inlined, so that there is one rounding of it.
__attribute__((noinline)) inline void fold(const float* sums, float maximum, float total, int row, int64_t width,
                                           const State& into) {
  const float both = maximum > into.maximum[row] ? maximum : into.maximum[row];
  const Vec before = exp(broadcast(into.maximum[row] - both)), added = exp(broadcast(maximum - both));
  float* const to = into.sums + row * width;
  for (int64_t i = 0; i < width; i += kLanes) store(to + i, fma(added, load(sums + i), mul(before, load(to + i))));
  float factors[2][kLanes];
  store(factors[0], before);
  store(factors[1], added);
  into.total[row] = factors[0][0] * into.total[row] + factors[1][0] * total;
  into.maximum[row] = both;
}

// One thread's memory for up to `rows` query rows of one KV head.
struct Scratch {
  Floats memory;
  std::vector<int> seen_memory;
  std::vector<const void*> pointers;
  float *query, *keys, *values, *scores, *lanes, *factors;
  State part, whole;
  int *seen, *seen_here;  // tokens each row sees: of the context, of the chunk

  void prepare(int64_t rows, int64_t head_dim) {
    const int64_t width = width_of(head_dim);
    rows = round_up(rows, kLanes);
    const int64_t sizes[] = {rows * head_dim, kChunk * head_dim, kChunk * width, rows * kChunk, rows * kLanes, rows + kLanes,
                             rows * width,    rows,              rows,           rows * width,  rows,          rows};
    float** const parts[] = {&query,     &keys,         &values,     &scores,     &lanes,         &factors,
                             &part.sums, &part.maximum, &part.total, &whole.sums, &whole.maximum, &whole.total};
    int64_t all = 0;
    for (const int64_t size : sizes) all += round_up(size, 16);
    float* next = memory.at_least(all);
    for (size_t i = 0; i < std::size(sizes); ++i) {
      *parts[i] = next;
      next += round_up(sizes[i], 16);
    }
    if (static_cast<int64_t>(seen_memory.size()) < 2 * rows) seen_memory.resize(static_cast<size_t>(2 * rows));
    seen = seen_memory.data();
    seen_here = seen + rows;
    pointers.resize(5 * kChunk);
  }

  // The `index`-th of five arrays of kChunk pointers.
  template <class T>
  const T** pointers_at(int index) const {
    return reinterpret_cast<const T**>(const_cast<const void**>(pointers.data())) + index * kChunk;
  }
};

// One row's keys and values of one KV head.
template <class T>
struct Context {
  const T* keys;  // of the head, at slot 0
  const T* values;
  const int32_t* blocks;
  int64_t block_size;
  int64_t slot_stride;  // elements from one slot to the next
  int64_t head_dim;

  // Point at the keys and values of the tokens [begin, begin + count), which the row owns. Pointers up to the next
  // multiple of 8 repeat the last token's.
  void locate(int64_t begin, int count, const T** key_at, const T** value_at) const {
    int64_t block = begin / block_size, offset = begin % block_size;
    int j = 0;
    while (j < count) {
      int64_t at = (blocks[block] * block_size + offset) * slot_stride;
      const int end = static_cast<int>(std::min<int64_t>(j + block_size - offset, count));
      for (; j < end; ++j, at += slot_stride) {
        key_at[j] = keys + at;
        value_at[j] = values + at;
      }
      ++block;
      offset = 0;
    }
    for (; j % 8; ++j) {
      key_at[j] = key_at[count - 1];
      value_at[j] = value_at[count - 1];
    }
  }
};

// From scores to weights for the rows [begin, end): maxima, the factors that the sums so far are to be scaled by, and the
// sums of the weights, one for each lane.
inline void soften(const Scratch& scratch, int begin, int end) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (int first = begin; first < end; first += kLanes) {
    const int last = std::min(end, first + kLanes);
    for (int r = first; r < last; ++r) {
      float* const scores = scratch.scores + r * kChunk;
      const int seen = scratch.seen_here[r];
      for (int j = seen; j % kLanes; ++j) scores[j] = -kInfinity;
      Vec best = load(scores);
      for (int j = kLanes; j < seen; j += kLanes) best = max(best, load(scores + j));
      // A NaN may or may not win here; it stays in its own weight below.
      const float top = max_lane(best), before = scratch.part.maximum[r];
      scratch.part.maximum[r] = top > before ? top : before;
      scratch.factors[r] = before - scratch.part.maximum[r];
    }
    // Entries beyond `last` are of rows that come next, or of none.
    store(scratch.factors + first, exp(load(scratch.factors + first)));
    for (int r = first; r < last; ++r) {
      float* const scores = scratch.scores + r * kChunk;
      const Vec maximum = broadcast(scratch.part.maximum[r]);
      Vec sum = mul(broadcast(scratch.factors[r]), load(scratch.lanes + r * kLanes));
      for (int j = 0; j < scratch.seen_here[r]; j += kLanes) {
        const Vec weight = exp(sub(load(scores + j), maximum));
        store(scores + j, weight);
        sum = add(sum, weight);
      }
      store(scratch.lanes + r * kLanes, sum);
    }
  }
}

// Work out the partition at `begin` for the query rows [first, rows), which all see some of it, into scratch.part.
// scratch.query and scratch.seen are theirs, seen ascending.
template <class T>
void compute_partition(const Context<T>& context, int64_t begin, int first, int rows, float scale,
                       const Scratch& scratch) {
  const int64_t head_dim = context.head_dim, width = width_of(head_dim);
  const T** key_at = scratch.pointers_at<T>(0);
  const T** value_at = scratch.pointers_at<T>(1);
  const T** next_key_at = scratch.pointers_at<T>(2);
  const T** next_value_at = scratch.pointers_at<T>(3);
  const float** const copied_at = scratch.pointers_at<float>(4);
  const State& part = scratch.part;
  const int from = first;
  std::fill(part.sums + first * width, part.sums + rows * width, 0.0f);
  std::fill(scratch.lanes + first * kLanes, scratch.lanes + rows * kLanes, 0.0f);
  // Not minus infinity: differences from it must not be NaN.
  std::fill(part.maximum + first, part.maximum + rows, -FLT_MAX);
  const int64_t end = std::min<int64_t>(begin + kPartition, scratch.seen[rows - 1]);
  for (int64_t chunk = begin; chunk < end; chunk += kChunk) {
    while (scratch.seen[first] <= chunk) ++first;
    const int count = static_cast<int>(std::min<int64_t>(kChunk, end - chunk));
    for (int r = first; r < rows; ++r)
      scratch.seen_here[r] = static_cast<int>(std::min<int64_t>(kChunk, scratch.seen[r] - chunk));
    if (chunk == begin) context.locate(chunk, count, key_at, value_at);
    const int64_t next = std::min<int64_t>(kChunk, scratch.seen[rows - 1] - chunk - kChunk);
    if (next > 0) context.locate(chunk + kChunk, static_cast<int>(next), next_key_at, next_value_at);
    for (int j = std::max<int>(0, static_cast<int>(next)); j < kChunk; ++j) next_key_at[j] = key_at[0];
    transpose(key_at, value_at, count, head_dim, scratch.keys);
    const Vec scaled_by = broadcast(scale);
    for_tiles(first, rows, [&]<int R>(int row) {
      score_rows<R>(scratch.query + row * head_dim, head_dim, scratch.keys, scratch.seen_here[row + R - 1], scaled_by,
                    scratch.scores + row * kChunk);
    });
    soften(scratch, first, rows);
    // Several tiles read the values again and again: from a copy, where they lie side by side.
    const bool copy = rows - first > kTileRows || width != head_dim;
    if (copy) {
      for (int j = 0; j < count; ++j) {
        float* const to = scratch.values + j * width;
        copied_at[j] = to;
        for (int64_t i = 0; i < head_dim; i += kLineBytes / static_cast<int64_t>(sizeof(T))) prefetch(next_key_at[j] + i);
        int64_t i = 0;
        for (; i + kLanes <= head_dim; i += kLanes) store(to + i, load(value_at[j] + i));
        for (; i < width; ++i) to[i] = i < head_dim ? widen(value_at[j][i]) : 0.0f;
      }
    }
    for_tiles(first, rows, [&]<int R>(int row) {
      const float* const weights = scratch.scores + row * kChunk;
      const int* const seen = scratch.seen_here + row;
      if (copy)
        value_rows<R, float>(weights, copied_at, nullptr, seen, scratch.factors + row, part.sums + row * width, width);
      else
        value_rows<R, T>(weights, value_at, next_key_at, seen, scratch.factors + row, part.sums + row * width, width);
    });
    std::swap(key_at, next_key_at);
    std::swap(value_at, next_value_at);
  }
  for (int r = from; r < rows; ++r) part.total[r] = sum_lanes(load(scratch.lanes + r * kLanes));
}

}  // namespace attention
}  // namespace octavo
