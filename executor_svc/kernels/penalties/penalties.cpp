// Penalties of the tokens that a sequence has seen, straight from the sequence: its tokens are counted anew for each row,
// in an array over the vocabulary that is left all zero. That costs a few nanoseconds a token and leaves no counts to be
// kept between steps.
#include <cmath>
#include <limits>
#include <vector>

#include "../native/csrc/lanes.h"

namespace octavo {
namespace {

constexpr int64_t kPiece = 4 * 1024;

struct Strengths {
  float repetition, presence, frequency;
};

float penalized(float logit, const Strengths& by, int32_t count) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  logit = logit > 0 ? logit / by.repetition : logit * by.repetition;
  if (count > 0) logit -= by.presence;
  const float frequency = by.frequency * static_cast<float>(count);
  logit -= frequency;
  // NaN fails both comparisons, and stays.
  return logit > kLargest ? kLargest : logit < -kLargest ? -kLargest : logit;
}

// marks is [vocab], all zero before and after: 1 for a token of the prompt alone, 1 more for each time it is in the
// output.
void apply(float* logits, int32_t* marks, const int32_t* tokens, int64_t num_prompt, int64_t count,
           const Strengths& by) {
  const int64_t first = by.repetition != 1.0f ? 0 : num_prompt;
  // The logits of many rows lie in no near cache: they are called for while the tokens are counted.
  for (int64_t i = first; i < num_prompt; ++i) {
    __builtin_prefetch(logits + tokens[i], 1);
    marks[tokens[i]] = 1;
  }
  for (int64_t i = num_prompt; i < count; ++i) {
    __builtin_prefetch(logits + tokens[i], 1);
    marks[tokens[i]] += marks[tokens[i]] == 0 ? 2 : 1;
  }
  for (int64_t i = first; i < count; ++i) {
    const int32_t token = tokens[i], mark = marks[token];
    if (mark == 0) continue;
    marks[token] = 0;
    logits[token] = penalized(logits[token], by, mark - 1);
  }
}

}  // namespace
}  // namespace octavo

// logits is [rows, vocab], tokens [slots, length], the others [rows], all contiguous. See the contract.
OCTAVO_EXPORT void octavo_apply_penalties(float* logits, int64_t rows, int64_t vocab, const int32_t* tokens,
                                          int64_t length, const int64_t* slots, const int64_t* num_prompt_tokens,
                                          const int64_t* num_tokens, const float* repetition, const float* presence,
                                          const float* frequency) {
  using namespace octavo;
  int64_t most = 0;
  for (int64_t r = 0; r < rows; ++r) most = num_tokens[r] > most ? num_tokens[r] : most;
  share_rows(rows, most, kPiece, [&](int64_t begin, int64_t end) {
    thread_local std::vector<int32_t> marks;
    if (static_cast<int64_t>(marks.size()) < vocab) marks.resize(vocab);
    for (int64_t r = begin; r < end; ++r) {
      const Strengths by{repetition[r], presence[r], frequency[r]};
      if (by.repetition == 1.0f && by.presence == 0.0f && by.frequency == 0.0f) continue;
      apply(logits + r * vocab, marks.data(), tokens + slots[r] * length, num_prompt_tokens[r], num_tokens[r], by);
    }
  });
}
