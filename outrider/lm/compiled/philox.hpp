// Philox4x64-10 under the key of token noise, as speculative/noise.py: single blocks, and the leads of many ids.
//
// With AVX-512 there are two ways to draw leads: block by block, and 24 blocks at a time in vectors. Which is
// quicker depends on the processor's multipliers, so both are timed once. They draw the same bits, as whoever
// loads the kernel checks.

#pragma once

#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>

#include <algorithm>
#include <chrono>
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "leads are copied as they lie in memory");

namespace {

constexpr uint64_t BY_A = 0xD2E7470EE14C6C93, BY_C = 0xCA5A826395121157;
constexpr uint64_t STEP_ONE = 0x9E3779B97F4A7C15, STEP_OTHER = 0xBB67AE8584CAA73B;
constexpr uint64_t TOKEN_NOISE = 0x746F6B656E730002;  // DOMAIN in noise.py
constexpr int ROUNDS = 10;
constexpr int IDS = 16;  // whose leads a block holds

struct Philox {
  uint64_t seed;

  void block(uint64_t first, uint64_t position, uint64_t part, uint64_t out[4]) const {
    uint64_t a = first, b = position, c = part, d = 0;
    uint64_t one = seed, other = TOKEN_NOISE;
    for (int round = 0; round < ROUNDS; ++round) {
      const auto x = (unsigned __int128)a * BY_A;
      const auto z = (unsigned __int128)c * BY_C;
      a = (uint64_t)(z >> 64) ^ b ^ one;
      b = (uint64_t)z;
      c = (uint64_t)(x >> 64) ^ d ^ other;
      d = (uint64_t)x;
      one += STEP_ONE;
      other += STEP_OTHER;
    }
    out[0] = a, out[1] = b, out[2] = c, out[3] = d;
  }

