// Rotary embedding of queries and keys, and the write of keys and values into their slots, in one pass over a step's
// merged projection.
#include <algorithm>

#include "../native/csrc/program.h"
#include "../native/csrc/shares.h"
#include "../native/csrc/simd.h"
#include "turn.h"

namespace octavo {
namespace {

// Elements for which waking the team does not pay.
constexpr int64_t kAlone = 32 * 1024;

struct Call {
  const void* qkv;  // [tokens][num_heads + 2 * num_kv_heads][head_dim]
  void* query;      // [tokens][num_heads][head_dim]
  const float* cos;  // [tokens][half]
  const float* sin;
  const int64_t* slots;  // [tokens]
  void* keys;            // [slots][num_kv_heads][head_dim]
  void* values;
  int64_t num_heads, num_kv_heads, head_dim;
  int64_t half;  // of the elements of a head that turn
};

template <class T>
void run(const Call& call, int64_t token) {
  const int64_t d = call.head_dim, half = call.half, kv = call.num_kv_heads * d;
  const T* from = static_cast<const T*>(call.qkv) + token * (call.num_heads * d + 2 * kv);
  const float* const cos = call.cos + token * half;
  const float* const sin = call.sin + token * half;
  T* const query = static_cast<T*>(call.query) + token * call.num_heads * d;
  T* const key = static_cast<T*>(call.keys) + call.slots[token] * kv;
  T* const value = static_cast<T*>(call.values) + call.slots[token] * kv;
  for (int64_t head = 0; head < call.num_heads; ++head, from += d) turn(from, cos, sin, half, d, query + head * d);
  for (int64_t head = 0; head < call.num_kv_heads; ++head, from += d) turn(from, cos, sin, half, d, key + head * d);
  std::memcpy(value, from, static_cast<size_t>(kv) * sizeof(T));
}

}  // namespace
}  // namespace octavo

using namespace octavo;

// dtype is 0 for float32, 1 for bfloat16.
OCTAVO_EXPORT void octavo_rotary_write_kv(const void* qkv, void* query, const float* cos, const float* sin,
                                          const int64_t* slots, void* keys, void* values, int64_t tokens,
                                          int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t half,
                                          int32_t dtype) {
  const Call call{qkv, query, cos, sin, slots, keys, values, num_heads, num_kv_heads, head_dim, half};
  const int64_t width = (num_heads + 2 * num_kv_heads) * head_dim;
  Shares shares;
  shares.start(tokens, std::max<int64_t>(1, kAlone / (4 * width)));
  const auto work = [&] {
    int64_t begin, end;
    while (shares.take(&begin, &end))
      for (int64_t token = begin; token < end; ++token)
        if (dtype == 0)
          run<float>(call, token);
        else
          run<bf16>(call, token);
  };
  // Padding shares slots of the null block: what lies there afterwards is of no account, whoever wrote last.
  if (tokens * width < kAlone)
    work();
  else
    on_team(work);
}

OCTAVO_IN_PROGRAMS(octavo_rotary_write_kv)
