// Scores and weighted sums of attention over a run of slots in float32 or int8, and exponentials of vectors.
//
// Codes of int8 widen to floats in registers; the caller multiplies a slot's score, or its values' weight, by the
// slot's scale.
//
// For compiled passes of a target (kernels.cpp) and of its heads (head_kernel.cpp).

#pragma once

#include <utility>

#include "panel_product.hpp"

namespace {

inline Vec load(const int8_t* from) { return Int8::widened(from); }

// Adds, in each group of 2 * HALF lanes, the halves of `first` into the lower half of the result, and those of
// `second` into the upper half.
template <int HALF, int... LANE>
inline Vec folded(Vec first, Vec second, std::integer_sequence<int, LANE...>) {
  // Constants: g++ does not fold a loop that fills these, and builds them anew for every call.
  const Lanes own{((LANE & HALF) ? LANES : 0) + LANE...};
  const Lanes other{((LANE & HALF) ? LANES : 0) + (LANE ^ HALF)...};
  return __builtin_shuffle(first, second, own) + __builtin_shuffle(first, second, other);
}

// Sums of LANES vectors: lane i of the result is the sum of all lanes of parts[i].
template <int HALF = LANES / 2>
inline Vec sums_of(Vec* parts) {
  if constexpr (HALF > 0) {
#pragma GCC unroll 8
    for (int i = 0; i < HALF; ++i)
      parts[i] = folded<HALF>(parts[i], parts[i + HALF], std::make_integer_sequence<int, LANES>());
    return sums_of<HALF / 2>(parts);
  }
  return parts[0];
}

// exp of values at most 0; 0 below -87. Cephes' polynomial, within 2 units of the last place.
inline Vec exp_of(Vec x) {
  const Vec low = all(-87.3f);
  const Lanes gone = x < low;
  x = gone ? low : x;
  const Vec shifted = x * 1.44269504088896341f + 12582912.0f;  // rounds to an integer
  const Vec whole = shifted - 12582912.0f;
  const Vec rest = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
  Vec y = all(1.9875691500e-4f);
  y = y * rest + 1.3981999507e-3f;
  y = y * rest + 8.3334519073e-3f;
  y = y * rest + 4.1665795894e-2f;
  y = y * rest + 1.6666665459e-1f;
  y = y * rest + 5.0000001201e-1f;
  y = y * rest * rest + rest + 1.0f;
  Lanes bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits - 0x4B400000 + 127) << 23;
  Vec power;
  std::memcpy(&power, &bits, sizeof power);
  return gone ? Vec{} : y * power;
}

// Scores of up to LANES keys, `count` of them, for one query row of any width.
template <typename Number>
Vec score_keys(const float* row, const Number* keys_at, int64_t count, int64_t key_width) {
  const int64_t whole = key_width / LANES * LANES;
  Vec parts[LANES];
#pragma GCC unroll 16
  for (int lane = 0; lane < LANES; ++lane) {
    const Number* at = keys_at + std::min<int64_t>(lane, count - 1) * key_width;
    Vec sum{};
    for (int64_t k = 0; k < whole; k += LANES) sum += load(row + k) * load(at + k);
    for (int64_t k = whole; k < key_width; ++k) sum[0] += row[k] * at[k];
    parts[lane] = sum;
  }
  return sums_of(parts);
}

// The same for a width known to the compiler, whose query row stays in registers.
template <int PARTS, typename Number>
Vec score_keys(const float* row, const Number* keys_at, int64_t count) {
  Vec mine[PARTS];
  for (int part = 0; part < PARTS; ++part) mine[part] = load(row + part * LANES);
  Vec parts[LANES];
#pragma GCC unroll 16
  for (int lane = 0; lane < LANES; ++lane) {
    const Number* at = keys_at + std::min<int64_t>(lane, count - 1) * (PARTS * LANES);
    Vec sum = mine[0] * load(at);
#pragma GCC unroll 8
    for (int part = 1; part < PARTS; ++part) sum += mine[part] * load(at + part * LANES);
    parts[lane] = sum;
  }
  return sums_of(parts);
}

// Scores of the rows [queries, key_width] against the `count` keys of a run that begins at keys_at; those of one
// row lie `stride` behind those of the last. Some keys at a time, which stay in the first cache for all rows.
template <typename Number>
void score_run(int64_t queries, const float* rows, const Number* keys_at, int64_t count, int64_t key_width,
               float* to, int64_t stride) {
  for (int64_t key = 0; key < count; key += LANES) {
    const Number* at = keys_at + key * key_width;
    const int64_t some = std::min<int64_t>(LANES, count - key);
    for (int64_t q = 0; q < queries; ++q) {
      const float* row = rows + q * key_width;
      const Vec found = key_width == 64    ? score_keys<64 / LANES>(row, at, some)
                        : key_width == 128 ? score_keys<128 / LANES>(row, at, some)
                                           : score_keys(row, at, some, key_width);
      if (some == LANES)
        store(to + q * stride + key, found);
      else
        std::memcpy(to + q * stride + key, &found, some * sizeof(float));
    }
  }
}

// Adds weighted values of a run to PARTS vectors of each of Q queries.
template <int Q, int PARTS, typename Number>
void mix(const float* weights, int64_t stride, const Number* values_at, int64_t width, int64_t count, float* to,
         int64_t to_stride) {
  Vec sums[Q][PARTS];
  for (int q = 0; q < Q; ++q)
    for (int part = 0; part < PARTS; ++part) sums[q][part] = load(to + q * to_stride + part * LANES);
  for (int64_t i = 0; i < count; ++i) {
    const Number* at = values_at + i * width;
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; ++part) {
      const Vec value = load(at + part * LANES);
#pragma GCC unroll 4
      for (int q = 0; q < Q; ++q) sums[q][part] += value * weights[q * stride + i];
    }
  }
  for (int q = 0; q < Q; ++q)
    for (int part = 0; part < PARTS; ++part) store(to + q * to_stride + part * LANES, sums[q][part]);
}

template <int Q, typename Number>
void mix_queries(const float* weights, int64_t stride, const Number* values_at, int64_t count, int64_t width,
                 float* to) {
  int64_t column = 0;
  for (; column + 4 * LANES <= width; column += 4 * LANES)
    mix<Q, 4>(weights, stride, values_at + column, width, count, to + column, width);
  for (; column + LANES <= width; column += LANES)
    mix<Q, 1>(weights, stride, values_at + column, width, count, to + column, width);
  for (; column < width; ++column)
    for (int q = 0; q < Q; ++q)
      for (int64_t i = 0; i < count; ++i)
        to[q * width + column] += weights[q * stride + i] * values_at[i * width + column];
}

// Adds the values of a run, weighted for each of up to four queries, to [queries, width].
template <typename Number>
void mix_run(int64_t queries, const float* weights, int64_t stride, const Number* values_at, int64_t count,
             int64_t width, float* to) {
  if (queries == 4) mix_queries<4>(weights, stride, values_at, count, width, to);
  else if (queries == 3) mix_queries<3>(weights, stride, values_at, count, width, to);
  else if (queries == 2) mix_queries<2>(weights, stride, values_at, count, width, to);
  else mix_queries<1>(weights, stride, values_at, count, width, to);
}

}  // namespace
