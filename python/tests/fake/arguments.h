// The arguments of one call of an operator, and the forms that they take on the way.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "shadow.h"

namespace fake {

using Values = std::vector<c10::IValue>;
using OnTensor = std::function<at::Tensor(const at::Tensor&)>;

// The value with every tensor in it, also in lists, replaced.
c10::IValue each_tensor(const c10::IValue& value, const OnTensor& change);

class Arguments {
 public:
  // Takes them from the stack.
  Arguments(const c10::OperatorHandle& op, torch::jit::Stack& stack);

  // The device that the tensors are on; an error if they do not agree.
  c10::Device device() const {
    return device_;
  }
  // Equal for calls whose results have the same form; none if that can't be told.
  std::optional<std::string> key() const;
  // What the kernel reads and writes on the device.
  std::vector<Access> accesses() const;
  // The tensors that the operator changes, in order.
  std::vector<at::Tensor> changed() const;
  // The argument that a result is, for operators that return what they changed.
  const c10::IValue* returned(size_t result) const;
  bool draws() const {
    return !generators_.empty();
  }

  // As CPU tensors over the same memory.
  Values aliases() const;
  // As zeros.
  Values zeros() const;
  // Puts generators in their places: the device's own ones, or copies in the state they have now.
  void put_generators(Values& values, bool copies) const;

 private:
  Values converted(const OnTensor& change) const;
  bool writes(size_t argument) const;
  void find_device();
  void find_generators();

  const c10::FunctionSchema& schema_;
  Values values_;
  c10::Device device_;
  // Which arguments are generators, and what they stand for.
  std::vector<std::pair<size_t, at::Generator>> generators_;
};

}  // namespace fake
