#include "copies.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/DeviceGuard.h>

#include "runtime.h"
#include "views.h"

namespace fake {

namespace {

constexpr auto kKeys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);

// Reads everything, waits, writes everything.
void copy_now(const at::Tensor& to, const at::Tensor& from) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const at::Tensor bytes = from.clone();
  Stream::pause();
  to.copy_(bytes);
}

void count(const char* direction, const at::Tensor& tensor) {
  World::get().count(std::string("copies_") + direction, 1);
  World::get().count(std::string("bytes_") + direction, static_cast<int64_t>(tensor.nbytes()));
}

bool pinned(const at::Tensor& tensor) {
  return Memory::get().is_pinned(tensor.storage().data_ptr().get());
}

void copy_within(const at::Tensor& from, const at::Tensor& to) {
  Stream& stream = current(from.device());
  Stream& other = current(to.device());
  World& world = World::get();
  if (&stream != &other) {
    world.wait(stream, world.record(other));
  }
  count("within", to);
  auto job = [to = alias(to), from = alias(from)] { copy_now(to, from); };
  world.launch(stream, "copy within", {access_of(from, false), access_of(to, true)}, std::move(job));
  if (&stream != &other) {
    world.wait(other, world.record(stream));
  }
}

void copy_out(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Stream& stream = current(from.device());
  const bool tracked = pinned(to);
  std::vector<Access> accesses = {access_of(from, false)};
  if (tracked) {
    accesses.push_back(access_of(to, true));
  }
  count("out", to);
  auto job = [to = alias(to), from = alias(from)] { copy_now(to, from); };
  World::get().launch(stream, "copy out", accesses, std::move(job));
  if (tracked && non_blocking) {
    Memory::get().record(to.storage().data_ptr().get(), stream);
  } else {
    World::get().sync(stream);
  }
}

void copy_in(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Stream& stream = current(to.device());
  const bool tracked = pinned(from);
  std::vector<Access> accesses = {access_of(to, true)};
  if (tracked) {
    accesses.push_back(access_of(from, false));
  }
  count("in", to);
  // Pageable memory is staged, so the host may go on with it at once.
  auto job = [to = alias(to), from = tracked ? alias(from) : snapshot(from)] { copy_now(to, from); };
  World::get().launch(stream, "copy in", accesses, std::move(job));
  if (!non_blocking) {
    World::get().sync(stream);
  } else if (tracked) {
    Memory::get().record(from.storage().data_ptr().get(), stream);
  }
}

}  // namespace

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) {
    return to;
  }
  const c10::DeviceGuard guard(on_device(from) ? from.device() : to.device());
  translating([&] {
    World::get().point("copy");
    if (on_device(from) && on_device(to)) {
      copy_within(from, to);
    } else if (on_device(from)) {
      copy_out(from, to, non_blocking);
    } else {
      copy_in(from, to, non_blocking);
    }
  });
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) {
    to.resize_(from.sizes());
  }
  return copy_from(from, to, false);
}

at::Tensor empty(
    c10::IntArrayRef sizes,
    std::optional<at::ScalarType> type,
    std::optional<at::Layout> /*layout*/,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "only memory of the host can be pinned");
  const c10::DeviceGuard guard(with_index(device.value_or(c10::Device(kType))));
  return at::detail::empty_generic(sizes, device_allocator(), kKeys, c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef sizes,
    c10::IntArrayRef strides,
    std::optional<at::ScalarType> type,
    std::optional<at::Layout> /*layout*/,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "only memory of the host can be pinned");
  const c10::DeviceGuard guard(with_index(device.value_or(c10::Device(kType))));
  return at::detail::empty_strided_generic(sizes, strides, device_allocator(), kKeys, c10::dtype_or_default(type));
}

const at::Tensor& resize(
    const at::Tensor& tensor,
    c10::IntArrayRef sizes,
    std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(tensor.device());
  Layout layout = Layout::of(tensor);
  layout.sizes = sizes.vec();
  // The strides of a CPU tensor of this size, so that any memory format is right.
  const auto options = at::TensorOptions().dtype(at::kByte).device(at::kMeta);
  layout.strides = at::empty(sizes, options, format).strides().vec();
  reshape(tensor, layout);
  return tensor;
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  Memory::get().record(tensor.storage().data_ptr().get(), of(stream));
}

// The CPU's kernel draws from the CPU's generator, so this one is put together here.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (input.numel() == 0 || !train.value_or(true)) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool));
  mask.bernoulli_(1 - p);
  const double scale = p == 1 ? 0 : 1 / (1 - p);
  return {input.mul(mask).mul_(scale), mask};
}

}  // namespace fake
