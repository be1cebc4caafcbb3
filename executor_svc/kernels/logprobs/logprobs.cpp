// Logprobs of single tokens and of the likeliest, without sorting the vocabulary.
#include <algorithm>
#include <cmath>

#include "../selection.h"

namespace octavo {
namespace {

constexpr int64_t kPiece = 64 * 1024;

// log of the sum of exp(x - highest), the sum in float64.
float log_sum(const float* x, int64_t n, float highest) {
  const Vec top = broadcast(highest);
  Doubles low{}, high{};
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec weight = exp(sub(load_part(x + i, n - i, kBelowAll), top));
    low += low_doubles(weight);
    high += high_doubles(weight);
  }
  double sum = 0;
  for (int lane = 0; lane < kHalf; ++lane) sum += low[lane];
  for (int lane = 0; lane < kHalf; ++lane) sum += high[lane];
  return static_cast<float>(std::log(sum));
}

struct Likely {
  float logit;
  int32_t id;
};

class RowScorer {
 public:
  float score(const float* x, int64_t n, int64_t token, int64_t num_top, int64_t* top_ids, float* top_logprobs) {
    const float highest = highest_of(x, n);
    const float rest = log_sum(x, n, highest);
    if (num_top > 0) {
      const Tokens tokens = top_.find(x, n, num_top);
      Likely* likely = at_least(likely_, num_top);
      for (int64_t i = 0; i < num_top; ++i) likely[i] = {tokens.logits[i], tokens.ids[i]};
      std::sort(likely, likely + num_top,
                [](Likely a, Likely b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); });
      for (int64_t i = 0; i < num_top; ++i) {
        top_ids[i] = likely[i].id;
        top_logprobs[i] = likely[i].logit - highest - rest;
      }
    }
    return x[token] - highest - rest;
  }

 private:
  TopTokens top_;
  std::vector<Likely> likely_;
};

}  // namespace
}  // namespace octavo

// logits is [rows, vocab], token_ids and logprobs [rows], top_ids and top_logprobs [rows, num_top], all contiguous.
OCTAVO_EXPORT void octavo_gather_logprobs(const float* logits, int64_t rows, int64_t vocab, const int64_t* token_ids,
                                          int64_t num_top, float* logprobs, int64_t* top_ids, float* top_logprobs) {
  octavo::share_rows(rows, vocab, octavo::kPiece, [&](int64_t begin, int64_t end) {
    thread_local octavo::RowScorer scorer;
    for (int64_t r = begin; r < end; ++r)
      logprobs[r] = scorer.score(logits + r * vocab, vocab, token_ids[r], num_top, top_ids + r * num_top,
                                 top_logprobs + r * num_top);
  });
}
