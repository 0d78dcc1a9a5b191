// Tensors of the device as kernels on a stream's thread see them: CPU tensors over the same bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "shadow.h"

namespace fake {

// What is known of a tensor when it is queued.
struct Layout {
  bool defined = false;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  at::ScalarType type = at::ScalarType::Float;

  static Layout of(const at::Tensor& tensor);
  bool operator==(const Layout&) const = default;
  int64_t numel() const;
  // From the first to the last element, gaps included.
  size_t bytes() const;
};

bool on_device(const at::Tensor& tensor);

// The bytes from the first to the last element. An error if the storage has been emptied.
Range range_of(const at::Tensor& tensor);
Access access_of(const at::Tensor& tensor, bool writes);

// A CPU tensor over the tensor's bytes. It owns nothing.
at::Tensor alias(const at::Tensor& tensor);
// A CPU tensor of the same form, filled with zeros.
at::Tensor zeros(const at::Tensor& tensor);
// An independent copy of a CPU tensor, taken now.
at::Tensor snapshot(const at::Tensor& tensor);
// New memory of the current device.
at::Tensor allocate(const Layout& layout);
// Gives a tensor another form, and its storage more memory if it needs that.
void reshape(const at::Tensor& tensor, const Layout& layout);

}  // namespace fake
