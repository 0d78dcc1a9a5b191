// Between PyTorch's types and those of the machine: current device and stream, errors, allocators.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <functional>

#include "memory.h"
#include "world.h"

namespace fake {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

// Current device and streams; each host thread has its own.
c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex device);
// The device itself, or the current one if it names none.
c10::Device with_index(c10::Device device);
c10::Stream current_stream(c10::Device device);
c10::Stream exchange_stream(c10::Stream stream);

Stream& of(const c10::Stream& stream);
Stream& current(c10::Device device);

// Runs a call of the machine; its errors become PyTorch's.
void translating(const std::function<void()>& call);

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

}  // namespace fake
