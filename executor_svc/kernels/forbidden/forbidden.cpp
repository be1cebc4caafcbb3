// Forbidden tokens: a few places a row.
#include <cstdint>
#include <limits>

#include "../native/csrc/team.h"

// logits is [rows, vocab], begins and ends [rows], all contiguous. See the contract.
OCTAVO_EXPORT void octavo_forbid_tokens(float* logits, int64_t rows, int64_t vocab, const int64_t* token_ids,
                                        const int64_t* begins, const int64_t* ends) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = begins[r]; i < ends[r]; ++i)
      logits[r * vocab + token_ids[i]] = -std::numeric_limits<float>::infinity();
}
