// What attention by tiles keeps: the sizes it works in, and one thread's memory for a task.
#pragma once

#include "tile_products.h"

#if defined(OCTAVO_TILES)

#include <cstring>
#include <vector>

#include "dot.h"
#include "tile_weights.h"

namespace octavo {
namespace attention {

struct ByTiles {
  using Element = bf16;
  // A partition that rows share is read once for all of them; what they share less is not.
  static constexpr int kPartition = 128;
  static constexpr int kChunk = kPartition;
  static constexpr int kTokenTiles = kPartition / kTile;
  // Words of the weights of a tile of rows, in two tiles for every tile of tokens.
  static constexpr int kWeights = kTile * kPartition * 2;
  // Most query rows of a task: the more, the less often keys are packed. Most KV heads of a task of few.
  static constexpr int kMostRows = 384;
  static constexpr int kMostHeads = 8;
  // Few rows weigh so many tiles of tokens of all heads before those that follow.
  static constexpr int kStretchTiles = 2;
  // How far ahead few rows fetch, in tokens, and how many lines at each step: a tile of keys or of values has 16, what
  // is left is spread over the steps between, so that memory is never idle for long. Found by measurement.
  static constexpr int kAhead = 96;
  static constexpr int64_t kLinesByKeys = 12, kLinesByScores = 4, kLinesByRow = 12, kLinesByValues = 14;
  using Lent = TilesInUse;

  // Parts of rows, from one on.
  struct Parts {
    const float *sums, *total, *maximum;
    int64_t width;

    Part part(int i) const { return Part{sums + i * width, total[i], maximum[i]}; }
    void write_record(int i, float* record) const {
      std::memcpy(record, sums + i * width, static_cast<size_t>(width) * sizeof(float));
      record[width] = total[i];
      record[width + 1] = maximum[i];
    }
  };

  static int64_t width(int64_t head_dim) { return round_up(head_dim, kDepth); }
  static int64_t record_floats(int64_t width) { return width + 16; }
  static Part part_of_record(const float* record, int64_t width) {
    return Part{record, record[width], record[width + 1]};
  }
  static void write_whole(const Whole& whole, int64_t row, int64_t width, float* record) {
    Parts{whole.sums, whole.total, whole.maximum, width}.write_record(static_cast<int>(row), record);
  }
  static Vec exp(Vec x) { return exp2(x); }

  // One thread's memory for the query rows of a task: `rows` of each of `heads` KV heads.
  struct Scratch;
  class Chunks;
};

struct ByTiles::Scratch {
  bf16* queries;    // few rows: [heads][depths] tiles of pairs; many: [heads][stride][width]
  bf16* keys;       // few rows: [kTilesAtOnce][kTile][width]; many: [kTokenTiles][depths] tiles of pairs
  bf16* values;     // [heads][kPartition][width]: copies of what does not fill a tile as it lies
  bf16* nothing;    // a token's heads, all zero
  float* products;  // [heads][kPartition][kTile]
  float* scores;    // [kTile][kPartition]
  // Of each head a tile of rows:
  float* weights;  // [1 or 2][kTokenTiles] tiles
  float* sums;     // [kTile][width], in the order of spread
  float *total, *maximum;  // [kTile]
  Whole whole;             // heads `stride` rows apart
  int *from, *seen, *from_here, *seen_here;
  int64_t stride;
  int64_t width;
  bool few;
  bool one;  // tile of weights for all rows

  void prepare(int64_t heads, int64_t rows, int64_t head_dim) {
    width = ByTiles::width(head_dim);
    stride = rows;
    few = rows <= kTile;
    one = rows <= kWeightRows;
    const int64_t all = heads * stride, tile = heads * kTile, partition = heads * kPartition;
    // Whole tiles of queries, though rows behind the last are of nobody.
    float *in_queries, *in_keys, *in_values, *in_nothing;
    memory_.lay_out({{&in_queries, (all + tile) * width / 2},
                     {&in_keys, kPartition * width / 2},
                     {&in_values, partition * width / 2},
                     {&in_nothing, (heads * head_dim + 1) / 2},
                     {&products, partition * kTile},
                     {&scores, kTile * kPartition},
                     {&weights, heads * (rows > kWeightRows ? kWeights : kWeights / 2)},
                     {&sums, tile * width},
                     {&total, tile},
                     {&maximum, tile},
                     {&whole.sums, all * width},
                     {&whole.maximum, all},
                     {&whole.total, all}});
    queries = reinterpret_cast<bf16*>(in_queries);
    keys = reinterpret_cast<bf16*>(in_keys);
    values = reinterpret_cast<bf16*>(in_values);
    nothing = reinterpret_cast<bf16*>(in_nothing);
    std::fill_n(nothing, heads * head_dim, bf16{0});
    if (static_cast<int64_t>(rows_memory_.size()) < 4 * rows) rows_memory_.resize(static_cast<size_t>(4 * rows));
    from = rows_memory_.data();
    seen = from + rows;
    from_here = seen + rows;
    seen_here = from_here + rows;
    // Keys and values, and those that are next.
    static_assert(kAhead <= 2 * kPartition);
    if (pointers_.empty()) pointers_.resize(4 * kPartition);
  }

  const bf16** stream() const { return const_cast<const bf16**>(pointers_.data()); }

  float* weights_of(int64_t place) const { return weights + place * (one ? kWeights / 2 : kWeights); }

  void put_query(int64_t head, int64_t row, const bf16* query, int64_t head_dim) const {
    if (!few) {
      bf16* const to = queries + (head * stride + row) * width;
      for (int64_t i = 0; i < width; i += kDepth) copy_part(query, i, head_dim, to + i);
      return;
    }
    bf16* const to = queries + head * kTile * width;
    for (int64_t i = 0; i < width; i += kDepth) {
      alignas(64) uint32_t pairs[kTile];
      copy_part(query, i, head_dim, reinterpret_cast<bf16*>(pairs));
      uint32_t* const tile = reinterpret_cast<uint32_t*>(to) + i / kDepth * kTileWords;
      for (int pair = 0; pair < kTile; ++pair) tile[pair * kTile + row] = pairs[pair];
    }
  }

  void write_out(int64_t row, int64_t head_dim, bf16* out) const {
    float* const at = whole.sums + row * width;
    const Vec by = broadcast(whole.total[row]);
    for (int64_t i = 0; i < width; i += kLanes) store(at + i, div(load(at + i), by));
    gather(at, head_dim, width, out);
  }

 private:
  Floats memory_;
  std::vector<int> rows_memory_;
  std::vector<const bf16*> pointers_;
};

}  // namespace attention
}  // namespace octavo

#endif
