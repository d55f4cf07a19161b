// The product of rows with panels of weights in float32, bfloat16 or int8; activations and sums are float32.
//
// C++ with the compiler's vector types, so one source serves every processor; only int8 takes an intrinsic, and
// a loop where the processor lacks it. Layout of panels: see panels.py and weight_only/packing.py.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

// Eager passes use torch's threads elsewhere, and those spin behind their work: helpers would find no idle core.
#if defined(__linux__) && !defined(OUTRIDER_TORCH_THREADS)
#define OUTRIDER_HELPERS
#include "helpers.hpp"
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int TILE = 8;
#else
constexpr int LANES = 8;
constexpr int TILE = 4;
#endif
constexpr int PANEL = 2 * LANES;  // outputs of a panel of weights
// How far ahead of its reading a product of several rows fetches weights, in bytes. The processor's own
// prefetcher ends at each page. A single row has nothing to compute meanwhile, and is faster without.
constexpr int AHEAD = 4096;

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef float Loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t LooseLanes __attribute__((vector_size(4 * LANES), aligned(2), may_alias));

inline Vec load(const float* from) { return *reinterpret_cast<const Loose*>(from); }
inline void store(float* to, Vec value) { *reinterpret_cast<Loose*>(to) = value; }
inline Vec all(float value) { return Vec{} + value; }

inline uint32_t thread_count() {
  uint32_t threads = 0;
#if defined(OUTRIDER_HELPERS)
  threads = outrider::compute_threads();
#endif
  if (threads == 0) torch_get_num_threads(&threads);
  return threads;
}

// Runs body over [0, count). More than `grain` are cut into pieces of at most `largest` for several threads.
template <typename Body>
void in_parallel(int64_t count, int64_t grain, int64_t largest, const Body& body) {
  const uint32_t threads = count > grain ? thread_count() : 1;
  if (threads <= 1) {
    body(0, count);
    return;
  }
#if defined(OUTRIDER_HELPERS)
  // Several pieces for each thread, so that one that comes late takes fewer.
  const int64_t piece = std::clamp<int64_t>(count / (16 * int64_t{threads}), 1, largest);
  outrider::Helpers::instance().run(
      count, piece, static_cast<int>(threads) - 1,
      [](int64_t low, int64_t high, const void* context) { (*static_cast<const Body*>(context))(low, high); },
      &body);
#else
  const AOTITorchError error = torch_parallel_for(
      0, count, grain,
      [](int64_t low, int64_t high, void* context) { (*static_cast<const Body*>(context))(low, high); },
      const_cast<Body*>(&body));
  if (error != AOTI_TORCH_SUCCESS) throw error;
#endif
}

// Formats of weights. `read` gives the weights of one input for the left and the right half of a panel.

struct Float32 {
  using Element = float;
  static void read(const float* from, Vec& left, Vec& right) {
    left = load(from);
    right = load(from + LANES);
  }
};

// A word of 32 bits holds an output of the left half below one of the right half: no lane changes its place.
struct Bfloat16 {
  using Element = uint16_t;
  static void read(const uint16_t* from, Vec& left, Vec& right) {
    const Lanes words = *reinterpret_cast<const LooseLanes*>(from);
    left = (Vec)(words << 16);
    right = (Vec)(words & static_cast<int32_t>(0xffff0000));
  }
};

struct Int8 {
  using Element = int8_t;
  static void read(const int8_t* from, Vec& left, Vec& right) {
    left = widened(from);
    right = widened(from + LANES);
  }
  static Vec widened(const int8_t* from) {
#if defined(__AVX512F__)
    // g++ makes several instructions of a conversion from vector to vector.
    return (Vec)_mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
    Vec made{};
    for (int lane = 0; lane < LANES; ++lane) made[lane] = from[lane];
    return made;
#endif
  }
};

// The rows [count, width] of a product, and where its result goes: [count, outputs].
struct Product {
  const float* rows;
  int64_t count, row_stride, width;
  const float* scales;  // of each output of the panels, or null
  const float* bias;    // of each output, or null
  float* out;
  int64_t outputs;
};

