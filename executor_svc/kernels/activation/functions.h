// What an activation makes of a vector, float32. Errors are given in units of the last place of a float32, against the exact
// function of the float32 argument; results below 2^-120 in size may come out as zero.
#pragma once

#include "../native/csrc/lanes.h"

namespace octavo {

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

}  // namespace octavo
