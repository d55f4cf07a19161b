// The two operators of a compiled step: the product of a linear layer over panels, and attention over slots.
//
// Both are called from the code that Inductor generates, through the C shims declared in operators.py. Everything
// is float32, apart from panels of weights and from keys and values. Layout of panels: see panels.py.

#include <cstdint>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "panel_product.hpp"
#include "slot_attention.hpp"

namespace {

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

}  // namespace

extern "C" {

// Number of outputs of a panel of weights on the processor that this was compiled for.
int64_t outrider_panel_width() { return PANEL; }

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
