// Devices, streams, events and allocators, as PyTorch's device-generic code asks for them.
#include "runtime.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace fake {

namespace {

thread_local c10::DeviceIndex this_device = 0;
thread_local std::array<c10::StreamId, kDevices> this_streams{};

c10::Device device(c10::DeviceIndex index) {
  return {kType, index};
}

c10::Stream stream(c10::DeviceIndex index, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, device(index), id);
}

// What an event object of PyTorch points to. It is made by the first recording.
struct Event {
  std::mutex mutex;
  Moment moment;

  Moment get() {
    const std::lock_guard<std::mutex> lock(mutex);
    return moment;
  }
};

void release(void* address) {
  Memory::get().free(address);
}

}  // namespace

c10::DeviceIndex current_device() {
  return this_device;
}

c10::DeviceIndex exchange_device(c10::DeviceIndex index) {
  TORCH_CHECK(0 <= index && index < kDevices, "there is no device fake:", static_cast<int>(index));
  return std::exchange(this_device, index);
}

c10::Device with_index(c10::Device given) {
  return given.has_index() ? given : device(this_device);
}

c10::Stream current_stream(c10::Device given) {
  const auto index = with_index(given).index();
  return stream(index, this_streams.at(index));
}

c10::Stream exchange_stream(c10::Stream given) {
  const auto index = given.device_index();
  return stream(index, std::exchange(this_streams.at(index), given.id()));
}

Stream& of(const c10::Stream& given) {
  return World::get().stream(given.device_index(), given.id());
}

Stream& current(c10::Device given) {
  return of(current_stream(given));
}

void translating(const std::function<void()>& call) {
  try {
    call();
  } catch (const OutOfMemory& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
  } catch (const Failure& error) {
    TORCH_CHECK(false, error.what());
  }
}

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device given) const override {
    return device(exchange_device(given.index()));
  }
  c10::Device getDevice() const override {
    return device(current_device());
  }
  void setDevice(c10::Device given) const override {
    exchange_device(given.index());
  }
  void uncheckedSetDevice(c10::Device given) const noexcept override {
    if (0 <= given.index() && given.index() < kDevices) {
      this_device = given.index();
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
  c10::DeviceCapability getDeviceCapability(c10::Device /*given*/) const override {
    return {};
  }

  // Streams.
  c10::Stream getStream(c10::Device given) const override {
    return current_stream(given);
  }
  c10::Stream getDefaultStream(c10::Device given) const override {
    return stream(with_index(given).index(), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device given, bool /*high*/) const override {
    return getNewStream(given, 0);
  }
  c10::Stream getNewStream(c10::Device given, int /*priority*/) const override {
    const auto index = with_index(given).index();
    c10::StreamId id = 0;
    translating([&] { id = World::get().new_stream(index).index; });
    return stream(index, id);
  }
  c10::Stream exchangeStream(c10::Stream given) const override {
    return exchange_stream(given);
  }
  void* getStreamNativeHandle(const c10::Stream given) const override {
    return &of(given);
  }
  bool queryStream(const c10::Stream& given) const override {
    return World::get().query(of(given));
  }
  void synchronizeStream(const c10::Stream& given) const override {
    translating([&] { World::get().sync(of(given)); });
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    translating([&] { World::get().sync_device(index); });
  }

  // Events.
  void record(void** event, const c10::Stream& given, const c10::DeviceIndex /*index*/, const c10::EventFlag /*flag*/)
      const override {
    translating([&] {
      const Moment moment = World::get().record(of(given));
      if (*event == nullptr) {
        *event = new Event();
      }
      auto* recorded = static_cast<Event*>(*event);
      const std::lock_guard<std::mutex> lock(recorded->mutex);
      recorded->moment = moment;
    });
  }
  void block(void* event, const c10::Stream& given) const override {
    if (event != nullptr) {
      translating([&] { World::get().wait(of(given), static_cast<Event*>(event)->get()); });
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || World::get().query(static_cast<Event*>(event)->get());
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      translating([&] { World::get().sync(static_cast<Event*>(event)->get()); });
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*index*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex /*index*/) const override {
    TORCH_CHECK(first != nullptr && second != nullptr, "both events must be recorded");
    const int64_t from = static_cast<Event*>(first)->get().passed->load();
    const int64_t to = static_cast<Event*>(second)->get().passed->load();
    TORCH_CHECK(from != 0 && to != 0, "both events must be completed");
    return static_cast<double>(to - from) * 1e-6;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& given) const override {
    Memory::get().record(data.get(), of(given));
  }
};

c10::CachingAllocator::Stat stat(int64_t current, int64_t peak) {
  c10::CachingAllocator::Stat result;
  result.current = current;
  result.peak = peak;
  return result;
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const auto index = current_device();
    void* address = nullptr;
    if (bytes > 0) {
      translating([&] { address = Memory::get().allocate(current(device(index)), bytes); });
    }
    return {address, address, &release, device(index)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* /*to*/, const void* /*from*/, std::size_t /*bytes*/) const override {
    TORCH_CHECK(false, "the fake accelerator copies on streams only");
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t /*pool*/) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream given) override {
    Memory::get().record(data.get(), of(given));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    const Usage usage = Memory::get().usage(index);
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto bytes = stat(usage.bytes, usage.peak);
    stats.allocated_bytes[0] = stats.active_bytes[0] = stats.reserved_bytes[0] = bytes;
    stats.requested_bytes[0] = stat(usage.requested, usage.requested);
    stats.allocation[0] = stats.active[0] = stat(usage.blocks, usage.blocks);
    stats.num_ooms = usage.failures;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex /*index*/) override {}
  void resetPeakStats(c10::DeviceIndex /*index*/) override {
    Memory::get().reset_peaks();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    const size_t capacity = Memory::get().capacity(index);
    return {capacity - static_cast<size_t>(Memory::get().usage(index).bytes), capacity};
  }
};

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* address = nullptr;
    if (bytes > 0) {
      translating([&] { address = Memory::get().pin(bytes); });
    }
    return {address, address, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool record_event(void* address, void* /*context*/, c10::Stream given) override {
    return Memory::get().record(address, of(given));
  }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    const Usage usage = Memory::get().pinned();
    at::HostStats stats;
    stats.allocated_bytes = stats.active_bytes = stat(usage.bytes, usage.peak);
    stats.allocations = stats.active_requests = stat(usage.blocks, usage.blocks);
    return stats;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {
    Memory::get().reset_peaks();
  }
};

DeviceMemory* the_device_memory() {
  static auto* allocator = new DeviceMemory();
  return allocator;
}

PinnedMemory* the_pinned_memory() {
  static auto* allocator = new PinnedMemory();
  return allocator;
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
REGISTER_ALLOCATOR(kType, the_device_memory())
const at::HostAllocatorRegistry<kType> registered(the_pinned_memory());

}  // namespace

c10::Allocator* device_allocator() {
  return the_device_memory();
}

c10::Allocator* pinned_allocator() {
  return the_pinned_memory();
}

}  // namespace fake
