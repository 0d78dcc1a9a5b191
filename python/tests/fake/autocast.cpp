// Mixed precision: the operators that PyTorch runs in lower precision, or in float, on any device.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

// The macros register in a library of this name.
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define FAKE_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(FAKE_LOWER)
#define FAKE_FLOAT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(FAKE_FLOAT)
#define FAKE_FLOAT_RESULT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(FAKE_FLOAT_RESULT)
#define FAKE_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(FAKE_PROMOTE)
}

}  // namespace
