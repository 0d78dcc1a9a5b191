#include "hooks.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Storage.h>

#include <cstring>

#include "runtime.h"

namespace fake {

namespace {

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  DeviceGenerator(c10::DeviceIndex device, at::Generator inner)
      : c10::GeneratorImpl({kType, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(inner)) {}

  void set_current_seed(uint64_t seed) override {
    inner.set_current_seed(seed);
  }
  void set_offset(uint64_t /*offset*/) override {
    TORCH_CHECK(false, "generators of the fake accelerator have no offset");
  }
  uint64_t get_offset() const override {
    TORCH_CHECK(false, "generators of the fake accelerator have no offset");
  }
  uint64_t current_seed() const override {
    return inner.current_seed();
  }
  uint64_t seed() override {
    return const_cast<at::Generator&>(inner).seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }

  at::Generator inner;

 private:
  DeviceGenerator* clone_impl() const override {
    return new DeviceGenerator(device().index(), inner.clone());
  }
};

at::Generator make(c10::DeviceIndex device) {
  return at::make_generator<DeviceGenerator>(device, at::detail::createCPUGenerator());
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* generators = new std::array<at::Generator, kDevices>{make(0), make(1)};
  return generators->at(device < 0 ? current_device() : device);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return kDevices;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    exchange_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return 0 <= device && device < kDevices ? exchange_device(device) : current_device();
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return make(device < 0 ? current_device() : device);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    const auto device = Memory::get().device_of(data);
    TORCH_CHECK(device.has_value(), "not memory of the fake accelerator");
    return {kType, static_cast<c10::DeviceIndex>(*device)};
  }
  bool isPinnedPtr(const void* data) const override {
    return Memory::get().is_pinned(data);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override;
};

uintptr_t address(const c10::DataPtr& data) {
  return reinterpret_cast<uintptr_t>(data.get());
}

// New memory on the current stream; what the old one held and fits is copied on the same stream.
void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const {
  TORCH_CHECK(storage.resizable(), "trying to resize a storage that is not resizable");
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr data = device_allocator()->allocate(bytes);
  const size_t kept = std::min(bytes, storage.nbytes());
  if (kept > 0) {
    const uintptr_t from = address(storage.data_ptr());
    const uintptr_t to = address(data);
    World::get().launch(
        current(storage.device()),
        "resize",
        {{{from, from + kept}, false}, {{to, to + kept}, true}},
        [from, to, kept] { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), kept); });
  }
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(bytes);
}

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace

at::Generator inner_generator(const std::optional<at::Generator>& generator, c10::DeviceIndex device) {
  const at::Generator& found =
      generator.has_value() && generator->defined() ? *generator : default_generator(device);
  auto* impl = dynamic_cast<DeviceGenerator*>(found.unsafeGetGeneratorImpl());
  TORCH_CHECK(impl != nullptr, "expected a generator of the fake accelerator, found one of ", found.device());
  return impl->inner;
}

}  // namespace fake
