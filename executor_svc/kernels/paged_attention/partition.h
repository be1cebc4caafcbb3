// Softmax over one context, in partitions that are worked out apart and folded in order.
//
// A partition is kPartition tokens at a multiple of it. Within one, chunks follow each other by the running maximum and
// sum of Milakov and Gimelshein (2018, "Online normalizer calculation for softmax"); partitions are then folded from the
// first to the last. Whether that happens in one go, on several threads or for several rows at once, the arithmetic is
// the same. A row whose window begins within a chunk has that chunk's other tokens masked; those before it do not exist.
#pragma once

#include <cfloat>
#include <cstring>
#include <limits>
#include <vector>

#include "../native/csrc/lanes.h"
#include "fold.h"
#include "weigh.h"

namespace octavo {
namespace attention {

constexpr int kPartition = 256;
// Tokens of a chunk: contexts are walked at multiples of it.
constexpr int kChunk = 64;
// Tokens whose keys and values are worked on before those that follow, and how far ahead of them memory is fetched.
constexpr int kStretch = 16;
constexpr int kAhead = 16;

// Pointers to the tokens that are read in turn: a chunk's keys and values, and what follows.
constexpr int kStream = 4 * kChunk;

// What query rows know of the tokens of a partition that they have seen.
struct State {
  float* sums;     // [rows][width]: values, weighted by exp(score - maximum), in the order of spread
  float* lanes;    // [rows][kLanes]: sums of the weights
  float* maximum;  // [rows]

  // Nothing seen. The maximum is not minus infinity: differences from it must not be NaN.
  void clear(int row, int64_t width) const {
    std::fill_n(sums + row * width, width, 0.0f);
    std::fill_n(lanes + row * kLanes, kLanes, 0.0f);
    maximum[row] = -FLT_MAX;
  }

  // A row's state where it must wait for others: sums, lanes, maximum.
  static int64_t record_floats(int64_t width) { return width + round_up(kLanes + 1, 16); }
  void write_record(int row, int64_t width, float* record) const {
    std::memcpy(record, sums + row * width, static_cast<size_t>(width) * sizeof(float));
    std::memcpy(record + width, lanes + row * kLanes, kLanes * sizeof(float));
    record[width + kLanes] = maximum[row];
  }
  void read_record(const float* record, int64_t width, int row) const {
    std::memcpy(sums + row * width, record, static_cast<size_t>(width) * sizeof(float));
    std::memcpy(lanes + row * kLanes, record + width, kLanes * sizeof(float));
    maximum[row] = record[width + kLanes];
  }
  static void write_whole(const Whole& whole, int64_t row, int64_t width, float* record) {
    std::memcpy(record, whole.sums + row * width, static_cast<size_t>(width) * sizeof(float));
    std::fill_n(record + width, kLanes, 0.0f);
    record[width] = whole.total[row];
    record[width + kLanes] = whole.maximum[row];
  }
  static Part part_of_record(const float* record, int64_t width) {
    return Part{record, sum_lanes(load(record + width)), record[width + kLanes]};
  }

  Part part(int row, int64_t width) const {
    return Part{sums + row * width, sum_lanes(load(lanes + row * kLanes)), maximum[row]};
  }
};

// One thread's memory for the query rows of a task: `rows` of each of `heads` KV heads, those of a head side by side.
struct VectorScratch {
  Floats memory;
  std::vector<int> seen_memory;
  std::vector<const void*> pointers;
  float *query, *keys, *values, *scores, *factors;
  State part;
  Whole whole;
  int *from, *seen;            // the tokens of the context that each row of a head sees
  int *from_here, *seen_here;  // of the chunk

  int64_t stride;              // rows of a head
  int64_t width;

