// The one layer of a drafting head over pairs of hidden state and token, in float32; sizes and weights.
//
// The kinds of heads differ in which norms and products they have; a null pointer stands for one that is not
// there. PackedHead in head_weights.py fills the structs, and heads/parts.py says what each part is.

#pragma once

#include <cmath>
#include <vector>

#include "slot_attention.hpp"

namespace {

struct Linear {  // a product: panels of weights, see panels.py and weight_only/packing.py
  const void* panels;  // null: there is no such product
  const float* bias;   // of each output, or null
  int64_t inputs, outputs;
  int64_t is_bfloat16;

  void operator()(const float* rows, int64_t count, float* out) const {
    const Product asked{rows, count, inputs, inputs, nullptr, bias, out, outputs};
    if (is_bfloat16)
      multiply<Bfloat16>(asked, panels);
    else
      multiply<Float32>(asked, panels);
  }
};

struct Head {
  int64_t layers, feature_width;  // hidden states of the target that a position has
  int64_t width, inner, heads, key_heads, head_dim;
  int64_t vocabulary, drafted;    // ids of the target, and ids that the head has logits for
  int64_t adds_normed;            // whether the layer adds to normalised hidden states
  double eps, rotary_scale;
  const float* embeddings;        // [vocabulary, width]
  const float* frequencies;       // [head_dim / 2]
  const int64_t* drafted_ids;     // [drafted], or null: all ids
  const float *fusion_norm, *token_norm, *hidden_norm, *input_norm, *query_norm, *key_norm, *mlp_norm,
      *final_norm, *logits_norm;
  Linear fusion, projection, query, keys_values, output, gate_up, down, lm_head;

  int64_t key_value_width() const { return key_heads * head_dim; }
};

enum Buffer {
  FEATURES, SIDES, FUSED, ROWS, SUMS, NORMED, GATED, ACTIVE, HIDDEN, OWN, QUERIES, ATTENDED, EXPECTED, DRAFTED, NOISE
};

// Memory that a thread uses again in its next call.
inline float* scratch(Buffer which, int64_t size) {
  static thread_local std::vector<float> memory[NOISE + 1];
  if ((int64_t)memory[which].size() < size) memory[which].resize(size);
  return memory[which].data();
}

// x * weight over the root mean square of x; no weight: a copy. `from` may be `to`.
inline void norm(const float* from, const float* weight, int64_t width, double eps, float* to) {
  if (weight == nullptr) {
    if (from != to) std::memcpy(to, from, width * sizeof(float));
    return;
  }
  Vec squares{};
  int64_t k = 0;
  for (; k + LANES <= width; k += LANES) squares += load(from + k) * load(from + k);
  float sum = 0;
  for (int lane = 0; lane < LANES; ++lane) sum += squares[lane];
  for (; k < width; ++k) sum += from[k] * from[k];
  const float scale = 1.0f / std::sqrt(sum / (float)width + (float)eps);
  for (k = 0; k < width; ++k) to[k] = weight[k] * (from[k] * scale);
}

inline void norm_rows(float* rows, int64_t count, const float* weight, int64_t width, double eps) {
  for (int64_t row = 0; weight != nullptr && row < count; ++row)
    norm(rows + row * width, weight, width, eps, rows + row * width);
}

// A position's hidden states of the target: `layers` vectors that lie `stride` floats apart.
struct Feature {
  const float* data;
  int64_t stride;
};

// The head's hidden states, [count, width], of the target's.
template <typename FeatureOf>
void fuse(const Head& head, int64_t count, const FeatureOf& feature_of, float* to) {
  const int64_t each = head.feature_width, whole = head.layers * each;
  float* rows = head.fusion.panels == nullptr ? to : scratch(FEATURES, count * whole);
  for (int64_t row = 0; row < count; ++row) {
    const Feature of = feature_of(row);
    for (int64_t layer = 0; layer < head.layers; ++layer)
      std::memcpy(rows + row * whole + layer * each, of.data + layer * of.stride, each * sizeof(float));
  }
  if (head.fusion.panels == nullptr) return;
  norm_rows(rows, count, head.fusion_norm, whole, head.eps);
  head.fusion(rows, count, to);
}

// Pairs of hidden states with tokens, as the layer takes them.
struct Pairs {
  const float* rows;      // what attention reads
  const float* residual;  // what the layer adds to, [count, width]
};

inline Pairs pair(const Head& head, const int64_t* tokens, const float* hidden, int64_t count) {
  const int64_t width = head.width;
  float* sides = scratch(SIDES, 2 * count * width);
  for (int64_t row = 0; row < count; ++row) {
    float* to = sides + 2 * row * width;
    norm(head.embeddings + tokens[row] * width, head.token_norm, width, head.eps, to);
    norm(hidden + row * width, head.hidden_norm, width, head.eps, to + width);
  }
  if (head.projection.panels == nullptr) {
    if (!head.adds_normed) return {sides, hidden};
    float* normed = scratch(FUSED, count * width);
    for (int64_t row = 0; row < count; ++row)
      std::memcpy(normed + row * width, sides + (2 * row + 1) * width, width * sizeof(float));
    return {sides, normed};
  }
  float* fused = scratch(FUSED, count * width);
  head.projection(sides, count, fused);
  if (head.input_norm == nullptr) return {fused, fused};
  float* rows = scratch(ROWS, count * width);
  for (int64_t row = 0; row < count; ++row)
    norm(fused + row * width, head.input_norm, width, head.eps, rows + row * width);
  return {rows, fused};
}

// Rotates `heads` vectors of one position, after their norm where they have one.
class Rotation {
 public:
  Rotation(const Head& head, int64_t position) : head_(head), half_(head.head_dim / 2) {
    turns_.resize(2 * half_);
    for (int64_t k = 0; k < half_; ++k) {
      const float angle = (float)position * head.frequencies[k];
      turns_[k] = std::cos(angle) * (float)head.rotary_scale;
      turns_[half_ + k] = std::sin(angle) * (float)head.rotary_scale;
    }
  }

