// Sampling, a row at a time, without sorting the vocabulary.
//
// Weights are summed as whole numbers of 2^-44, so that sums are exact in any order: vectors, histograms and partial sums
// give what the contract says, bit for bit. Where a running sum over ranks (top_p) or distances (typical_p) reaches its
// goal is found by a histogram over ranges of the key, and inside the range that it falls into by partition. top_k's
// tokens are collected into a short row first.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "../selection.h"

namespace octavo {
namespace {

// As in the contract.
constexpr float kGreedyTemperature = 1e-5f;
constexpr double kUnits = 17592186044416.0;  // 2^44
// A weight of half a unit counts nothing; log(2^-45) is -31.19.
constexpr float kLeastWeight = 2.842170943040401e-14f;
constexpr float kLeastExponent = -31.2f;

// Tokens whose weights are summed together; the draw looks for the block first.
constexpr int64_t kBlock = 256;
constexpr int64_t kPiece = 64 * 1024;

constexpr int kRanges = 512;
constexpr float kRangesPerUnit = 16.0f;
// Consecutive tokens go to different histograms: one that is added to waits for the last addition.
constexpr int kHistograms = 4;
// Shorter rows are partitioned as they are.
constexpr int64_t kFewTokens = 512;

// Whole numbers below 2^51 in size, rounded to even.
static inline Int64s whole(Doubles x) {
  constexpr double kShift = 6755399441055744.0;  // 1.5 * 2^52
  const Doubles shifted = x + kShift;
  return reinterpret_cast<Int64s>(shifted) - reinterpret_cast<Int64s>(all_doubles(kShift));
}
static inline Int64s units(Doubles weight) { return whole(weight * kUnits); }
static inline int64_t units(float weight) { return std::llrint(static_cast<double>(weight) * kUnits); }

// exp(x) on [-log(2) / 2, log(2) / 2]: the polynomial through Chebyshev's points, within 2^-46.
constexpr double kExp[] = {1.0000000000000135,    1.0000000000000013,    0.4999999999943858,    0.16666666666615645,
                           0.041666667040554155,  0.008333333367311808,  0.0013888801749307644, 0.00019841190647227204,
                           2.4884459917741252e-05, 2.763264082626175e-06};

// exp(x) for x from -87 to 0, rounded to float32 as the exact value would be, but for one in a million that lies too near the
// middle of two. x = n * log(2) + r.
static inline __attribute__((always_inline)) Vec exp_rounded(Vec x) {
  const Vec n = round_even(mul(x, broadcast(1.44269504f)));
  const Doubles minus_log2 = all_doubles(-0.6931471805599453);
  const Doubles r_low = fma(low_doubles(n), minus_log2, low_doubles(x));
  const Doubles r_high = fma(high_doubles(n), minus_log2, high_doubles(x));
  Doubles low = all_doubles(kExp[9]), high = low;
#pragma GCC unroll 9
  for (int degree = 8; degree >= 0; --degree) {
    low = fma(low, r_low, all_doubles(kExp[degree]));
    high = fma(high, r_high, all_doubles(kExp[degree]));
  }
  return scale_by_exp2(narrow(low, high), n);
}

struct Parameters {
  float temperature;
  int64_t top_k;
  float top_p;
  float min_p;
  float typical_p;
  double uniform;
};

// Sums over the kept tokens, in units.
struct Sums {
  int64_t weights = 0;
  int64_t terms = 0;  // weight times exponent
};

// What a row is sampled with. One for each thread.
class RowSampler {
 public:
  int64_t sample(const float* logits, int64_t vocab, const Parameters& parameters) {
    if (parameters.temperature < kGreedyTemperature) return first_highest(logits, vocab);
    const bool some = parameters.top_k > 0 && parameters.top_k < vocab;
    const Tokens tokens = some ? top_.find(logits, vocab, parameters.top_k) : Tokens{logits, nullptr, vocab};
    if (tokens.count == 0) return 0;  // only where all are NaN
    const int64_t index = draw_from(tokens.logits, tokens.count, parameters);
    return tokens.ids ? tokens.ids[index] : index;
  }

