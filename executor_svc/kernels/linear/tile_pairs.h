// Products of more rows than a tile has, 32 at a time: blocks of 32 rows times two panels.
//
// A core's vectors and its tiles stand still for each other where the work of one follows that of the other, however
// independent: so what a block came to is stored between the first products of the next block, and rounded, activated
// and written a few rows at a time between those that follow.
//
// A product is worked on in this order, from the outside in: passes over the inputs, where they are long; sections of
// the rows, a thread to each; shares of the panels; groups of pairs of tiles of rows that stay in the second-level
// cache; a block's panels; stretches of their steps that stay in the first-level cache; the pairs of the group.
#pragma once

#include <optional>

#include "tiles.h"

namespace octavo {
namespace {

constexpr int64_t kPairRows = 2 * kTileRows;
// Bytes of activations that meet a block's panels before the next ones come: they stay in the core's own cache.
constexpr int64_t kRowsBytes = 1 << 20;
// Long inputs are worked on in passes of so many steps, else few rows would fill that cache, and their panels it twice:
// sums go on from one pass to the next. Not for so few bytes of activations that they leave room, nor where the sums
// are so many that they would have to come from memory.
constexpr int64_t kPassSteps = 64;
constexpr int64_t kWholeBytes = 1 << 19;
constexpr int64_t kMostSums = 1 << 22;
// Steps of two panels that stay in the first-level cache while the pairs come by, and how many pairs it takes to pay
// for their sums, which come and go.
constexpr int64_t kNearSteps = 18;
constexpr int64_t kNearPairs = 3;
// Pairs of rows that are enough for a thread to read all weights for them alone: the activations of a step then stay
// where they are, in its core's cache, from op to op.
constexpr int64_t kSectionPairs = 6;

// The steps that a pass takes of every product.
struct Pass {
  int64_t begin, steps;
  bool is_last;
  float* sums;  // of every block, from one pass to the next; null where there is one pass
};

// The work of a pass, numbered: all panels of the result for the first section of the pairs, then for the next.
struct Sections {
  int64_t num_sections, num_pairs, num_panels;
  int64_t piece;  // that threads take at a time

  // Of a section: its panels, rounded up to whole pieces, so that no piece is of two sections.
  int64_t numbers() const { return (num_panels + piece - 1) / piece * piece; }
  int64_t first_pair(int64_t section) const { return num_pairs * section / num_sections; }
};

// The rows of a product in pairs of tiles. The last pair ends where the rows end, so that all of it can be read, and has
// some of its rows in common with the one before.
struct Pairs {
  const bf16* x;
  int64_t stride;  // of a row, in elements
  int64_t rows;    // more than a tile's

  int64_t count() const { return (rows + kPairRows - 1) / kPairRows; }
  // Of a pair, and of its rows the first that is not of the pair before.
  int64_t first_row(int64_t pair) const { return std::max<int64_t>(0, std::min(pair * kPairRows, rows - kPairRows)); }
  int64_t first_own(int64_t pair) const { return pair * kPairRows - first_row(pair); }
  const bf16* at(int64_t pair) const { return x + first_row(pair) * stride; }
  // With a single pair the lower tiles have the rows that are left.
  TileRows tile_rows() const {
    const uint8_t lower = static_cast<uint8_t>(std::min(rows, kPairRows) - kTileRows);
    return TileRows{16, 16, lower, lower, 16, lower, 16, 16};
  }
};

// The sums of a block, 32 rows times one or two panels, on their way to the result.
class Finishing {
 public:
  explicit Finishing(const Call& call) : call_(call) {}

  // What the tiles hold, once it is stored, is of this block, and its rows from `first` on are to be finished; `kept`,
  // where it is not null, is for a later pass.
  void begin(int64_t row, int64_t first, int64_t panel, int panels, float* kept) {
    row_ = row;
    panel_ = panel;
    panels_ = panels;
    kept_ = kept;
    next_ = static_cast<int>(first);
    end_ = kept ? next_ : static_cast<int>(std::min(kPairRows, call_.rows - row));
  }