  // Leading 16 bits of one id.
  uint16_t lead(uint64_t position, uint64_t id) const {
    uint64_t words[4];
    block(id / IDS, position, 0, words);
    return (uint16_t)(words[id % IDS / 4] >> 16 * (id % 4));
  }
};

// Leads of blocks `begin` to `end`; `out` is where those of block 0 belong.
void draw_singly(const Philox& noise, uint64_t position, int64_t begin, int64_t end, uint16_t* out) {
  uint64_t words[4];
  for (int64_t block = begin; block < end; ++block) {
    noise.block((uint64_t)block, position, 0, words);
    std::memcpy(out + IDS * block, words, sizeof words);
  }
}

#ifdef __AVX512F__

typedef uint64_t Words __attribute__((vector_size(64)));

constexpr int GROUPS = 3;  // vectors of blocks at a time, so that the products of one hide the delays of others
constexpr int TOGETHER = 8 * GROUPS;

struct Products {
  Words high, low;
};

inline Words product_of_halves(Words one, Words other) {
  return (Words)_mm512_mul_epu32((__m512i)one, (__m512i)other);
}

template <uint64_t by>
inline Products products(Words x) {
  constexpr uint64_t half = 0xFFFFFFFF;
  const Words low = Words{} + (by & half), high = Words{} + (by >> 32), upper = x >> 32;
  const Words first = product_of_halves(x, low);
  const Words middle = product_of_halves(x, high) + (first >> 32);
  const Words other = product_of_halves(upper, low) + (middle & half);
  return {product_of_halves(upper, high) + (middle >> 32) + (other >> 32), (other << 32) | (first & half)};
}

// Words of `one` and `other`: places 0 to 7 are of the first, 8 to 15 of the second.
inline Words picked(Words one, Words places, Words other) {
  return (Words)_mm512_permutex2var_epi64((__m512i)one, (__m512i)places, (__m512i)other);
}

// Words a, b, c and d of eight blocks, each block's words one behind the other.
inline void put(Words a, Words b, Words c, Words d, uint16_t* out) {
  constexpr Words halves[2] = {{0, 8, 1, 9, 2, 10, 3, 11}, {4, 12, 5, 13, 6, 14, 7, 15}};
  for (const Words half : halves) {
    const Words ab = picked(a, half, b), cd = picked(c, half, d);
    const Words pairs[2] = {picked(ab, Words{0, 1, 8, 9, 2, 3, 10, 11}, cd),
                            picked(ab, Words{4, 5, 12, 13, 6, 7, 14, 15}, cd)};
    std::memcpy(out, pairs, sizeof pairs);
    out += 4 * IDS;
  }
}

// Leads of TOGETHER blocks from `first` on.
inline void draw_together(const Philox& noise, uint64_t position, uint64_t first, uint16_t* out) {
  Words a[GROUPS], b[GROUPS], c[GROUPS], d[GROUPS];
  for (int group = 0; group < GROUPS; ++group) {
    a[group] = Words{0, 1, 2, 3, 4, 5, 6, 7} + (first + 8 * group);
    b[group] = Words{} + position;
    c[group] = d[group] = Words{};
  }
  uint64_t one = noise.seed, other = TOKEN_NOISE;
  for (int round = 0; round < ROUNDS; ++round) {
    for (int group = 0; group < GROUPS; ++group) {
      const Products x = products<BY_A>(a[group]), z = products<BY_C>(c[group]);
      a[group] = z.high ^ b[group] ^ one;
      b[group] = z.low;
      c[group] = x.high ^ d[group] ^ other;
      d[group] = x.low;
    }
    one += STEP_ONE;
    other += STEP_OTHER;
  }
  for (int group = 0; group < GROUPS; ++group)
    put(a[group], b[group], c[group], d[group], out + 8 * IDS * group);
}

// Leads of the blocks below `blocks` that fill vectors; returns their number.
int64_t draw_in_vectors(const Philox& noise, uint64_t position, int64_t blocks, uint16_t* out) {
  int64_t block = 0;
  for (; block + TOGETHER <= blocks; block += TOGETHER)
    draw_together(noise, position, (uint64_t)block, out + IDS * block);
  return block;
}

// Whether vectors are quicker here: the least of five times each, some 20 microseconds in all.
bool vectors_are_quicker() {
  constexpr int64_t blocks = 10 * TOGETHER;
  static uint16_t out[IDS * blocks];
  const auto least_of = [](auto draw) {
    auto least = std::chrono::steady_clock::duration::max();
    for (int turn = 0; turn < 5; ++turn) {
      const auto began = std::chrono::steady_clock::now();
      draw();
      least = std::min(least, std::chrono::steady_clock::now() - began);
    }
    return least;
  };
  const Philox noise{1};
  const auto together = least_of([&] { draw_in_vectors(noise, 1, blocks, out); });
  return together < least_of([&] { draw_singly(noise, 1, 0, blocks, out); });
}

#endif

// Ways to draw leads, as row_kernel.py names them.
enum Way { SINGLY, IN_VECTORS };

#ifdef __AVX512F__
constexpr int WAYS = 2;
Way quickest_way() {
  static const Way way = vectors_are_quicker() ? IN_VECTORS : SINGLY;
  return way;
}
#else
constexpr int WAYS = 1;
Way quickest_way() { return SINGLY; }
#endif

// Leads of the first `count` ids.
void draw_leads(Way way, const Philox& noise, uint64_t position, int64_t count, uint16_t* out) {
  const int64_t blocks = count / IDS;
  int64_t drawn = 0;
#ifdef __AVX512F__
  if (way == IN_VECTORS) drawn = draw_in_vectors(noise, position, blocks, out);
#endif
  draw_singly(noise, position, drawn, blocks, out);
  if (count % IDS) {
    uint64_t words[4];
    noise.block((uint64_t)blocks, position, 0, words);
    std::memcpy(out + IDS * blocks, words, 2 * (count % IDS));
  }
}

}  // namespace