  void prepare(int64_t heads, int64_t rows, int64_t row_width) {
    stride = rows;
    width = row_width;
    const int64_t all = heads * rows + kLanes;
    memory.lay_out({{&query, all * width},
                    {&keys, kChunk * width},
                    {&values, kChunk * width},
                    {&scores, all * kChunk},
                    {&factors, all},
                    {&part.sums, all * width},
                    {&part.lanes, all * kLanes},
                    {&part.maximum, all},
                    {&whole.sums, all * width},
                    {&whole.maximum, all},
                    {&whole.total, all}});
    if (static_cast<int64_t>(seen_memory.size()) < 4 * rows) seen_memory.resize(static_cast<size_t>(4 * rows));
    from = seen_memory.data();
    seen = from + rows;
    from_here = seen + rows;
    seen_here = from_here + rows;
    pointers.resize(kStream + kChunk);
  }
};

// From scores to weights for the rows [begin, end) of a head, whose states and scores begin at `base`: maxima, the
// sums so far scaled to them, and the sums of the weights, one for each lane.
inline void soften(const VectorScratch& scratch, const Scores& by, int base, int begin, int end, int64_t width) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const State& part = scratch.part;
  float* const factors = scratch.factors;
  for (int r = begin; r < end; ++r) {
    float* const scores = scratch.scores + (base + r) * kChunk;
    const int first = scratch.from_here[r] / kLanes * kLanes, seen = scratch.seen_here[r];
    if (by.soft_cap > 0)
      for (int j = first; j < seen; j += kLanes) {
        const Vec cap = broadcast(by.soft_cap);
        store(scores + j, mul(cap, tanh(div(load(scores + j), cap))));
      }
    for (int j = first; j < scratch.from_here[r]; ++j) scores[j] = -kInfinity;
    for (int j = seen; j % kLanes; ++j) scores[j] = -kInfinity;
    Vec best = load(scores + first);
    for (int j = first + kLanes; j < seen; j += kLanes) best = max(best, load(scores + j));
    // A NaN may or may not win here; it stays in its own weight below.
    const float top = max_lane(best), before = part.maximum[base + r];
    part.maximum[base + r] = top > before ? top : before;
    factors[r - begin] = before - part.maximum[base + r];
  }
  // Entries beyond the last are of nobody.
  for (int r = 0; r < end - begin; r += kLanes) store(factors + r, exp(load(factors + r)));
  for (int r = begin; r < end; ++r) {
    float* const scores = scratch.scores + (base + r) * kChunk;
    float* const sums = part.sums + (base + r) * width;
    float* const lanes = part.lanes + (base + r) * kLanes;
    const Vec maximum = broadcast(part.maximum[base + r]), factor = broadcast(factors[r - begin]);
    Vec sum = mul(factor, load(lanes));
    for (int j = scratch.from_here[r] / kLanes * kLanes; j < scratch.seen_here[r]; j += kLanes) {
      const Vec weight = exp(sub(load(scores + j), maximum));
      store(scores + j, weight);
      sum = add(sum, weight);
    }
    store(lanes, sum);
    for (int64_t i = 0; i < width; i += kLanes) store(sums + i, mul(factor, load(sums + i)));
  }
}

// The states of rows, from one on.
struct Parts {
  const State& state;
  int row;
  int64_t width;

  Part part(int i) const { return state.part(row + i, width); }
  void write_record(int i, float* record) const { state.write_record(row + i, width, record); }
};

// Works on the chunks of one task.
template <class T>
class Chunks {
 public:
  Chunks(const Context<T>& context, const Scores& scores, int heads, int rows, const VectorScratch& scratch)
      : context_(context),
        by_(scores),
        heads_(heads),
        rows_(rows),
        width_(width_of<T>(context.head_dim)),
        // Several tiles read keys and values again and again: from a copy, where they lie side by side.
        copy_(rows > kFewRows || width_ != context.head_dim),
        scratch_(scratch) {}

  // Put the tokens [begin, end), begin being a chunk's first, behind what scratch.part holds of the rows
  // [first, last). `next`, where it has a context, is read after them. Then tell done(head, row, end_row, parts).
  template <class F>
  void run(int64_t begin, int64_t end, int first, int last, const Next<T>& next, const F& done) {
    run(begin, end, next);
    for (int head = 0; head < heads_; ++head)
      done(head, first, last, Parts{scratch_.part, head * rows_ + first, width_});
  }