  // Where a tile's sums belong: those of the first 16 rows, then of the others, a panel after the other.
  float* sums(int tile) { return (kept_ ? kept_ : sums_) + tile * kSums; }

  void some() {
    if (next_ == end_) return;
    const int rows = std::min(kRowsAtOnce - next_ % kRowsAtOnce, end_ - next_);
    const float* const left = sums(next_ / kTileRows * 2) + next_ % kTileRows * kPanel;
    finish_block(rows, left, left + kSums);
    next_ += rows;
  }

  void rest() {
    while (next_ < end_) some();
  }

 private:
  // From one multiple to the next: those of a tile.
  static constexpr int kRowsAtOnce = 4;

  const Call& call_;
  int64_t row_ = 0, panel_ = 0;
  int panels_ = 0, next_ = 0, end_ = 0;
  float* kept_ = nullptr;
  alignas(64) float sums_[4 * kSums];

  void finish_block(int rows, const float* left, const float* right) const {
    const int64_t row = row_ + next_, column = panel_ * kPanel;
    if (call_.is_gated()) return finish_gated(call_, row, rows, panel_, left, right);
    if (panels_ == 1) return finish(call_, row, rows, panel_, left);
    if (call_.weight->bias || call_.epilogue != kToBfloat16 || column + 2 * kPanel > call_.width()) {
      finish(call_, row, rows, panel_, left);
      return finish(call_, row, rows, panel_ + 1, right);
    }
    // A line of memory is written in one go.
    for (int r = 0; r < rows; ++r) {
      bf16* const to = static_cast<bf16*>(call_.out) + (row + r) * call_.width() + column;
      for (int i = 0; i < kPanel; i += kLanes) store(to + i, load(left + r * kPanel + i));
      for (int i = 0; i < kPanel; i += kLanes) store(to + kPanel + i, load(right + r * kPanel + i));
    }
  }
};

// Panels that are fetched while others are worked on: so many lines of each a step.
struct Coming {
  const uint32_t* at[2];
  int64_t lines;

