// Operators of the device.
//
// Any operator that has a CPU kernel runs here: at the call the form of its results is found out, memory
// for them is allocated, and a job is queued on the current stream. The job runs the CPU kernel over the
// device's memory when the stream gets to it, so its bits are those of the CPU.
//
// The form of results is that of the same operator on zeros; it is remembered for equal arguments. An
// operator whose results' form depends on values, that gives something other than tensors, or that fails
// on zeros, is queued too, but the caller waits for it.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace fake {

// Runs an operator on the device.
void run_on_stream(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Runs an operator that only makes another view: the kernel of the CPU does for any device.
void run_on_metadata(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace fake