 private:
  void run(int64_t begin, int64_t end, const Next<T>& next) {
    begin = std::max<int64_t>(begin, scratch_.from[0] / kChunk * kChunk);
    for (int64_t chunk = begin; chunk < end; chunk += kChunk) {
      while (first_ < rows_ && scratch_.seen[first_] <= chunk) ++first_;
      int last = rows_;
      while (last > first_ && scratch_.from[last - 1] >= chunk + kChunk) --last;
      if (first_ == last) continue;
      const int64_t until = std::min<int64_t>(end, scratch_.seen[last - 1]);
      const int count = static_cast<int>(std::min<int64_t>(kChunk, until - chunk));
      for (int r = first_; r < last; ++r) {
        scratch_.from_here[r] = static_cast<int>(std::max<int64_t>(0, scratch_.from[r] - chunk));
        scratch_.seen_here[r] = static_cast<int>(std::min<int64_t>(count, scratch_.seen[r] - chunk));
      }
      locate(chunk, count, end, next);
      if (copy_)
        by_copies(last, count);
      else
        in_place(last, count);
    }
  }

  const Context<T>& context_;
  const Scores& by_;
  const int heads_, rows_;
  const int64_t width_;
  const bool copy_;
  const VectorScratch& scratch_;
  int first_ = 0;  // the first row that sees something
  int skipped_ = 0;

  const T** stream() const { return reinterpret_cast<const T**>(const_cast<const void**>(scratch_.pointers.data())); }

  // Line up what is read in turn: the chunk's keys from its first stretch that is seen on, its values, then the next
  // chunk's keys.
  void locate(int64_t chunk, int count, int64_t end, const Next<T>& next) {
    skipped_ = scratch_.from_here[first_] / kStretch * kStretch;
    const int64_t begin = chunk + skipped_, size = count - skipped_;
    const T** at = context_.locate(context_.keys, begin, size, stream());
    at = context_.locate(context_.values, begin, size, at);
    // Copies are made one after the other, each while what the next is of is fetched.
    const int64_t ahead = copy_ ? size : kAhead;
    if (chunk + kChunk < end)
      at = context_.locate(context_.keys, chunk + kChunk, std::min(ahead, end - chunk - kChunk), at);
    else if (next.context)
      at = next.context->locate(next.context->keys, next.begin, std::min(ahead, next.count), at);
    // What a tile reads behind the last token means nothing, and must only be there.
    std::fill(at, stream() + 2 * size + std::max<int64_t>(ahead, kAhead + kDotTokens<1>), stream()[0]);
  }

  const T* const* keys_at() const { return stream() - skipped_; }
  const T* const* values_at(int count) const { return stream() + count - 2 * skipped_; }

  // What is fetched while a stretch is worked on.
  Ahead<T> ahead_of(const T* const* tokens) const {
    return Ahead<T>(tokens + kAhead, tokens + kAhead + kStretch, heads_ * context_.head_dim);
  }

  float* scores(int head, int row) const { return scratch_.scores + (head * rows_ + row) * kChunk; }
  float* sums(int head, int row) const { return scratch_.part.sums + (head * rows_ + row) * width_; }

  bool sees_any(int row, int count, int begin, int end) const {
    return scratch_.seen_here[row + count - 1] > begin && scratch_.from_here[row] < end;
  }

  void in_place(int last, int count) {
    const T* const* const keys = keys_at();
    for (int begin = skipped_; begin < count; begin += kStretch) {
      const int end = std::min(begin + kStretch, count);
      Ahead<T> ahead = ahead_of(keys + begin);
      for (int head = 0; head < heads_; ++head) score(keys, head * context_.head_dim, head, last, begin, end, &ahead);
    }
    for (int head = 0; head < heads_; ++head) soften(scratch_, by_, head * rows_, first_, last, width_);
    const T* const* const values = values_at(count);
    for (int begin = skipped_; begin < count; begin += kStretch) {
      Ahead<T> ahead = ahead_of(values + begin);
      for (int head = 0; head < heads_; ++head)
        weigh(Values<T>{values, head * context_.head_dim, &ahead}, head, last, begin, std::min(begin + kStretch, count));
    }
  }

