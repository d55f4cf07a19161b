// The product of an eager pass over panels of weights in bfloat16 or int8; called through ctypes by
// weight_only/kernel.py. Compiled passes have the same product as an operator: see kernels.cpp.

#define OUTRIDER_TORCH_THREADS
#include "panel_product.hpp"

extern "C" {

// Number of outputs of a panel of weights on the processor that this was compiled for.
int64_t outrider_panel_width() { return PANEL; }

// rows [count, width] times panels of bfloat16 (scales is null) or int8; returns 0, or 1 after an error.
int64_t outrider_multiply(const float* rows, int64_t count, int64_t width, const void* panels,
                          const float* scales, const float* bias, float* out, int64_t outputs) {
  try {
    const Product asked{rows, count, width, width, scales, bias, out, outputs};
    if (scales == nullptr)
      multiply<Bfloat16>(asked, panels);
    else
      multiply<Int8>(asked, panels);
    return 0;
  } catch (...) {
    return 1;
  }
}
}
