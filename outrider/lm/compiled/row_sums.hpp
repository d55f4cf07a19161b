// Sums of the weights of a row's ids, which decide top-p: vectors of float32, added up in float64.

#pragma once

#include "row_processing.hpp"

namespace {

struct Sums {
  double total = 0, before = 0;
};

// exp for arguments up to 0, within two units of float32's rounding; 0 below -87.
inline Vec exponential(Vec x) {
  const Lanes tiny = x < -87.0f;
  x = tiny ? all(-87.0f) : x;
  // Adding and subtracting 1.5 * 2**23 rounds to the nearest whole number.
  const Vec whole = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  const Vec rest = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
  Vec sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * (rest * rest) + rest + 1.0f;
  const Lanes power = (__builtin_convertvector(whole, Lanes) + 127) << 23;
  return tiny ? Vec{} : sum * (Vec)power;
}

inline double lanes_sum(Vec values) {
  double sum = 0;
  for (int lane = 0; lane < LANES; ++lane) sum += values[lane];
  return sum;
}

// The weights exp((logit - highest) / temperature) of a row.
struct Weights {
  const float* logits;
  float highest;
  double temperature;

  // Adds those of the ids begin to end; `before` gets those above `logit`, or at it where that is `inclusive`.
  void add(int64_t begin, int64_t end, float logit, bool inclusive, Sums& sums) const {
    constexpr int64_t PART = 64 * LANES;
    const float inverse = (float)(1 / temperature);
    int64_t id = begin;
    while (id + LANES <= end) {
      const int64_t stop = std::min(end - LANES, id + PART - LANES);
      Vec total = {}, before = {};
      for (; id <= stop; id += LANES) {
        const Vec x = load(logits + id);
        const Vec weight = exponential((x - highest) * inverse);
        const Lanes first = inclusive ? x >= logit : x > logit;
        total += weight;
        before += first ? weight : Vec{};
      }
      sums.total += lanes_sum(total);
      sums.before += lanes_sum(before);
    }
    for (; id < end; ++id) {
      const float x = logits[id];
      const double weight = std::exp(((double)x - highest) / temperature);
      sums.total += weight;
      if (inclusive ? x >= logit : x > logit) sums.before += weight;
    }
  }
};

}  // namespace
