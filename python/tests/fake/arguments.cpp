#include "arguments.h"

#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>

#include "hooks.h"
#include "runtime.h"
#include "views.h"

namespace fake {

using c10::IValue;

namespace {

bool is_generator(const c10::Argument& argument) {
  const auto& type = *argument.type();
  if (type.kind() == c10::TypeKind::OptionalType) {
    return type.castRaw<c10::OptionalType>()->getElementType()->kind() == c10::TypeKind::GeneratorType;
  }
  return type.kind() == c10::TypeKind::GeneratorType;
}

template <typename T>
void append(std::string& key, const T& value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void append_layout(std::string& key, const at::Tensor& tensor) {
  const Layout layout = Layout::of(tensor);
  append(key, layout.defined);
  if (!layout.defined) {
    return;
  }
  append(key, layout.type);
  append(key, tensor.device().type());
  append(key, tensor.unsafeGetTensorImpl()->is_wrapped_number());
  append(key, layout.sizes.size());
  for (size_t at = 0; at < layout.sizes.size(); ++at) {
    append(key, layout.sizes[at]);
    append(key, layout.strides[at]);
  }
}

// False for a value of a kind that is not known.
bool append_value(std::string& key, const IValue& value) {
  key.push_back(value.isNone() ? 'n' : 'v');
  if (value.isNone()) {
    return true;
  }
  if (value.isTensor()) {
    append_layout(key, value.toTensor());
  } else if (value.isInt()) {
    append(key, value.toInt());
  } else if (value.isBool()) {
    append(key, value.toBool());
  } else if (value.isDouble()) {
    append(key, value.toDouble());
  } else if (value.isString()) {
    key += value.toStringRef() + '\0';
  } else if (value.isDevice()) {
    append(key, value.toDevice().type());
  } else if (value.isList()) {
    append(key, value.toListRef().size());
    for (const IValue& element : value.toListRef()) {
      if (!append_value(key, element)) {
        return false;
      }
    }
  } else {
    return false;
  }
  return true;
}

}  // namespace

IValue each_tensor(const IValue& value, const OnTensor& change) {
  if (value.isTensor()) {
    return change(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      changed.push_back(change(tensor));
    }
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      changed.push_back(tensor ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    }
    return changed;
  }
  return value;
}

Arguments::Arguments(const c10::OperatorHandle& op, torch::jit::Stack& stack)
    : schema_(op.schema()), device_(with_index(c10::Device(kType))) {
  const size_t count = schema_.arguments().size();
  values_.assign(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end());
  torch::jit::drop(stack, count);
  find_device();
  find_generators();
}

void Arguments::find_device() {
  std::optional<c10::Device> found;
  for (const IValue& value : values_) {
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (on_device(tensor)) {
        TORCH_CHECK(
            !found || *found == tensor.device(),
            schema_.name(), ": tensors on ", *found, " and on ", tensor.device());
        found = tensor.device();
      }
      return tensor;
    });
  }
  // Numbers and indices may come from the host, all else has to be on the device.
  const bool indices = schema_.name().find("index") != std::string::npos;
  for (const IValue& value : values_) {
    each_tensor(value, [&](const at::Tensor& tensor) {
      const bool strange = tensor.defined() && !on_device(tensor) && tensor.dim() > 0 && !indices;
      TORCH_CHECK(!strange, schema_.name(), ": a tensor is on ", tensor.device(), " instead of the fake accelerator");
      return tensor;
    });
    if (!found && value.isDevice()) {
      found = with_index(value.toDevice());
    }
  }
  device_ = found.value_or(device_);
}

void Arguments::find_generators() {
  for (size_t at = 0; at < values_.size(); ++at) {
    if (is_generator(schema_.arguments()[at])) {
      const auto given = values_[at].toOptional<at::Generator>();
      generators_.emplace_back(at, inner_generator(given, device_.index()));
    }
  }
}

bool Arguments::writes(size_t argument) const {
  const auto* info = schema_.arguments()[argument].alias_info();
  return info != nullptr && info->isWrite();
}

std::optional<std::string> Arguments::key() const {
  if (draws()) {
    return std::nullopt;
  }
  std::string key;
  append(key, &schema_);
  for (const IValue& value : values_) {
    if (!append_value(key, value)) {
      return std::nullopt;
    }
  }
  return key;
}

std::vector<Access> Arguments::accesses() const {
  std::vector<Access> result;
  for (size_t at = 0; at < values_.size(); ++at) {
    each_tensor(values_[at], [&](const at::Tensor& tensor) {
      if (on_device(tensor)) {
        result.push_back(access_of(tensor, writes(at)));
      }
      return tensor;
    });
  }
  return result;
}

std::vector<at::Tensor> Arguments::changed() const {
  std::vector<at::Tensor> result;
  for (size_t at = 0; at < values_.size(); ++at) {
    if (writes(at)) {
      each_tensor(values_[at], [&](const at::Tensor& tensor) {
        result.push_back(tensor);
        return tensor;
      });
    }
  }
  return result;
}

const IValue* Arguments::returned(size_t result) const {
  const auto* info = schema_.returns()[result].alias_info();
  if (info == nullptr) {
    return nullptr;
  }
  for (size_t at = 0; at < values_.size(); ++at) {
    const auto* other = schema_.arguments()[at].alias_info();
    if (other != nullptr && *other == *info) {
      return &values_[at];
    }
  }
  return nullptr;
}

Values Arguments::converted(const OnTensor& change) const {
  Values result;
  for (const IValue& value : values_) {
    if (value.isDevice()) {
      result.emplace_back(c10::Device(c10::kCPU));
    } else {
      result.push_back(each_tensor(value, change));
    }
  }
  return result;
}

Values Arguments::aliases() const {
  return converted([](const at::Tensor& tensor) { return on_device(tensor) ? alias(tensor) : snapshot(tensor); });
}

Values Arguments::zeros() const {
  return converted([](const at::Tensor& tensor) { return on_device(tensor) ? fake::zeros(tensor) : tensor; });
}

void Arguments::put_generators(Values& values, bool copies) const {
  for (const auto& [at, generator] : generators_) {
    values[at] = copies ? generator.clone() : generator;
  }
}

}  // namespace fake
