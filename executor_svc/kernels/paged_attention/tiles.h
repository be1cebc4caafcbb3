// Attention of bfloat16 by tiles, a partition at a time.
//
// Scores are products of queries and keys; their softmax over the partition gives weights, rounded to bfloat16 as in
// FlashAttention (Dao et al. 2022); products of weights and values give sums. Few query rows take keys from memory as
// the left factor. Many rows take them from the right, in pairs, as a copy that all of them use. Either way the
// numbers of a row are the same, bit for bit.
#pragma once

#include "tile_scratch.h"

#if defined(OCTAVO_TILES)

namespace octavo {
namespace attention {

class ByTiles::Chunks {
 public:
  Chunks(const Context<bf16>& context, const Scores& by, int heads, int rows, const Scratch& scratch)
      : context_(context),
        by_{softening(by)},
        heads_(heads),
        rows_(rows),
        depths_(scratch.width / kDepth),
        // Tiles take tokens from where they lie if 16 do so at one distance, and heads end where a tile ends.
        in_place_(context.block_size % kTile == 0 && context.head_dim % kDepth == 0),
        scratch_(scratch) {}

  // Work out the partition that begins at `begin`, tokens from `end` on apart, for the rows [first, last), each of
  // which sees some of it; `next`, where it has a context, is read afterwards. done(head, row, end_row, parts) is told
  // of rows whose parts are ready: they last until it returns.
  template <class F>
  void run(int64_t begin, int64_t end, int first, int last, const Next<bf16>& next, const F& done) {
    end = std::min<int64_t>(end, scratch_.seen[last - 1]);
    for (int r = first; r < last; ++r) {
      scratch_.from_here[r] = static_cast<int>(std::max<int64_t>(0, scratch_.from[r] - begin));
      scratch_.seen_here[r] = static_cast<int>(std::min<int64_t>(end, scratch_.seen[r]) - begin);
    }
    low_ = scratch_.from_here[first] / kTile * kTile;
    high_ = static_cast<int>(end - begin);
    locate(begin, next);
    if (scratch_.few)
      few_rows(first, last, done);
    else
      for (int head = 0; head < heads_; ++head) many_rows(head, first, last, done);
  }

 private:
  const Context<bf16>& context_;
  const Softening by_;
  const int heads_, rows_;
  const int64_t depths_;
  const bool in_place_;
  const Scratch& scratch_;
  int low_ = 0, high_ = 0;  // the partition's tokens that are read: from a tile's first on
  const bf16** on_their_way_ = nullptr;
  const bf16** ahead_end_ = nullptr;
  ValueTile value_tiles_[kMostHeads][kTokenTiles];

  static Softening softening(const Scores& by) {
    if (by.soft_cap > 0 || !(by.scale > 0)) return Softening{kLog2E, by.soft_cap, by.scale};
    return Softening{by.scale * kLog2E, 0.0f, 1.0f};
  }

  const bf16* const* keys() const { return scratch_.stream() - low_; }
  const bf16* const* values() const { return scratch_.stream() + (high_ - low_) - low_; }

  // Line up what is read in turn: keys, values, then what follows, its keys and its values: for few rows the first of it.
  void locate(int64_t begin, const Next<bf16>& next) {
    const int64_t count = high_ - low_;
    const bf16** at = context_.locate(context_.keys, begin + low_, count, scratch_.stream());
    at = context_.locate(context_.values, begin + low_, count, at);
    on_their_way_ = scratch_.few ? std::min(scratch_.stream() + kAhead, at) : at;
    if (next.context) {
      const int64_t most = scratch_.few ? kAhead : 2 * kPartition;
      const int64_t keys = std::min<int64_t>(most, next.count), values = std::min<int64_t>(most - keys, keys);
      at = next.context->locate(next.context->keys, next.begin, keys, at);
      at = next.context->locate(next.context->values, next.begin, values, at);
    }
    ahead_end_ = at;
  }

  using Fetching = AheadSideBySide<bf16>;
  // All but the first, which are on their way.
  Fetching ahead() const { return Fetching(on_their_way_, ahead_end_, heads_ * context_.head_dim); }

  // Lines of the kTile tokens from `token` on, zeros for those outside [begin, end).
  void copy_tile(const bf16* const* tokens, int token, int begin, int end, int64_t offset, bf16* to) const {
    for (int j = token; j < token + kTile; ++j, to += scratch_.width) {
      const bf16* const head = j >= begin && j < end ? tokens[j] + offset : scratch_.nothing;
      for (int64_t i = 0; i < scratch_.width; i += kDepth) copy_part(head, i, context_.head_dim, to + i);
    }
  }

  // ---- few rows ----