 private:
  int64_t draw_from(const float* logits, int64_t n, const Parameters& parameters) {
    x_ = logits;
    n_ = n;
    highest_ = highest_of(logits, n);
    temperature_ = parameters.temperature;
    weights_ = at_least(weight_array_, n + kLanes);
    block_sums_ = at_least(block_sum_array_, n / kBlock + 1);
    const bool top_p = parameters.top_p < 1, typical = parameters.typical_p < 1;
    // Nothing reads the terms where the rows are not yet what typical_p looks at.
    Sums sums;
    if (top_p) {
      sums = n > kFewTokens ? weigh<true, false>(0.0f) : weigh<false, false>(0.0f);
      const int64_t need = share_of(sums.weights, parameters.top_p);
      sums = keep_ranks(need, n > kFewTokens, parameters.min_p, typical);
    } else {
      sums = typical ? weigh<false, true>(parameters.min_p) : weigh<false, false>(parameters.min_p);
    }
    if (typical) sums.weights = keep_typical(sums, parameters.typical_p);
    return draw(sums.weights, parameters.uniform);
  }

  // The least whole number that is no less than the share of the sum.
  static int64_t share_of(int64_t sum, float share) {
    return std::max<int64_t>(1, static_cast<int64_t>(std::ceil(static_cast<double>(share) * static_cast<double>(sum))));
  }

  // The row in registers: what a loop reads while it writes weights.
  struct View {
    const float* x;
    float* weights;
    int64_t n;
    Vec highest, temperature;
    Vec logits(int64_t i) const { return load_part(x + i, n - i, kBelowAll); }
    Vec exponents(Vec logits) const { return div(sub(logits, highest), temperature); }
  };
  View view() const { return {x_, weights_, n_, broadcast(highest_), broadcast(temperature_)}; }

  // Set all weights, and the sums of the blocks; weights below `least` become 0.
  template <bool kWithHistogram, bool kWithTerms>
  Sums weigh(float least) {
    if (kWithHistogram) clear_histogram();
    const Vec scale = broadcast(kRangesPerUnit / temperature_);
    const Vec bound = broadcast(least);
    const View row = view();
    Sums sums;
    for (int64_t begin = 0; begin < row.n; begin += kBlock) {
      Int64s block{}, terms{};
      const int64_t end = std::min(begin + kBlock, row.n);
      for (int64_t i = begin; i < end; i += kLanes) {
        const Vec logits = row.logits(i);
        const Vec exponent = row.exponents(logits);
        if (!mask_gt(exponent, broadcast(kLeastExponent))) {
          store(row.weights + i, zero());
          continue;
        }
        // A NaN would stay NaN in the second place.
        const Vec clamped = max(exponent, broadcast(kLeastExponent));
        Vec weight = exp_rounded(clamped);
        weight = where_ge(where_gt(weight, weight, broadcast(kLeastWeight)), weight, bound);
        store(row.weights + i, weight);
        const Doubles low = low_doubles(weight), high = high_doubles(weight);
        const Int64s low_units = units(low), high_units = units(high);
        block += low_units + high_units;
        if (kWithTerms) terms += units(low * low_doubles(clamped)) + units(high * high_doubles(clamped));
        if (kWithHistogram) count(mul(sub(row.highest, logits), scale), low_units, high_units);
      }
      add_block(begin, block, terms, &sums);
    }
    return sums;
  }

  void add_block(int64_t begin, Int64s block, Int64s terms, Sums* sums) {
    const int64_t sum = sum_lanes(block);
    block_sums_[begin / kBlock] = sum;
    sums->weights += sum;
    sums->terms += sum_lanes(terms);
  }

  void clear_histogram() { std::memset(histogram_, 0, sizeof histogram_); }

  // Add weights to the histogram: those of the last range are all that is further away.
  void count(Vec range, Int64s low, Int64s high) {
    int32_t at[kLanes];
    // min() takes its second where the first is NaN.
    store_whole(at, min(range, broadcast(kRanges - 1)));
    for (int i = 0; i < kHalf; ++i) histogram_[i % kHistograms][at[i]] += low[i];
    for (int i = 0; i < kHalf; ++i) histogram_[(kHalf + i) % kHistograms][at[kHalf + i]] += high[i];
  }

  // The range in which the running sum over ranges reaches *need, less what the ranges before it hold.
  int find_range(int64_t* need) const {
    for (int range = 0; range < kRanges - 1; ++range) {
      int64_t sum = 0;
      for (const auto& histogram : histogram_) sum += histogram[range];
      if (*need <= sum) return range;
      *need -= sum;
    }
    return kRanges - 1;
  }

