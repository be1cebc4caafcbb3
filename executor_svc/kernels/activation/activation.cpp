// Activations, plain and gated: f(x), and f(gate) * up.
//
// Error bounds are in units in the last place of float32, against the exact function of the float32 argument; results
// below 2^-120 in size may come out as zero.
#include "../native/csrc/lanes.h"
#include "../native/csrc/program.h"

namespace octavo {
namespace {

constexpr int64_t kPiece = 8 * 1024;

struct Silu {
  static Vec of(Vec x) { return div(x, add(broadcast(1.0f), exp(sub(zero(), x)))); }
};

// x * P(x), where P(x) = (1 + erf(x / sqrt(2))) / 2 is the share of the normal distribution below x. Within 6 units.
//
// With a = |x|, P(-a) = exp(-a^2 / 2) * m(a), where m(a) = erfcx(a / sqrt(2)) / 2 falls from 1/2 as 1 / a does:
// m(a) * (1 + 5/4 a) is a polynomial of degree 9 in 1 / (1 + 3/10 a), fitted for a up to 13.3 to a relative error of
// 2^-25; beyond, exp is 0. So the lower tail keeps its digits, where 1 + erf(x / sqrt(2)) loses them. The square in the
// exponent is float64's.
struct GeluErf {
  static Vec of(Vec x) {
    const Vec one = broadcast(1.0f), size = absolute(x);
    const Vec t = sub(div(one, fma(size, broadcast(0.3f), one)), broadcast(0.6f));
    Vec tail = broadcast(-0.0496785417f);
    tail = fma(tail, t, broadcast(-0.111299813f));
    tail = fma(tail, t, broadcast(0.123958245f));
    tail = fma(tail, t, broadcast(0.267495006f));
    tail = fma(tail, t, broadcast(-0.162593231f));
    tail = fma(tail, t, broadcast(-0.744739175f));
    tail = fma(tail, t, broadcast(-0.799385846f));
    tail = fma(tail, t, broadcast(-0.345115691f));
    tail = fma(tail, t, broadcast(0.0994964838f));
    tail = fma(tail, t, broadcast(0.586098075f));
    const Doubles low = low_doubles(x), high = high_doubles(x);
    const Vec decay = exp(low * low * -0.5, high * high * -0.5);
    const Vec beyond = div(mul(decay, tail), fma(size, broadcast(1.25f), one));
    return mul(x, either_ge(x, zero(), sub(one, beyond), beyond));
  }
};

// x * (1 + tanh(y)) / 2 with y = sqrt(2 / pi) * (x + 0.044715 * x^3), as x / (1 + exp(-2y)): there, too, the lower tail
// keeps its digits. Within 4 units. The exponent is float64's.
struct GeluTanh {
  static Vec of(Vec x) {
    const Vec one = broadcast(1.0f), decay = exp(exponent(low_doubles(x)), exponent(high_doubles(x)));
    const Vec above = div(one, add(one, decay));
    return mul(x, either_ge(x, zero(), above, mul(decay, above)));
  }
  // -|2y|
  static Doubles exponent(Doubles x) {
    constexpr double kSlope = 1.5957691216057307118;  // 2 * sqrt(2 / pi)
    const Doubles slope = fma(x * x, all_doubles(kSlope * 0.044715), all_doubles(kSlope));
    return -absolute(x * slope);
  }
};

struct Relu {
  // NaN is kept: see max.
  static Vec of(Vec x) { return max(zero(), x); }
};

template <class Activation, class T>
void activate_rows(const void* x, void* out, int64_t count, int64_t width) {
  share_rows(count, width, kPiece, [&](int64_t begin, int64_t end) {
    const T* const from = static_cast<const T*>(x);
    T* const to = static_cast<T*>(out);
    // Rows lie side by side, and every element is its own.
    for (int64_t i = begin * width; i < end * width; i += kLanes) {
      const int64_t left = end * width - i;
      store_part(to + i, Activation::of(load_part(from + i, left, 0.0f)), left);
    }
  });
}

template <class Activation, class T>
void gate_rows(const void* gate_up, void* out, int64_t count, int64_t width) {
  share_rows(count, width, kPiece, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* const gate = static_cast<const T*>(gate_up) + r * 2 * width;
      T* const to = static_cast<T*>(out) + r * width;
      for (int64_t i = 0; i < width; i += kLanes) {
        const int64_t left = width - i;
        const Vec up = load_part(gate + width + i, left, 0.0f);
        store_part(to + i, mul(Activation::of(load_part(gate + i, left, 0.0f)), up), left);
      }
    }
  });
}

template <class Activation>
void activate(const void* x, void* out, int64_t count, int64_t width, bool is_bfloat16) {
  if (is_bfloat16)
    activate_rows<Activation, bf16>(x, out, count, width);
  else
    activate_rows<Activation, float>(x, out, count, width);
}

template <class Activation>
void gate(const void* gate_up, void* out, int64_t count, int64_t width, bool is_bfloat16) {
  if (is_bfloat16)
    gate_rows<Activation, bf16>(gate_up, out, count, width);
  else
    gate_rows<Activation, float>(gate_up, out, count, width);
}

}  // namespace
}  // namespace octavo

using namespace octavo;

// Gated: gate_up is [count, 2 * width]. Plain: x is [count, width]. out is [count, width]; all are contiguous.
OCTAVO_EXPORT void octavo_silu_and_mul(const void* gate_up, void* out, int64_t count, int64_t width,
                                       int32_t is_bfloat16) {
  gate<Silu>(gate_up, out, count, width, is_bfloat16 != 0);
}

OCTAVO_EXPORT void octavo_gelu_erf_and_mul(const void* gate_up, void* out, int64_t count, int64_t width,
                                           int32_t is_bfloat16) {
  gate<GeluErf>(gate_up, out, count, width, is_bfloat16 != 0);
}

OCTAVO_EXPORT void octavo_gelu_tanh_and_mul(const void* gate_up, void* out, int64_t count, int64_t width,
                                            int32_t is_bfloat16) {
  gate<GeluTanh>(gate_up, out, count, width, is_bfloat16 != 0);
}

OCTAVO_EXPORT void octavo_gelu_erf(const void* x, void* out, int64_t count, int64_t width, int32_t is_bfloat16) {
  activate<GeluErf>(x, out, count, width, is_bfloat16 != 0);
}

OCTAVO_EXPORT void octavo_gelu_tanh(const void* x, void* out, int64_t count, int64_t width, int32_t is_bfloat16) {
  activate<GeluTanh>(x, out, count, width, is_bfloat16 != 0);
}

OCTAVO_EXPORT void octavo_relu(const void* x, void* out, int64_t count, int64_t width, int32_t is_bfloat16) {
  activate<Relu>(x, out, count, width, is_bfloat16 != 0);
}

OCTAVO_IN_PROGRAMS(octavo_silu_and_mul)
OCTAVO_IN_PROGRAMS(octavo_gelu_erf_and_mul)
OCTAVO_IN_PROGRAMS(octavo_gelu_tanh_and_mul)
OCTAVO_IN_PROGRAMS(octavo_gelu_erf)
OCTAVO_IN_PROGRAMS(octavo_gelu_tanh)
OCTAVO_IN_PROGRAMS(octavo_relu)
