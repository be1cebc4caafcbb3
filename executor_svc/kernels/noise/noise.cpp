// Philox4x32-10, one number a row. See the contract.
#include <cstdint>

#include "../native/csrc/team.h"

namespace {

double uniform(uint64_t seed, uint32_t choice, uint32_t position, uint32_t lane) {
  uint32_t words[4] = {choice, position, lane, 0};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{0xD2511F53u} * words[0];
    const uint64_t second = uint64_t{0xCD9E8D57u} * words[2];
    words[0] = static_cast<uint32_t>(second >> 32) ^ words[1] ^ key[0];
    words[1] = static_cast<uint32_t>(second);
    words[2] = static_cast<uint32_t>(first >> 32) ^ words[3] ^ key[1];
    words[3] = static_cast<uint32_t>(first);
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  const uint64_t bits = (uint64_t{words[0]} << 21) | (words[1] >> 11);
  return static_cast<double>(bits) * 0x1p-53;
}

}  // namespace

OCTAVO_EXPORT void octavo_uniform(const uint64_t* seeds, const int64_t* choices, const int64_t* positions,
                                  int64_t lane, int64_t rows, double* numbers) {
  for (int64_t r = 0; r < rows; ++r)
    numbers[r] = uniform(seeds[r], static_cast<uint32_t>(choices[r]), static_cast<uint32_t>(positions[r]),
                         static_cast<uint32_t>(lane));
}
