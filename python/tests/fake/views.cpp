#include "views.h"

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include <cstring>

#include "runtime.h"

namespace fake {

namespace {

// Numbers in expressions promote types differently from tensors.
at::Tensor marked_like(at::Tensor result, const at::Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    result.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  result._set_conj(tensor.is_conj());
  result._set_neg(tensor.is_neg());
  return result;
}

at::Tensor host_strided(const Layout& layout) {
  return at::detail::empty_strided_cpu(layout.sizes, layout.strides, layout.type);
}

}  // namespace

Layout Layout::of(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return {};
  }
  return {true, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()};
}

int64_t Layout::numel() const {
  int64_t product = 1;
  for (const int64_t size : sizes) {
    product *= size;
  }
  return product;
}

size_t Layout::bytes() const {
  return defined ? at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(type)) : 0;
}

bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

Range range_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0) {
    return {};
  }
  const size_t skipped = static_cast<size_t>(tensor.storage_offset()) * tensor.element_size();
  const size_t bytes = Layout::of(tensor).bytes();
  const size_t there = tensor.storage().nbytes();
  TORCH_CHECK(
      skipped + bytes <= there, "a tensor needs ", skipped + bytes, " bytes of a storage that has only ", there);
  const auto begin = reinterpret_cast<uintptr_t>(tensor.storage().data_ptr().get()) + skipped;
  return {begin, begin + bytes};
}

Access access_of(const at::Tensor& tensor, bool writes) {
  return {range_of(tensor), writes};
}

at::Tensor alias(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return tensor;
  }
  if (tensor.numel() == 0) {
    return marked_like(host_strided(Layout::of(tensor)), tensor);
  }
  auto* data = reinterpret_cast<void*>(range_of(tensor).begin);
  const auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  return marked_like(at::from_blob(data, tensor.sizes(), tensor.strides(), options), tensor);
}

at::Tensor zeros(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return tensor;
  }
  at::Tensor result = host_strided(Layout::of(tensor));
  if (result.storage().nbytes() > 0) {
    std::memset(result.storage().mutable_data(), 0, result.storage().nbytes());
  }
  return marked_like(std::move(result), tensor);
}

at::Tensor snapshot(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return tensor;
  }
  if (tensor.numel() > 0 && Memory::get().is_pinned(tensor.storage().data_ptr().get())) {
    World::get().host("read", access_of(tensor, false));
  }
  return marked_like(tensor.clone(), tensor);
}

at::Tensor allocate(const Layout& layout) {
  if (!layout.defined) {
    return {};
  }
  return at::detail::empty_strided_generic(
      layout.sizes,
      layout.strides,
      device_allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      layout.type);
}

void reshape(const at::Tensor& tensor, const Layout& layout) {
  auto* impl = tensor.unsafeGetTensorImpl();
  const size_t bytes = impl->storage_offset() * tensor.element_size() + layout.bytes();
  if (layout.numel() > 0 && bytes > tensor.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), bytes);
  }
  impl->set_sizes_and_strides(layout.sizes, layout.strides);
}

}  // namespace fake
