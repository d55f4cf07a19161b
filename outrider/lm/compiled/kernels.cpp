// The two operators of a compiled step: the product of a linear layer over panels, and attention over slots.
//
// Plain C++ with the compiler's vector types: no intrinsics, so one source serves every processor. Both are
// called from the code that Inductor generates, through the C shims declared in operators.py. Everything is
// float32, apart from panels of weights and from keys and values in int8. step_block.py has the layout of a step
// block, panels.py that of panels.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "slot_attention.hpp"

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

AtenTensorHandle contiguous(int64_t dims, const int64_t* sizes) {
  int64_t strides[8];
  int64_t stride = 1;
  for (int64_t dim = dims - 1; dim >= 0; --dim) {
    strides[dim] = stride;
    stride *= sizes[dim];
  }
  AtenTensorHandle made;
  check(aoti_torch_empty_strided(
      dims, sizes, strides, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, &made));
  return made;
}

// ---- attention over slots ----------------------------------------------------------------------------

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
      // Whole vectors from slot 0 on: each slot's weight is summed in the same lane whatever rows are beside.
      first = std::min(of.length, std::max<int64_t>(0, of.length + least + 1 - window)) / LANES * LANES;
    }
    const int64_t stride = (total - first + LANES - 1) / LANES * LANES;
    const int64_t count = end - begin;
    static thread_local std::vector<float> scratch;
    const int64_t need = count * (stride + width + key_width) + LANES;
    if (static_cast<int64_t>(scratch.size()) < need) scratch.resize(need);
    float* scores = scratch.data();
    float* mixed = scores + count * stride;
    float* rows = mixed + count * width;
    std::fill(mixed, mixed + count * width, 0.0f);
    float shares[4];
    const HeadSlots<Number> keys_at = step.slots<Number>(2 * layer, key_head);
    const HeadSlots<Number> values_at = step.slots<Number>(2 * layer + 1, key_head);
    for (int64_t q = 0; q < count; ++q) {
      const int64_t index = of.low + (begin + q) / groups, head = key_head * groups + (begin + q) % groups;
      const float* from = query.data + head * query.strides[1] + index * query.strides[2];
      for (int64_t k = 0; k < key_width; ++k) rows[q * key_width + k] = from[k] * scale;
    }
    each_run(of, first, [&](int64_t slot, int64_t at, int64_t size) {
      score_run(count, rows, keys_at.rows + slot * key_width, size, key_width, scores + at, stride);
      for (int64_t q = 0; q < count; ++q) keys_at.rescale(scores + q * stride + at, slot, size);
    });
    for (int64_t q = 0; q < count; ++q) {
      const int64_t index = of.low + (begin + q) / groups, head = key_head * groups + (begin + q) % groups;
      shares[q] = weigh(scores + q * stride, of, session, index, head, first, total);
    }
    each_run(of, first, [&](int64_t slot, int64_t at, int64_t size) {
      for (int64_t q = 0; q < count; ++q) values_at.rescale(scores + q * stride + at, slot, size);
      mix_run(count, scores + at, stride, values_at.rows + slot * width, size, width, mixed);
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
    in_parallel(count, work < 256 ? count : 1, count, [&](int64_t low, int64_t high) {
      for (int64_t i = low; i < high; ++i)
        attend<Number>(items[i].session, items[i].key_head, items[i].begin, items[i].end);
    });
  }
};

}  // namespace

extern "C" {

// Number of outputs of a panel of weights on the processor that this was compiled for.
int64_t outrider_panel_width() { return PANEL; }

#if defined(OUTRIDER_HELPERS)
// Has so many threads compute the passes of this thread from now on; 0: as many as torch has.
void outrider_use_threads(uint32_t threads) { outrider::compute_threads() = threads; }
#endif

AOTITorchError aoti_torch_cpu_panel_linear(AtenTensorHandle rows, AtenTensorHandle panels,
                                           AtenTensorHandle* bias, AtenTensorHandle* scales, int64_t outputs,
                                           AtenTensorHandle* result) {
  try {
    const View from(rows);
    const View weights(panels);
    int64_t dims;
    check(aoti_torch_get_dim(rows, &dims));
    int64_t sizes[8];
    int64_t count = 1;
    for (int64_t dim = 0; dim < dims - 1; ++dim) count *= sizes[dim] = from.sizes[dim];
    sizes[dims - 1] = outputs;
    const int64_t stride = dims > 1 ? from.strides[dims - 2] : 0;
    AtenTensorHandle made = contiguous(dims, sizes);
    const Product asked{from.data, count, stride, from.sizes[dims - 1],
                        scales == nullptr ? nullptr : View(*scales).data,
                        bias == nullptr ? nullptr : View(*bias).data, View(made).data, outputs};
    int32_t format;
    check(aoti_torch_get_dtype(panels, &format));
    if (format == aoti_torch_dtype_bfloat16())
      multiply<Bfloat16>(asked, weights.data);
    else if (format == aoti_torch_dtype_int8())
      multiply<Int8>(asked, weights.data);
    else
      multiply<Float32>(asked, weights.data);
    *result = made;
    return AOTI_TORCH_SUCCESS;
  } catch (...) {
    return AOTI_TORCH_FAILURE;
  }
}

AOTITorchError aoti_torch_cpu_attend_slots(AtenTensorHandle query, AtenTensorHandle keys,
                                           AtenTensorHandle values, AtenTensorHandle step,
                                           AtenTensorHandle* sinks, int64_t layer, double scale,
                                           int64_t window, double softcap, AtenTensorHandle* result) {
  try {
    void* block;
    check(aoti_torch_get_data_ptr(step, &block));
    const Step of(static_cast<const int64_t*>(block));
    const View asked(query), new_keys(keys), new_values(values);
    const int64_t heads = asked.sizes[1], key_heads = new_keys.sizes[1], width = new_values.sizes[3];
    const int64_t sizes[] = {1, asked.sizes[2], heads, width};
    AtenTensorHandle made = contiguous(4, sizes);
    const Layer work{of,        asked,     new_keys, new_values, layer, window, heads, key_heads,
                     heads / key_heads, asked.sizes[3], width, static_cast<float>(scale),
                     static_cast<float>(softcap), sinks == nullptr ? nullptr : View(*sinks).data,
                     View(made).data};
    work.run();
    *result = made;
    return AOTI_TORCH_SUCCESS;
  } catch (...) {
    return AOTI_TORCH_FAILURE;
  }
}
}