  void by_copies(int last, int count) {
    const float** const copies =
        reinterpret_cast<const float**>(const_cast<const void**>(scratch_.pointers.data() + kStream));
    for (int head = 0; head < heads_; ++head) {
      copy(keys_at(), head, count, scratch_.keys, copies);
      for (int begin = skipped_; begin < count; begin += kStretch)
        score<float>(copies, 0, head, last, begin, std::min(begin + kStretch, count), nullptr);
      soften(scratch_, by_, head * rows_, first_, last, width_);
      copy(values_at(count), head, count, scratch_.values, copies);
      weigh(Values<float>{copies, 0, nullptr}, head, last, skipped_, count);
    }
  }

  void copy(const T* const* at, int head, int count, float* to, const float** copies) const {
    const int64_t offset = head * context_.head_dim;
    for (int j = skipped_; j < count; ++j) {
      const T* const later = at[j + count - skipped_] + offset;
      Ahead<T>(&later, &later + 1, context_.head_dim).fetch(context_.head_dim);
      copies[j] = to + j * width_;
      spread(at[j] + offset, context_.head_dim, width_, to + j * width_);
    }
    for (int j = count; j % kDotTokens<1>; ++j) copies[j] = copies[count - 1];
  }

  template <class K>
  void score(const K* const* keys, int64_t offset, int head, int last, int begin, int end, Ahead<K>* ahead) const {
    for_tiles<kDotRows>(first_, last, [&]<int R>(int row) {
      if (!sees_any(row, R, begin, end)) return;
      const float* const query = scratch_.query + (head * rows_ + row) * width_;
      for (int j = begin; j < end; j += kDotTokens<R>) {
        if (ahead && row == first_) ahead->fetch(kDotTokens<R> * context_.head_dim);
        dot_tile<R>(query, keys + j, offset, width_, by_.scale, scores(head, row) + j, kChunk);
      }
    });
  }

  template <class V>
  void weigh(const Values<V>& values, int head, int last, int begin, int end) const {
    // Of bfloat16, which lie in place, there are few rows.
    constexpr int most = kHalves<V> == 2 ? std::min(kFewRows, kTileRows) : kTileRows;
    for_tiles<most>(first_, last, [&]<int R>(int row) {
      if (sees_any(row, R, begin, end))
        value_rows<R>(scores(head, row), kChunk, values, scratch_.from_here + row, scratch_.seen_here + row, begin, end,
                      sums(head, row), width_);
    });
  }
};

// See plan.h for what is asked of such a kind.
template <class T>
struct ByVectors {
  using Element = T;
  static constexpr int kPartition = attention::kPartition;
  static constexpr int kChunk = attention::kChunk;
  // Most query rows of a task: enough that copying keys and values costs little beside what they are used for.
  static constexpr int kMostRows = 192;
  static constexpr int kMostHeads = 1 << 20;
  struct Lent {};
  using Chunks = attention::Chunks<T>;

  static int64_t width(int64_t head_dim) { return width_of<T>(head_dim); }
  static int64_t record_floats(int64_t width) { return State::record_floats(width); }
  static Part part_of_record(const float* record, int64_t width) { return State::part_of_record(record, width); }
  static void write_whole(const Whole& whole, int64_t row, int64_t width, float* record) {
    State::write_whole(whole, row, width, record);
  }
  static Vec exp(Vec x) { return octavo::exp(x); }

  struct Scratch : VectorScratch {
    void prepare(int64_t heads, int64_t rows, int64_t head_dim) {
      VectorScratch::prepare(heads, rows, width_of<T>(head_dim));
    }
    void put_query(int64_t head, int64_t row, const T* from, int64_t head_dim) const {
      spread(from, head_dim, width, query + (head * stride + row) * width);
    }
    void write_out(int64_t row, int64_t head_dim, T* out) const {
      float* const sums = whole.sums + row * width;
      const Vec total = broadcast(whole.total[row]);
      for (int64_t i = 0; i < width; i += kLanes) store(sums + i, div(load(sums + i), total));
      gather(sums, head_dim, width, out);
    }
  };
};

}  // namespace attention
}  // namespace octavo
