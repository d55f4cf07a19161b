// Attention of a compiled pass over slots of keys and values in float32 or int8; sums are float32.
//
// Plain C++ with the compiler's vector types. Layout of a step block: see step_block.py. A row of int8 is its
// codes times its scale: codes widen to floats in registers, and the scale multiplies a score, or a weight of
// the values, once. So every row of every head has its own result, whatever else the pass computes.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "panel_product.hpp"

namespace {

inline void check(AOTITorchError error) {
  if (error != AOTI_TORCH_SUCCESS) throw error;
}

struct View {
  float* data;
  const int64_t* sizes;
  const int64_t* strides;

  explicit View(AtenTensorHandle tensor) {
    void* found;
    int64_t *sized, *strided;
    check(aoti_torch_get_data_ptr(tensor, &found));
    check(aoti_torch_get_sizes(tensor, &sized));
    check(aoti_torch_get_strides(tensor, &strided));
    data = static_cast<float*>(found);
    sizes = sized;
    strides = strided;
  }
};

// Sums of LANES vectors: lane i of the result is the sum of all lanes of parts[i].
inline Vec sums_of(Vec* parts) {
#pragma GCC unroll 4
  for (int half = LANES / 2; half > 0; half /= 2) {
    Lanes own, other;
    for (int lane = 0; lane < LANES; ++lane) {
      const int from = (lane & half) ? LANES : 0;  // the second vector of a pair
      own[lane] = from + lane;
      other[lane] = from + (lane ^ half);
    }
    for (int i = 0; i < half; ++i)
      parts[i] = __builtin_shuffle(parts[i], parts[i + half], own) +
                 __builtin_shuffle(parts[i], parts[i + half], other);
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

inline Vec load(const int8_t* from) { return Int8::widened(from); }

// Slots of one head of a plane: numbers, and for int8 what each slot's numbers are multiplied by.
template <typename Number>
struct HeadSlots {
  Number* rows;
  float* scales;

  // Multiplies the values of `count` slots by their scales; floats have none.
  void rescale(float* values, int64_t slot, int64_t count) const {
    if constexpr (std::is_same_v<Number, int8_t>)
      for (int64_t i = 0; i < count; ++i) values[i] *= scales[slot + i];
  }

  // Writes a row to a slot. As Int8Plane does, int8 takes the row's largest number over 127 as its scale.
  void write(const float* row, int64_t slot, int64_t width) const {
    Number* to = rows + slot * width;
    if constexpr (std::is_same_v<Number, int8_t>) {
      float most = 0, strange = 0;  // strange: NaN where a number is no finite one
      for (int64_t k = 0; k < width; ++k) {
        most = std::max(most, std::fabs(row[k]));
        strange += row[k] - row[k];
      }
      const float scale = std::max(most / 127, std::numeric_limits<float>::min()) + strange;
      scales[slot] = scale;
      for (int64_t k = 0; k < width; ++k) {
        const float code = std::nearbyint(row[k] / scale);
        to[k] = code >= -127 && code <= 127 ? static_cast<int8_t>(code) : 0;
      }
    } else {
      std::memcpy(to, row, width * sizeof(float));
    }
  }
};

// One session of a step block; see step_block.py.
struct Session {
  int64_t low, high, length, nodes, runs, run_count, masks, words;
};

struct Step {
  const int64_t* block;
  explicit Step(const int64_t* words) : block(words) {}
  int64_t sessions() const { return block[0]; }
  bool is_int8(int64_t plane) const { return word(plane, 2) != 0; }
  template <typename Number>
  HeadSlots<Number> slots(int64_t plane, int64_t head) const {
    return {at<Number>(word(plane, 0)) + head * word(plane, 1),
            at<float>(word(plane, 2)) + head * word(plane, 3)};
  }
  Session session(int64_t index) const {
    Session found;
    std::memcpy(&found, block + block[2] + 8 * index, sizeof found);
    return found;
  }
  const int64_t* depths(int64_t session) const { return block + block[3 + session]; }

 private:
  int64_t word(int64_t plane, int64_t which) const { return block[block[1] + 4 * plane + which]; }
  template <typename Pointed>
  static Pointed* at(int64_t address) {
    return reinterpret_cast<Pointed*>(static_cast<uintptr_t>(address));
  }
};

struct Layer {
  const Step& step;
  View query, keys, values;
  int64_t layer, window, heads, key_heads, groups, key_width, width;
  float scale, softcap;
  const float* sinks;
  float* out;

  int64_t slot_of(const Session& of, int64_t index) const {
    const int64_t* run = step.block + of.runs;
    for (int64_t i = 0; i < of.run_count; ++i, run += 2) {
      if (index < run[1] - run[0]) return run[0] + index;
      index -= run[1] - run[0];
    }
    return -1;
  }

  template <typename Number>
  void write(const View& from, int64_t plane, int64_t size) const {
    for (int64_t s = 0; s < step.sessions(); ++s) {
      const Session of = step.session(s);
      const int64_t first = of.length + of.nodes - (of.high - of.low);
      for (int64_t row = of.low; row < of.high; ++row) {
        const int64_t slot = slot_of(of, first + row - of.low);
        for (int64_t head = 0; head < key_heads; ++head)
          step.slots<Number>(plane, head).write(
              from.data + head * from.strides[1] + row * from.strides[2], slot, size);
      }
    }
  }

  // Scores of one query row against the slots [low, high) of a run that begins at keys_at.
  template <typename Number>
  void score(const float* row, const Number* keys_at, int64_t count, float* to) const {
    const int64_t whole = key_width / LANES * LANES;
    for (int64_t key = 0; key < count; key += LANES) {
      Vec parts[LANES];
#pragma GCC unroll 16
      for (int lane = 0; lane < LANES; ++lane) {
        const Number* at = keys_at + std::min<int64_t>(key + lane, count - 1) * key_width;
        Vec sum{};
        for (int64_t k = 0; k < whole; k += LANES) sum += load(row + k) * load(at + k);
        for (int64_t k = whole; k < key_width; ++k) sum[0] += row[k] * at[k];
        parts[lane] = sum;
      }
      const Vec found = sums_of(parts);
      if (key + LANES <= count)
        store(to + key, found);
      else
        std::memcpy(to + key, &found, (count - key) * sizeof(float));
    }
  }

  // The same for a width known to the compiler, whose query row stays in registers.
  template <int PARTS, typename Number>
  void score_fixed(const float* row, const Number* keys_at, int64_t count, float* to) const {
    Vec mine[PARTS];
    for (int part = 0; part < PARTS; ++part) mine[part] = load(row + part * LANES);
    for (int64_t key = 0; key < count; key += LANES) {
      Vec parts[LANES];
#pragma GCC unroll 16
      for (int lane = 0; lane < LANES; ++lane) {
        const Number* at = keys_at + std::min<int64_t>(key + lane, count - 1) * (PARTS * LANES);
        Vec sum = mine[0] * load(at);
#pragma GCC unroll 8
        for (int part = 1; part < PARTS; ++part) sum += mine[part] * load(at + part * LANES);
        parts[lane] = sum;
      }
      const Vec found = sums_of(parts);
      if (key + LANES <= count)
        store(to + key, found);
      else
        std::memcpy(to + key, &found, (count - key) * sizeof(float));
    }
  }

  template <typename Number>
  void score_run(const float* row, const Number* keys_at, int64_t count, float* to) const {
    if (key_width == 64)
      score_fixed<64 / LANES>(row, keys_at, count, to);
    else if (key_width == 128)
      score_fixed<128 / LANES>(row, keys_at, count, to);
    else
      score(row, keys_at, count, to);
  }

  // Turns scores of slots [first, total) into weights; returns one over their sum.
  float weigh(float* scores, const Session& of, int64_t session, int64_t row, int64_t head, int64_t first,
              int64_t total) const {
    const int64_t count = total - first;
    const int64_t* depths = step.depths(session);
    const int64_t own = of.nodes - (of.high - of.low) + row - of.low;
    const uint64_t* mask =
        reinterpret_cast<const uint64_t*>(step.block + of.masks) + (row - of.low) * of.words;
    const float hidden = -std::numeric_limits<float>::infinity();
    if (softcap > 0)
      for (int64_t i = 0; i < count; ++i) scores[i] = std::tanh(scores[i] / softcap) * softcap;
    const int64_t oldest = window > 0 ? of.length + depths[own] + 1 - window : 0;
    for (int64_t i = first; i < std::min(oldest, of.length); ++i) scores[i - first] = hidden;
    for (int64_t node = std::max<int64_t>(0, first - of.length); node < of.nodes; ++node) {
      const bool seen = mask[node / 64] >> (node % 64) & 1;
      if (!seen || of.length + depths[node] < oldest) scores[of.length + node - first] = hidden;
    }
    int64_t padded = count;
    while (padded % LANES) scores[padded++] = hidden;
    Vec highest = load(scores);
    for (int64_t i = LANES; i < padded; i += LANES) {
      const Vec some = load(scores + i);
      highest = some > highest ? some : highest;
    }
    float top = highest[0];
    for (int lane = 1; lane < LANES; ++lane) top = std::max(top, highest[lane]);
    if (sinks != nullptr) top = std::max(top, sinks[head]);
    Vec sum{};
    for (int64_t i = 0; i < padded; i += LANES) {
      const Vec weight = exp_of(load(scores + i) - top);
      store(scores + i, weight);
      sum += weight;
    }
    float whole = 0;
    for (int lane = 0; lane < LANES; ++lane) whole += sum[lane];
    if (sinks != nullptr) whole += std::exp(sinks[head] - top);
    return 1.0f / whole;
  }

  // Adds weighted values of a run to PARTS vectors of each of Q queries.
  template <int Q, int PARTS, typename Number>
  static void mix(const float* weights, int64_t stride, const Number* values_at, int64_t width, int64_t count,
                  float* to, int64_t to_stride) {
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
  void mix_run(const float* weights, int64_t stride, const Number* values_at, int64_t count, float* to,
               int64_t to_stride) const {
    int64_t column = 0;
    for (; column + 4 * LANES <= width; column += 4 * LANES)
      mix<Q, 4>(weights, stride, values_at + column, width, count, to + column, to_stride);
    for (; column + LANES <= width; column += LANES)
      mix<Q, 1>(weights, stride, values_at + column, width, count, to + column, to_stride);
    for (; column < width; ++column)
      for (int q = 0; q < Q; ++q)
        for (int64_t i = 0; i < count; ++i)
          to[q * to_stride + column] += weights[q * stride + i] * values_at[i * width + column];
  }

  // Attention of the queries [begin, end) of one session that share a key head; a query is a row and a head.
  template <typename Number>
  void attend(int64_t session, int64_t key_head, int64_t begin, int64_t end) const {
    const Session of = step.session(session);
    const int64_t total = of.length + of.nodes;
    int64_t first = 0;
    if (window > 0) {
      const int64_t* depths = step.depths(session);
      const int64_t own = of.nodes - (of.high - of.low);
      int64_t least = std::numeric_limits<int64_t>::max();
      for (int64_t query = begin; query < end; ++query)
        least = std::min(least, depths[own + query / groups]);
      first = std::min(of.length, std::max<int64_t>(0, of.length + least + 1 - window));
    }
    const int64_t stride = (total - first + LANES - 1) / LANES * LANES;
    const int64_t count = end - begin;
    static thread_local std::vector<float> scratch;
    const int64_t row_width = key_width, need = count * (stride + width) + row_width + LANES;
    if (static_cast<int64_t>(scratch.size()) < need) scratch.resize(need);
    float* scores = scratch.data();
    float* mixed = scores + count * stride;
    float* row = mixed + count * width;
    std::fill(mixed, mixed + count * width, 0.0f);
    float shares[4];
    const HeadSlots<Number> keys_at = step.slots<Number>(2 * layer, key_head);
    const HeadSlots<Number> values_at = step.slots<Number>(2 * layer + 1, key_head);
    for (int64_t q = 0; q < count; ++q) {
      const int64_t index = of.low + (begin + q) / groups, head = key_head * groups + (begin + q) % groups;
      const float* from = query.data + head * query.strides[1] + index * query.strides[2];
      for (int64_t k = 0; k < key_width; ++k) row[k] = from[k] * scale;
      each_run(of, first, [&](int64_t slot, int64_t at, int64_t size) {
        score_run(row, keys_at.rows + slot * key_width, size, scores + q * stride + at);
        keys_at.rescale(scores + q * stride + at, slot, size);
      });
      shares[q] = weigh(scores + q * stride, of, session, index, head, first, total);
    }
    each_run(of, first, [&](int64_t slot, int64_t at, int64_t size) {
      const Number* from = values_at.rows + slot * width;
      for (int64_t q = 0; q < count; ++q) values_at.rescale(scores + q * stride + at, slot, size);
      if (count == 4) mix_run<4>(scores + at, stride, from, size, mixed, width);
      else if (count == 3) mix_run<3>(scores + at, stride, from, size, mixed, width);
      else if (count == 2) mix_run<2>(scores + at, stride, from, size, mixed, width);
      else mix_run<1>(scores + at, stride, from, size, mixed, width);
    });
    for (int64_t q = 0; q < count; ++q) {
      const int64_t index = of.low + (begin + q) / groups, head = key_head * groups + (begin + q) % groups;
      float* to = out + (index * heads + head) * width;
      for (int64_t k = 0; k < width; ++k) to[k] = mixed[q * width + k] * shares[q];
    }
  }

  // Calls body(slot, index - first, count) for each run of the session's slots from index `first` on.
  template <typename Body>
  void each_run(const Session& of, int64_t first, const Body& body) const {
    const int64_t* run = step.block + of.runs;
    const int64_t total = of.length + of.nodes;
    int64_t index = 0;
    for (int64_t i = 0; i < of.run_count && index < total; ++i, run += 2) {
      const int64_t end = std::min(total, index + run[1] - run[0]);
      const int64_t from = std::max(index, first);
      if (from < end) body(run[0] + from - index, from - first, end - from);
      index = end;
    }
  }

  void run() const {
    if (step.is_int8(2 * layer))
      run_over<int8_t>();
    else
      run_over<float>();
  }

  template <typename Number>
  void run_over() const {
    write<Number>(keys, 2 * layer, key_width);
    write<Number>(values, 2 * layer + 1, width);
    // Four queries at a time: few enough for registers, and a step's unit of parallel work.
    struct Item { int64_t session, key_head, begin, end; };
    std::vector<Item> items;
    int64_t work = 0;
    for (int64_t s = 0; s < step.sessions(); ++s) {
      const Session of = step.session(s);
      const int64_t queries = (of.high - of.low) * groups;
      for (int64_t head = 0; head < key_heads; ++head)
        for (int64_t begin = 0; begin < queries; begin += 4)
          items.push_back({s, head, begin, std::min(queries, begin + 4)});
      work += key_heads * queries * (of.length + of.nodes);
    }
    const int64_t count = static_cast<int64_t>(items.size());
    in_parallel(count, work < 16384 ? count : 1, [&](int64_t low, int64_t high) {
      for (int64_t i = low; i < high; ++i)
        attend<Number>(items[i].session, items[i].key_head, items[i].begin, items[i].end);
    });
  }
};

}  // namespace