  void fetch() {
    for (int64_t i = 0; i < lines; ++i) {
      __builtin_prefetch(at[0] + i * 16, 0, 2);
      __builtin_prefetch(at[1] + i * 16, 0, 2);
    }
    at[0] += lines * 16;
    at[1] += lines * 16;
  }
};

// The tile that a number names must be known when this is compiled.
#define OCTAVO_BEGIN_SUMS(number)                          \
  if (sums)                                                \
    _tile_loadd(number, sums + number * kSums, kPanel * 4); \
  else                                                     \
    _tile_zero(number);

// 32 rows times one or two panels: each tile of weights meets two of activations, and the other way round. Rows of `x`
// are `stride` elements apart; they come from the second-level cache and leave the first to the panels. `sums`, where it
// is not null, are those of the steps before; `before` is the block whose sums the tiles hold yet; `first` that nobody
// has fetched the panels.
template <int P, bool first>
void multiply_pair(const bf16* x, int64_t stride, const Panels<P>& panels, int64_t steps, const float* sums,
                   Coming& coming, Finishing& before) {
  const bf16* const lower = x + kTileRows * stride;
  write_for_tiles();
  _tile_stored(0, before.sums(0), kPanel * 4);
  OCTAVO_BEGIN_SUMS(0)
  _tile_stream_loadd(4, x, stride * 2);
  _tile_loadd(6, panels.at[0], kPanel * 4);
  _tile_dpbf16ps(0, 4, 6);
  _tile_stored(1, before.sums(1), kPanel * 4);
  if constexpr (P > 1) {
    OCTAVO_BEGIN_SUMS(1)
    _tile_loadd(7, panels.at[1], kPanel * 4);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_stored(2, before.sums(2), kPanel * 4);
  OCTAVO_BEGIN_SUMS(2)
  _tile_stream_loadd(5, lower, stride * 2);
  _tile_dpbf16ps(2, 5, 6);
  _tile_stored(3, before.sums(3), kPanel * 4);
  if constexpr (P > 1) {
    OCTAVO_BEGIN_SUMS(3)
    _tile_dpbf16ps(3, 5, 7);
  }
  coming.fetch();
  for (int64_t k = 1; k < steps; ++k) {
    if constexpr (first)
      for (int p = 0; p < P; ++p) fetch_ahead(panels.at[p] + k * kStepWords);
    coming.fetch();
    _tile_stream_loadd(4, x + k * kDepth, stride * 2);
    _tile_loadd(6, panels.at[0] + k * kStepWords, kPanel * 4);
    _tile_dpbf16ps(0, 4, 6);
    if (k % 2 == 0) before.some();
    _tile_stream_loadd(5, lower + k * kDepth, stride * 2);
    if constexpr (P > 1) {
      _tile_loadd(7, panels.at[1] + k * kStepWords, kPanel * 4);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (P > 1) _tile_dpbf16ps(3, 5, 7);
  }
  before.rest();
}

// Panels of the result of a block, and how many blocks a pair of tiles of rows has.
inline int64_t block_width(const Call& call) { return call.is_gated() ? 1 : 2; }
inline int64_t num_blocks(const Call& call) { return (num_panels(*call.weight) + 1) / 2; }

// One thread's part of a pass over a product of many rows.
class ManyRows {
 public:
  ManyRows(const Call& call, const Pairs& pairs, const Pass& pass, const Sections& sections)
      : call_(call),
        pairs_(pairs),
        pass_(pass),
        sections_(sections),
        width_(block_width(call)),
        most_pairs_(std::max<int64_t>(1, kRowsBytes / (pass.steps * kDepth * kPairRows * 2))),
        finishing_(call) {}

  void run(Shares& shares) {
    int64_t begin, end, next = 0, next_end = 0;
    if (!shares.take(&begin, &end)) return;
    // The next share is taken early: its first panels are fetched in time.
    for (bool more = true; more; begin = next, end = next_end) {
      more = shares.take(&next, &next_end);
      const int64_t section = begin / sections_.numbers(), skipped = section * sections_.numbers();
      const int64_t first = begin - skipped, last = std::min(end - skipped, sections_.num_panels);
      const int64_t last_pair = sections_.first_pair(section + 1), coming = next % sections_.numbers();
      for (int64_t from = sections_.first_pair(section); from < last_pair; from += most_pairs_) {
        const int64_t until = std::min(last_pair, from + most_pairs_);
        for (int64_t panel = first; panel < last; panel += width_) {
          const int64_t after_all = until < last_pair ? first : more ? coming : panel;
          const int64_t after = panel + width_ < last ? panel + width_ : after_all;
          if (panel + width_ <= last)
            multiply<2>(from, until, panel, after);
          else
            multiply<1>(from, until, panel, after);
        }
      }
    }
    _tile_stored(0, finishing_.sums(0), kPanel * 4);
    _tile_stored(1, finishing_.sums(1), kPanel * 4);
    _tile_stored(2, finishing_.sums(2), kPanel * 4);
    _tile_stored(3, finishing_.sums(3), kPanel * 4);
    finishing_.rest();
  }

 private:
  const Call& call_;
  const Pairs pairs_;
  const Pass pass_;
  const Sections sections_;
  const int64_t width_;
  const int64_t most_pairs_;  // that meet the panels one after the other
  bool first_ = true;
  Finishing finishing_;

  // The pairs [from, until), while the panels of `after` come from memory.
  template <int P>
  void multiply(int64_t from, int64_t until, int64_t panel, int64_t after) {
    const int64_t count = until - from;
    const Panels<2> next(call_, after, pass_.begin);
    Coming coming{{next.at[0], next.at[1]}, (kStepBytes / 64 + count - 1) / count};
    const int64_t stretches = count < kNearPairs ? 1 : (pass_.steps + kNearSteps - 1) / kNearSteps;
    // Where the blocks' sums lie from one stretch to the next, and how far apart.
    float* between = nullptr;
    int64_t apart = 4 * kSums;
    if (pass_.sums) {
      between = pass_.sums + (from * num_blocks(call_) + panel / width_) * apart;
      apart *= num_blocks(call_);
    } else if (stretches > 1) {
      between = memory_for<float, kStretches>(count * apart);
    }
    for (int64_t stretch = 0; stretch < stretches; ++stretch) {
      const int64_t done = pass_.steps * stretch / stretches;
      const int64_t steps = pass_.steps * (stretch + 1) / stretches - done;
      const int64_t begin = pass_.begin + done;
      const Panels<P> panels(call_, panel, begin);
      const bool is_last = pass_.is_last && stretch + 1 == stretches;
      for (int64_t pair = from; pair < until; ++pair) {
        float* const kept = between ? between + (pair - from) * apart : nullptr;
        const bf16* const x = pairs_.at(pair) + begin * kDepth;
        const float* const sums = begin ? kept : nullptr;
        if (first_)
          multiply_pair<P, true>(x, pairs_.stride, panels, steps, sums, coming, finishing_);
        else
          multiply_pair<P, false>(x, pairs_.stride, panels, steps, sums, coming, finishing_);
        first_ = false;
        finishing_.begin(pairs_.first_row(pair), pairs_.first_own(pair), panel, P, is_last ? nullptr : kept);
      }
    }
  }
};

// A gate's columns and those it is for begin with a panel each.
bool takes_gate(int64_t out_features) { return out_features % (2 * kPanel) == 0; }

void multiply_many_rows(const Call& call, const bf16* x, int64_t stride, int64_t panels, int64_t share) {
  const Pairs pairs{x, stride, call.rows};
  const int64_t count = pairs.count();
  // Who looks for the likeliest column keeps the first of equals: columns must come in order.
  const int64_t most_sections = call.epilogue == kLikeliest ? 1 : team_size();
  const Sections sections{std::clamp<int64_t>(count / kSectionPairs, 1, most_sections), count, panels, share};
  const int64_t steps = stride / kDepth, sums = count * num_blocks(call) * 4 * kSums;
  const bool whole = count * kPairRows * stride * 2 <= kWholeBytes || sums > kMostSums;
  const int64_t passes = whole ? 1 : (steps + kPassSteps - 1) / kPassSteps, each = (steps + passes - 1) / passes;
  float* const kept = passes > 1 ? memory_for<float, kPasses>(sums) : nullptr;
  Shares shares;
  for (int64_t begin = 0; begin < steps; begin += each) {
    const Pass pass{begin, std::min(each, steps - begin), begin + each >= steps, kept};
    if (sections.num_sections == 1)
      shares.start_in_order(panels, share);
    else
      shares.start(sections.num_sections * sections.numbers(), share);
    on_team([&] {
      const TilesInUse in_use(pairs.tile_rows());
      std::optional<Part> part;
      if (pass.is_last) part.emplace(call);  // before that no row is finished
      ManyRows(call, pairs, pass, sections).run(shares);
    });
  }
}

void multiply(const Call& call) {
  const Weight& weight = *call.weight;
  const int64_t stride = padded(weight.in_features), panels = num_panels(weight) / (call.is_gated() ? 2 : 1);
  const int64_t share = std::max<int64_t>(1, panels / (team_size() * 8 * kStreams)) * kStreams;
  const bf16* const x = rows_as_deep(call);
  if (call.rows > kTileRows) return multiply_many_rows(call, x, stride, panels, share);
  const uint8_t rows = static_cast<uint8_t>(call.rows);
  Shares shares;
  shares.start_in_order(panels, share);
  on_team([&] {
    const TilesInUse in_use(TileRows{rows, rows, rows, rows, rows, rows, rows, 16});
    const Part part(call);
    int64_t begin, end;
    while (shares.take(&begin, &end)) few_rows<kStreams>(call, x, stride, begin, end);
  });
}

}  // namespace
}  // namespace octavo
