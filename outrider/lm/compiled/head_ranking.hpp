// The likeliest tokens of a row of logits under the noise of its position; as speculative/level_ranking.py.

#pragma once

#include <cmath>
#include <limits>

#include "slot_attention.hpp"

namespace {

struct Ranking {  // what children of one session's nodes are ranked by
  const uint16_t* leads;  // of each id; null: the request is greedy
  float temperature, scale;
  int64_t most;           // most children of one node
};

// Natural logarithm of positive numbers that are not subnormal. Cephes' polynomial.
inline Vec log_of(Vec x) {
  Lanes bits;
  std::memcpy(&bits, &x, sizeof bits);
  Lanes power = (bits >> 23) - 126;
  bits = (bits & 0x007fffff) | 0x3f000000;  // 0.5 to 1
  Vec part;
  std::memcpy(&part, &bits, sizeof part);
  const Lanes low = part < 0.707106781186547524f;
  power += low;  // a lane that holds is -1
  const Vec rest = (low ? part + part : part) - 1.0f;
  const Vec square = rest * rest, whole = __builtin_convertvector(power, Vec);
  Vec y = all(7.0376836292e-2f);
  y = y * rest - 1.1514610310e-1f;
  y = y * rest + 1.1676998740e-1f;
  y = y * rest - 1.2420140846e-1f;
  y = y * rest + 1.4249322787e-1f;
  y = y * rest - 1.6668057665e-1f;
  y = y * rest + 2.0000714765e-1f;
  y = y * rest - 2.4999993993e-1f;
  y = y * rest + 3.3333331174e-1f;
  y = y * rest * square - 2.12194440e-4f * whole - 0.5f * square;
  return rest + y + 0.693359375f * whole;
}

// What the noise of each id adds to scores: the median noise of its lead (`lead_medians`). Computed anew, as
// a table of all leads would not stay in the processor's caches. `to` has room for whole vectors.
inline void noise_of(const Ranking& by, int64_t width, float* to) {
  for (int64_t id = 0; id < width; id += LANES) {
    Lanes leads{};
    for (int64_t lane = 0; lane < std::min<int64_t>(LANES, width - id); ++lane) leads[lane] = by.leads[id + lane];
    const Vec uniform = (__builtin_convertvector(leads, Vec) + 0.5f) * (1.0f / 65536);
    store(to + id, log_of(-log_of(uniform)) * -by.temperature);
  }
}

// Ranks one row, whose logits become scores. Tokens and shares of at most `most` children go to `tokens` and
// `shares`, best first; returns their number, or -1 where the largest score is no number.
inline int64_t rank_row(float* row, const float* noise, int64_t width, const Ranking& by, double least,
                        int64_t* tokens, double* shares) {
  constexpr float none = -std::numeric_limits<float>::infinity();
  const int64_t whole = width / LANES * LANES;
  Vec highest = all(none);
  for (int64_t id = 0; id < whole; id += LANES) {
    Vec scores = load(row + id);
    if (noise != nullptr) store(row + id, scores += load(noise + id));
    highest = scores > highest ? scores : highest;
  }
  float best = none;
  for (int lane = 0; lane < LANES; ++lane) best = std::max(best, highest[lane]);
  for (int64_t id = whole; id < width; ++id) {
    if (noise != nullptr) row[id] += noise[id];
    best = std::max(best, row[id]);
  }
  if (!std::isfinite(best)) return -1;
  const float narrower = 1.0f / by.scale;
  Vec sums{};
  for (int64_t id = 0; id < whole; id += LANES) {
    const Vec weights = exp_of((load(row + id) - best) * narrower);
    store(row + id, weights);
    sums += weights;
  }
  float sum = 0;
  for (int lane = 0; lane < LANES; ++lane) sum += sums[lane];
  for (int64_t id = whole; id < width; ++id) sum += row[id] = std::exp((row[id] - best) * narrower);
  if (!std::isfinite(sum)) return -1;  // NaN below the best
  const float enough = (float)(least * sum);
  int64_t count = 0;
  const auto take = [&](int64_t id) {
    if (!(row[id] >= enough) || (count == by.most && !(row[id] > row[tokens[count - 1]]))) return;
    int64_t at = count < by.most ? count++ : count - 1;
    for (; at > 0 && row[tokens[at - 1]] < row[id]; --at) tokens[at] = tokens[at - 1];
    tokens[at] = id;
  };
  for (int64_t id = 0; id < whole; id += LANES) {
    const Lanes over = load(row + id) >= enough;
    int32_t found = 0;
    for (int lane = 0; lane < LANES; ++lane) found |= over[lane];
    for (int lane = 0; found && lane < LANES; ++lane) take(id + lane);
  }
  for (int64_t id = whole; id < width; ++id) take(id);
  for (int64_t at = 0; at < count; ++at) shares[at] = row[tokens[at]] / sum;
  return count;
}

}  // namespace