  // All heads go through each step together, so that memory is read in the order in which it lies.
  template <class F>
  void few_rows(int first, int last, const F& done) {
    Fetching fetching = ahead();
    const auto fetch = [&](int64_t lines) { fetching.fetch(lines * Fetching::kLine); };
    for (int token = low_; token < high_; token += kTile)
      for_groups(0, heads_, [&]<int N>(int64_t head) { score_few<N>(token, head, [&] { fetch(kLinesByKeys); }); });
    for (int head = 0; head < heads_; ++head) {
      turn_products(scratch_.products + head * kPartition * kTile, [&] { fetch(kLinesByScores); });
      soften(head, 0, first, last, [&] { fetch(kLinesByRow); });
    }
    bool together = true;
    for (int head = 0; head < heads_; ++head) together = together && all_finite(head, first, last);
    if (!together) {
      for (int head = 0; head < heads_; ++head) weigh_apart(head, head, 0, first, last, done);
      return;
    }
    for (int head = 0; head < heads_; ++head) find_values(head, scratch_.from_here[first], high_);
    const int begin = low_ / kTile, end = (high_ + kTile - 1) / kTile;
    for (int tile = begin; tile < end; tile += kStretchTiles)
      for (int head = 0; head < heads_; ++head)
        weigh_tiles(head, head, rows_, tile, std::min(end, tile + kStretchTiles), tile > begin,
                    [&] { fetch(kLinesByValues); });
    fetch(kPartition * heads_ * context_.head_dim);
    for (int head = 0; head < heads_; ++head) finish(head, head, 0, first, last, done);
  }

  // 16 tokens of N heads.
  template <int N, class F>
  void score_few(int token, int64_t head, const F& fetch) const {
    const bf16* keys = this->keys()[token] + head * context_.head_dim;
    int64_t stride = context_.slot_stride, next_head = context_.head_dim;
    if (!in_place_) {
      stride = scratch_.width;
      next_head = kTile * scratch_.width;
      keys = scratch_.keys;
      for (int n = 0; n < N; ++n)
        copy_tile(this->keys(), token, low_, high_, (head + n) * context_.head_dim, scratch_.keys + n * next_head);
    }
    multiply_keys<N>(keys, stride, next_head, scratch_.queries + head * kTile * scratch_.width, depths_,
                     scratch_.products + (head * kPartition + token) * kTile, kPartition * kTile, fetch);
  }

  // Products [token][query] to scores [query][token].
  template <class F>
  void turn_products(const float* products, const F& fetch) const {
    for (int token = low_; token < high_; token += kTile) {
      const void* lines[kTile];
      for (int i = 0; i < kTile; ++i) lines[i] = products + (token + i) * kTile;
      for (int64_t row = 0; row < rows_; row += 4)
        turn_four(lines, row, scratch_.scores + row * kPartition + token, kPartition);
      fetch();
    }
  }

  // ---- many rows ----

  template <class F>
  void many_rows(int head, int first, int last, const F& done) {
    pack_keys(head);
    const auto nothing = [] {};
    // What follows is fetched in even parts.
    const int64_t width = heads_ * context_.head_dim, tiles = (last - first / kTile * kTile + kTile - 1) / kTile;
    const int64_t each = ((ahead_end_ - on_their_way_) * width + tiles - 1) / tiles;
    Ahead<bf16> fetching(head == 0 ? on_their_way_ : ahead_end_, ahead_end_, width);
    const bool together = all_finite(head, first, last);
    if (together) find_values(head, scratch_.from_here[first], high_);
    for (int row = first / kTile * kTile; row < last; row += kTile) {
      fetching.fetch(each);
      const int begin = std::max(first, row), end = std::min(last, row + kTile);
      const bf16* const queries = scratch_.queries + (head * scratch_.stride + row) * scratch_.width;
      for_groups(scratch_.from_here[begin] / kTile, (scratch_.seen_here[end - 1] + kTile - 1) / kTile,
                 [&]<int N>(int64_t tile) {
                   multiply_queries<N>(queries, scratch_.width, scratch_.keys + tile * kTile * scratch_.width,
                                       scratch_.scores + tile * kTile, kPartition);
                 });
      soften(0, row, begin, end, nothing);
      if (!together) {
        weigh_apart(head, 0, row, begin, end, done);
        continue;
      }
      weigh_tiles(head, 0, end - row, scratch_.from_here[begin] / kTile,
                  (scratch_.seen_here[end - 1] + kTile - 1) / kTile, false, nothing);
      finish(head, 0, row, begin, end, done);
    }
  }

