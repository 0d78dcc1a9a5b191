// Which operator runs how, and what tests may ask of the device.
#include <torch/library.h>

#include <array>
#include <set>

#include "attention.h"
#include "copies.h"
#include "kernels.h"
#include "runtime.h"

namespace fake {

namespace {

// Those with a kernel of their own.
const std::set<std::string>& special() {
  static const std::set<std::string> names = {
      "aten::empty.memory_format",
      "aten::empty_strided",
      "aten::resize_",
      "aten::_copy_from",
      "aten::_copy_from_and_resize",
      "aten::record_stream",
      "aten::native_dropout",
      "aten::_fused_sdp_choice",
  };
  return names;
}

std::string full_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

bool takes_tensors(const c10::FunctionSchema& schema) {
  for (const c10::Argument& argument : schema.arguments()) {
    if (argument.type()->str().find("Tensor") != std::string::npos) {
      return true;
    }
  }
  return false;
}

// A view, or a tensor that is given another storage: nothing is computed.
bool is_metadata(const c10::OperatorHandle& op) {
  if (op.hasTag(at::Tag::inplace_view) || op.schema().name() == "aten::is_set_to") {
    return true;
  }
  for (const c10::Argument& result : op.schema().returns()) {
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) {
      return true;
    }
  }
  return false;
}

// Composites that look for a kernel of the device by its name; those of the CPU run them as a whole.
constexpr std::array<const char*, 2> kWhole = {"convolution", "convolution_backward"};

// Explicitly, since many operators also have a composite kernel, which would come first and give other
// bits than the CPU's.
void register_cpu_operators(torch::Library& library) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op || name.name.rfind("aten::", 0) != 0 || special().count(full_name(name)) != 0) {
      continue;
    }
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || !takes_tensors(op->schema())) {
      continue;
    }
    if (is_metadata(*op)) {
      library.impl(full_name(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_metadata>());
    } else {
      library.impl(full_name(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_stream>());
    }
  }
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("resize_", TORCH_FN(resize));
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  library.impl("record_stream", TORCH_FN(record_stream));
  library.impl("native_dropout", TORCH_FN(native_dropout));
  library.impl("_fused_sdp_choice", TORCH_FN(attention_choice));
  library.impl("_scaled_dot_product_fused_attention_overrideable", TORCH_FN(attention));
  library.impl("_scaled_dot_product_fused_attention_overrideable_backward", TORCH_FN(attention_backward));
  for (const char* name : kWhole) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_stream>());
  }
  register_cpu_operators(library);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_stream>());
}

c10::Dict<std::string, int64_t> stats(int64_t device) {
  c10::Dict<std::string, int64_t> result;
  for (const char* direction : {"out", "in", "within"}) {
    result.insert(std::string("copies_") + direction, 0);
    result.insert(std::string("bytes_") + direction, 0);
  }
  for (const auto& [name, value] : World::get().counters()) {
    result.insert_or_assign(name, value);
  }
  const Usage usage = Memory::get().usage(static_cast<int>(device));
  result.insert("allocated", usage.bytes);
  result.insert("peak", usage.peak);
  result.insert("blocks", usage.blocks);
  result.insert("allocations", usage.allocations);
  result.insert("out_of_memory", usage.failures);
  const Usage pinned = Memory::get().pinned();
  result.insert("pinned", pinned.bytes);
  result.insert("pinned_peak", pinned.peak);
  result.insert("pinned_requested", pinned.requested);
  result.insert("pinned_blocks", pinned.blocks);
  return result;
}

void host_access(int64_t address, int64_t bytes, bool writes) {
  const auto begin = static_cast<uintptr_t>(address);
  World::get().host(writes ? "write" : "read", {{begin, begin + static_cast<uintptr_t>(bytes)}, writes});
}

// What a program does that copies by addresses; nothing is known of their owners.
void copy_bytes(int64_t to, int64_t from, int64_t bytes) {
  const auto size = static_cast<uintptr_t>(bytes);
  const auto target = static_cast<uintptr_t>(to);
  const auto source = static_cast<uintptr_t>(from);
  auto job = [target, source, size] {
    const auto* first = reinterpret_cast<const char*>(source);
    const std::vector<char> held(first, first + size);
    Stream::pause();
    std::copy(held.begin(), held.end(), reinterpret_cast<char*>(target));
  };
  translating([&] {
    World::get().point("copy");
    World::get().launch(
        current(c10::Device(kType)),
        "copy of bytes",
        {{{source, source + size}, false}, {{target, target + size}, true}},
        std::move(job));
  });
}

void set_capacity(int64_t device, int64_t bytes) {
  Memory::get().set_capacity(static_cast<int>(device), static_cast<size_t>(bytes));
}

TORCH_LIBRARY(fake_accelerator, library) {
  library.def("reports", [] { return World::get().reports(); });
  library.def("clear_reports", [] { World::get().clear_reports(); });
  library.def("trace", [](bool on) { World::get().trace(on); });
  library.def("traced", [] { return World::get().traced(); });
  library.def("set_seed", [](int64_t seed) { World::get().lateness.seed = static_cast<uint64_t>(seed); });
  library.def("set_delay", [](int64_t us) { World::get().lateness.max_us = static_cast<uint64_t>(us); });
  library.def("fail_next", [](const std::string& kind, int64_t nth) { World::get().fail_next(kind, nth); });
  library.def("set_capacity", &set_capacity);
  library.def("set_host_events", [](bool on) { Memory::get().set_host_events(on); });
  library.def("host_access", &host_access);
  library.def("copy_bytes", &copy_bytes);
  library.def("reset_peaks", [] { Memory::get().reset_peaks(); });
  library.def("stats", &stats);
}

}  // namespace

}  // namespace fake