  // Keep the fewest ranks whose weights sum to `need`, and of these the weights of at least min_p.
  Sums keep_ranks(int64_t need, bool has_histogram, float min_p, bool with_terms) {
    int64_t count = 0;
    Ranked* items = at_least(items_, n_);
    const auto add = [&](int64_t i) {
      if (weights_[i] > 0) items[count++] = {-static_cast<double>(x_[i]), units(weights_[i])};
    };
    if (has_histogram) {
      const Vec range = broadcast(static_cast<float>(find_range(&need)));
      const Vec scale = broadcast(kRangesPerUnit / temperature_);
      const View row = view();
      for (int64_t i = 0; i < row.n; i += kLanes) {
        uint32_t found = in_range(mul(sub(row.highest, row.logits(i)), scale), range);
        for (; found; found &= found - 1) {
          const int64_t at = i + __builtin_ctz(found);
          if (at < n_) add(at);
        }
      }
    } else {
      for (int64_t i = 0; i < n_; ++i) add(i);
    }
    if (count == 0) return {};
    int64_t rest;
    const float lowest = static_cast<float>(-key_at(items, at_least(spare_, n_), count, need, &rest));
    const int64_t last = last_equal(lowest, rest);
    return with_terms ? cut<true>(lowest, last, min_p) : cut<false>(lowest, last, min_p);
  }

  // Lanes of the same range as count() puts them in.
  static uint32_t in_range(Vec at, Vec range) {
    const Vec bounded = min(at, broadcast(kRanges - 1));
    return mask_ge(bounded, range) & ~mask_ge(bounded, add(range, broadcast(1.0f)));
  }

  // The index of the last token of this logit that is still needed, of those that come in ascending id.
  int64_t last_equal(float logit, int64_t need) const {
    int64_t wanted = 0;
    for (int64_t i = 0; i < n_; i += kLanes) {
      uint32_t found = mask_eq(load_part(x_ + i, n_ - i, std::numeric_limits<float>::quiet_NaN()), broadcast(logit));
      if (!found) continue;
      if (wanted == 0) {
        const int64_t each = units(weights_[i + __builtin_ctz(found)]);
        wanted = (need + each - 1) / each;
      }
      const int here = __builtin_popcount(found);
      if (wanted > here) {
        wanted -= here;
        continue;
      }
      while (--wanted > 0) found &= found - 1;
      return i + __builtin_ctz(found);
    }
    return n_;
  }

  // Keep logits above `lowest`, and those equal to it up to the index `last`.
  template <bool kWithTerms>
  Sums cut(float lowest, int64_t last, float min_p) {
    const View row = view();
    const Vec least = broadcast(min_p), above = broadcast(std::nextafter(lowest, -kBelowAll));
    Sums sums;
    for (int64_t begin = 0; begin < row.n; begin += kBlock) {
      Int64s block{}, terms{};
      const int64_t end = std::min(begin + kBlock, row.n);
      for (int64_t i = begin; i < end; i += kLanes) {
        Vec bound = i + kLanes - 1 <= last ? broadcast(lowest) : above;
        if (i <= last && last < i + kLanes - 1) {
          float bounds[kLanes];
          store(bounds, above);
          for (int64_t lane = 0; lane <= last - i; ++lane) bounds[lane] = lowest;
          bound = load(bounds);
        }
        const Vec logits = row.logits(i);
        Vec weight = where_ge(load(row.weights + i), logits, bound);
        weight = where_ge(weight, weight, least);
        store(row.weights + i, weight);
        const Doubles low = low_doubles(weight), high = high_doubles(weight);
        block += units(low) + units(high);
        if (kWithTerms) {
          const Vec exponent = max(row.exponents(logits), broadcast(kLeastExponent));
          terms += units(low * low_doubles(exponent)) + units(high * high_doubles(exponent));
        }
      }
      add_block(begin, block, terms, &sums);
    }
    return sums;
  }

  // Distances of the kept tokens to the mean; call f with (index, weights, low half, high half of the distances).
  template <class F>
  void for_distances(double mean, int64_t begin, int64_t end, const F& f) {
    const View row = view();
    for (int64_t i = begin; i < end; i += kLanes) {
      const Vec weight = load(row.weights + i);
      if (!mask_gt(weight, zero())) continue;
      const Vec exponent = max(row.exponents(row.logits(i)), broadcast(kLeastExponent));
      f(i, weight, distance(low_doubles(exponent), mean), distance(high_doubles(exponent), mean));
    }
  }
  static Doubles distance(Doubles exponent, double mean) {
    return absolute(exponent - mean);
  }
  static Vec range_of(Doubles low, Doubles high) { return mul(narrow(low, high), broadcast(kRangesPerUnit)); }