// R rows times one panel. Every output adds over k in order, so a row's bits do not depend on R.
// With KEEPS, the widened weights are written to `floats`, as a panel in float32.
template <typename Format, int R, bool KEEPS = false>
void multiply_panel(const Product& of, const typename Format::Element* panel, int64_t row, int64_t first,
                    float* floats) {
  const float* rows = of.rows + row * of.row_stride;
  Vec sums[R][2];
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = Vec{};
  for (int64_t k = 0; k < of.width; ++k) {
    Vec left, right;
    Format::read(panel, left, right);
    if constexpr (R > 1) __builtin_prefetch(reinterpret_cast<const char*>(panel) + AHEAD);
    panel += PANEL;
    if constexpr (KEEPS) {
      store(floats + k * PANEL, left);
      store(floats + k * PANEL + LANES, right);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const float scalar = rows[r * of.row_stride + k];
      sums[r][0] += left * scalar;
      sums[r][1] += right * scalar;
    }
  }
  const int64_t columns = std::min<int64_t>(PANEL, of.outputs - first);
  for (int r = 0; r < R; ++r) {
    if (of.scales != nullptr) {
      sums[r][0] *= load(of.scales + first);
      sums[r][1] *= load(of.scales + first + LANES);
    }
    float* to = of.out + (row + r) * of.outputs + first;
    if (columns == PANEL) {
      if (of.bias != nullptr) {
        sums[r][0] += load(of.bias + first);
        sums[r][1] += load(of.bias + first + LANES);
      }
      store(to, sums[r][0]);
      store(to + LANES, sums[r][1]);
      continue;
    }
    float whole[PANEL];
    store(whole, sums[r][0]);
    store(whole + LANES, sums[r][1]);
    if (of.bias != nullptr)
      for (int64_t column = 0; column < columns; ++column) whole[column] += of.bias[first + column];
    std::memcpy(to, whole, columns * sizeof(float));
  }
}

template <typename Format>
void multiply_panel_by(int64_t some, const Product& of, const typename Format::Element* panel, int64_t row,
                       int64_t first) {
  using Kernel = void (*)(const Product&, const typename Format::Element*, int64_t, int64_t, float*);
  static constexpr Kernel KERNELS[] = {
      multiply_panel<Format, 1>, multiply_panel<Format, 2>, multiply_panel<Format, 3>,
      multiply_panel<Format, 4>,
#if defined(__AVX512F__)
      multiply_panel<Format, 5>, multiply_panel<Format, 6>, multiply_panel<Format, 7>,
      multiply_panel<Format, 8>,
#endif
  };
  KERNELS[some - 1](of, panel, row, first, nullptr);
}

// Room for a panel's weights as floats, which a thread keeps.
inline float* panel_of_floats(int64_t width) {
  static thread_local std::vector<float> room;
  const int64_t need = PANEL * (width + 1);
  if (static_cast<int64_t>(room.size()) < need) room.resize(need);
  // A load across two lines of the cache takes twice as long.
  const uintptr_t line = PANEL * sizeof(float), begin = reinterpret_cast<uintptr_t>(room.data());
  return reinterpret_cast<float*>((begin + line - 1) / line * line);
}

// All rows times one panel. The first tile widens its weights for the others.
template <typename Format>
void multiply_tiles(const Product& of, const typename Format::Element* panel, int64_t first) {
  if constexpr (!std::is_same_v<Format, Float32>)
    if (of.count > TILE) {
      float* floats = panel_of_floats(of.width);
      multiply_panel<Format, TILE, true>(of, panel, 0, first, floats);
      for (int64_t row = TILE; row < of.count; row += TILE)
        multiply_panel_by<Float32>(std::min<int64_t>(TILE, of.count - row), of, floats, row, first);
      return;
    }
  for (int64_t row = 0; row < of.count; row += TILE)
    multiply_panel_by<Format>(std::min<int64_t>(TILE, of.count - row), of, panel, row, first);
}

template <typename Format>
void multiply(const Product& of, const void* weights) {
  const auto* panels = static_cast<const typename Format::Element*>(weights);
  const int64_t panel_count = (of.outputs + PANEL - 1) / PANEL;
  const int64_t grain = std::max<int64_t>(1, 16384 / (PANEL * of.width));
  const int64_t largest = std::max<int64_t>(1, 262144 / (PANEL * of.width * of.count));
  in_parallel(panel_count, grain, largest, [&](int64_t low, int64_t high) {
    for (int64_t index = low; index < high; ++index)
      multiply_tiles<Format>(of, panels + index * PANEL * of.width, index * PANEL);
  });
}

}  // namespace