  void pack_keys(int head) const {
    const int64_t offset = head * context_.head_dim;
    for (int token = low_; token < high_; token += kTile) {
      bf16* const tiles = scratch_.keys + token * scratch_.width;
      alignas(64) bf16 copies[kTile][kDepth];
      for (int64_t k = 0; k < depths_; ++k) {
        const void* lines[kTile];
        for (int j = 0; j < kTile; ++j) {
          const bf16* const key = token + j < high_ ? keys()[token + j] + offset : scratch_.nothing;
          lines[j] = key + k * kDepth;
          if ((k + 1) * kDepth > context_.head_dim) {
            copy_part(key, k * kDepth, context_.head_dim, copies[j]);
            lines[j] = copies[j];
          }
        }
        float* const tile = reinterpret_cast<float*>(tiles + k * kTileWords * 2);
        for (int64_t word = 0; word < kTile; word += 4) turn_four(lines, word, tile + word * kTile, kTile);
      }
    }
  }

  // ---- either ----

  // Rows [begin, end) of the tile from `row` on; `place` says whose weights they become.
  template <class F>
  void soften(int place, int row, int begin, int end, const F& fetch) const {
    soften_tile<kPartition>(by_, Sight{scratch_.from_here + row, scratch_.seen_here + row}, begin - row, end - row,
                            scratch_.scores, scratch_.weights_of(place), scratch_.total + place * kTile,
                            scratch_.maximum + place * kTile, fetch);
  }

  // Whether no value that some of the rows [first, last) see and others do not is infinite or NaN: times a weight of
  // zero it is not zero.
  bool all_finite(int head, int first, int last) const {
    const int common_begin = scratch_.from_here[last - 1], common_end = scratch_.seen_here[first];
    const int64_t offset = head * context_.head_dim;
    for (int j = scratch_.from_here[first]; j < high_; ++j) {
      if (j == common_begin && common_begin < common_end) j = common_end;
      if (j < high_ && any_not_finite(values()[j] + offset, context_.head_dim)) return false;
    }
    return true;
  }

  // The values [begin, end) in tiles, zeros around them.
  void find_values(int head, int begin, int end) {
    const int64_t offset = head * context_.head_dim;
    for (int token = begin / kTile * kTile; token < end; token += kTile) {
      ValueTile& tile = value_tiles_[head][token / kTile];
      if (in_place_ && token >= begin && token + kTile <= end) {
        tile = ValueTile{values()[token] + offset, context_.slot_stride};
        continue;
      }
      bf16* const copy = scratch_.values + (head * kPartition + token) * scratch_.width;
      copy_tile(values(), token, begin, end, offset, copy);
      tile = ValueTile{copy, scratch_.width};
    }
  }

  // Sums of `rows` rows, of the values that were found in tiles of tokens [begin, end).
  template <class F>
  void weigh_tiles(int head, int place, int rows, int64_t begin, int64_t end, bool more, const F& fetch) const {
    const ValueTile* const values = value_tiles_[head];
    const float* const weights = scratch_.weights_of(place);
    float* const sums = scratch_.sums + place * kTile * scratch_.width;
    const int64_t half = scratch_.width / 2;
    if (rows <= kWeightRows) {
      for_groups(0, depths_, [&]<int N>(int64_t k) {
        multiply_weights<N>(weights, values, begin, end, k * kDepth, more, sums, half, fetch);
      });
      return;
    }
    for (int64_t k = 0; k < depths_; k += 2) {
      if (k + 1 < depths_)
        multiply_two_weights<2>(weights, kWeights / 2, values, begin, end, k * kDepth, more, sums, half);
      else
        multiply_two_weights<1>(weights, kWeights / 2, values, begin, end, k * kDepth, more, sums, half);
      for (int64_t i = 0; i < (end - begin) * 2; ++i) fetch();
    }
  }

  template <class F>
  void finish(int head, int place, int row, int begin, int end, const F& done) const {
    const int at = place * kTile + begin - row;
    done(head, begin, end,
         Parts{scratch_.sums + at * scratch_.width, scratch_.total + at, scratch_.maximum + at, scratch_.width});
  }

  // Rows of one token are worked on apart, with what they see alone.
  template <class F>
  void weigh_apart(int head, int place, int row, int begin, int end, const F& done) {
    const auto nothing = [] {};
    for (int next; begin < end; begin = next) {
      next = begin + 1;
      while (next < end && scratch_.seen_here[next] == scratch_.seen_here[begin] &&
             scratch_.from_here[next] == scratch_.from_here[begin])
        ++next;
      find_values(head, scratch_.from_here[begin], scratch_.seen_here[begin]);
      weigh_tiles(head, place, next - row, scratch_.from_here[begin] / kTile,
                  (scratch_.seen_here[begin] + kTile - 1) / kTile, false, nothing);
      finish(head, place, row, begin, next, done);
    }
  }
};

}  // namespace attention
}  // namespace octavo

#endif
