// Random numbers of the device.
#pragma once

#include <ATen/core/Generator.h>

namespace fake {

// The CPU generator that a generator of the device wraps: kernels draw from it, so the device has the
// random numbers of the CPU for the same seed. Given none, that of the device's default generator.
at::Generator inner_generator(const std::optional<at::Generator>& generator, c10::DeviceIndex device);

}  // namespace fake