  void operator()(float* row, int64_t heads, const float* weight) const {
    for (int64_t head = 0; head < heads; ++head, row += head_.head_dim) {
      norm(row, weight, head_.head_dim, head_.eps, row);
      for (int64_t k = 0; k < half_; ++k) {
        const float low = row[k], high = row[half_ + k];
        row[k] = low * turns_[k] - high * turns_[half_ + k];
        row[half_ + k] = high * turns_[k] + low * turns_[half_ + k];
      }
    }
  }

 private:
  const Head& head_;
  int64_t half_;
  std::vector<float> turns_;
};

// The layer's output, [count, width], from what attention gave, [count, heads * head_dim].
inline void finish(const Head& head, const float* residual, const float* attended, int64_t count, float* to) {
  const int64_t width = head.width, inner = head.inner;
  float* rows = scratch(SUMS, count * width);
  head.output(attended, count, rows);
  for (int64_t k = 0; k < count * width; ++k) rows[k] += residual[k];
  float* normed = scratch(NORMED, count * width);
  for (int64_t row = 0; row < count; ++row)
    norm(rows + row * width, head.mlp_norm, width, head.eps, normed + row * width);
  float* both = scratch(GATED, 2 * count * inner);
  head.gate_up(normed, count, both);
  float* active = scratch(ACTIVE, count * inner);
  for (int64_t row = 0; row < count; ++row) {
    const float *gate = both + 2 * row * inner, *up = gate + inner;
    float* at = active + row * inner;
    int64_t k = 0;
    for (; k + LANES <= inner; k += LANES) {
      const Vec x = load(gate + k), lesser = x < 0 ? x : -x;
      const Vec power = exp_of(lesser);  // of minus the size of x
      store(at + k, x * (x < 0 ? power : all(1.0f)) / (power + 1.0f) * load(up + k));
    }
    for (; k < inner; ++k) at[k] = gate[k] / (1.0f + std::exp(-gate[k])) * up[k];
  }
  head.down(active, count, to);
  for (int64_t k = 0; k < count * width; ++k) to[k] += rows[k];
  norm_rows(to, count, head.final_norm, width, head.eps);
}

}  // namespace