  // Keep what is as near to the mean as it takes for the share; return the sum that is left.
  int64_t keep_typical(const Sums& sums, float typical_p) {
    const double mean = static_cast<double>(sums.terms) / static_cast<double>(sums.weights);
    int64_t need = share_of(sums.weights, typical_p);
    Vec range = broadcast(0.0f);
    const bool has_histogram = n_ > kFewTokens;
    if (has_histogram) {
      clear_histogram();
      for_distances(mean, 0, n_, [&](int64_t, Vec weight, Doubles low, Doubles high) {
        count(range_of(low, high), units(low_doubles(weight)), units(high_doubles(weight)));
      });
      range = broadcast(static_cast<float>(find_range(&need)));
    }
    int64_t count = 0;
    Ranked* items = at_least(items_, n_);
    for_distances(mean, 0, n_, [&](int64_t i, Vec weight, Doubles low, Doubles high) {
      uint32_t found = mask_gt(weight, zero());
      if (has_histogram) found &= in_range(range_of(low, high), range);
      for (; found; found &= found - 1) {
        const int lane = __builtin_ctz(found);
        items[count++] = {lane < kHalf ? low[lane] : high[lane - kHalf], units(weights_[i + lane])};
      }
    });
    if (count == 0) return 0;
    int64_t rest;
    const double farthest = key_at(items, at_least(spare_, n_), count, need, &rest);
    Sums kept;
    for (int64_t begin = 0; begin < n_; begin += kBlock) {
      Int64s block{};
      for_distances(mean, begin, std::min(begin + kBlock, n_), [&](int64_t i, Vec weight, Doubles low, Doubles high) {
        const Doubles near_low = low <= farthest ? low_doubles(weight) : Doubles{};
        const Doubles near_high = high <= farthest ? high_doubles(weight) : Doubles{};
        store(weights_ + i, narrow(near_low, near_high));
        block += units(near_low) + units(near_high);
      });
      add_block(begin, block, Int64s{}, &kept);
    }
    return kept.weights;
  }

  // The first token where the running sum of the weights exceeds `uniform` times their sum.
  int64_t draw(int64_t sum, double uniform) const {
    int64_t threshold = std::min(static_cast<int64_t>(uniform * static_cast<double>(sum)), sum - 1);
    for (int64_t begin = 0; begin < n_; begin += kBlock) {
      if (block_sums_[begin / kBlock] <= threshold) {
        threshold -= block_sums_[begin / kBlock];
        continue;
      }
      for (int64_t i = begin; i < n_; ++i) {
        threshold -= units(weights_[i]);
        if (threshold < 0) return i;
      }
    }
    // Only where a row has no finite logit.
    return 0;
  }

  const float* x_ = nullptr;
  int64_t n_ = 0;
  float highest_ = 0;
  float temperature_ = 1;
  float* weights_ = nullptr;
  int64_t* block_sums_ = nullptr;
  TopTokens top_;
  std::vector<float> weight_array_;
  std::vector<int64_t> block_sum_array_;
  std::vector<Ranked> items_, spare_;
  alignas(64) int64_t histogram_[kHistograms][kRanges];
};

}  // namespace
}  // namespace octavo

using namespace octavo;

// logits is [rows, vocab], the parameters and tokens [rows], all contiguous. See the contract.
OCTAVO_EXPORT void octavo_sample_tokens(const float* logits, int64_t rows, int64_t vocab, const float* temperature,
                                        const int64_t* top_k, const float* top_p, const float* min_p,
                                        const float* typical_p, const double* uniform, int64_t* tokens) {
  share_rows(rows, vocab, kPiece, [&](int64_t begin, int64_t end) {
    thread_local RowSampler sampler;
    for (int64_t r = begin; r < end; ++r) {
      const Parameters parameters{temperature[r], top_k[r], top_p[r], min_p[r], typical_p[r], uniform[r]};
      tokens[r] = sampler.sample(logits + r * vocab, vocab, parameters);
    }
  });
}
