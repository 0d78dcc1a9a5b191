#include "kernels.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>
#include <exception>
#include <unordered_map>

#include "arguments.h"
#include "runtime.h"
#include "views.h"

namespace fake {

using c10::IValue;

namespace {

// The form of one call's results: one list for each result that is new, and the new form of each tensor
// that the operator changes.
struct Plan {
  std::vector<std::vector<Layout>> results;
  std::vector<Layout> changed;
};

// Where the job puts a result.
struct Target {
  void* data = nullptr;
  Layout layout;
};

std::vector<at::Tensor> tensors_in(const IValue& value) {
  std::vector<at::Tensor> found;
  each_tensor(value, [&](const at::Tensor& tensor) {
    found.push_back(tensor);
    return tensor;
  });
  return found;
}

// Runs the CPU kernel on the values, without autograd.
Values call(const c10::OperatorHandle& op, const Values& values) {
  const at::AutoDispatchBelowADInplaceOrView below;
  torch::jit::Stack stack = values;
  op.callBoxed(stack);
  return stack;
}

// Kernels split sums by the number of threads, so that of the caller counts.
void use_threads(int threads) {
  if (at::get_num_threads() != threads) {
    at::set_num_threads(threads);
  }
}

bool gives_tensors_only(const c10::FunctionSchema& schema) {
  for (const c10::Argument& result : schema.returns()) {
    const auto& type = *result.type();
    const bool list = type.kind() == c10::TypeKind::ListType &&
        type.castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::TensorType;
    if (!list && type.kind() != c10::TypeKind::TensorType) {
      return false;
    }
  }
  return true;
}

class Invocation {
 public:
  Invocation(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op), arguments_(op, stack), name_(op.schema().name()), threads_(at::get_num_threads()) {
    if (!op.schema().overload_name().empty()) {
      name_ += "." + op.schema().overload_name();
    }
  }

  Values run() {
    const c10::DeviceGuard guard(arguments_.device());
    translating([] { World::get().point("kernel"); });
    if (auto plan = find_plan()) {
      return queue(*plan);
    }
    return queue_and_wait();
  }

 private:
  std::optional<Plan> find_plan();
  std::optional<Plan> make_plan();
  bool depends_on_values() const;
  Plan plan_of(const Values& results, const std::vector<at::Tensor>& changed) const;
  Values queue(const Plan& plan);
  Values queue_and_wait();
  // Allocates the new results, and tells where they are.
  Values make_results(const Plan& plan, std::vector<Target>& targets, std::vector<Access>& writes) const;
  void apply(const Plan& plan) const;

  const c10::OperatorHandle& op_;
  Arguments arguments_;
  std::string name_;
  int threads_;
  // For operators that draw random numbers: generators in their state before the call.
  Values drawing_;
};

// Copies results to where they belong, in the order of the targets.
void store(const Values& results, const std::vector<bool>& fresh, const std::vector<Target>& targets) {
  size_t at = 0;
  for (size_t result = 0; result < results.size(); ++result) {
    if (!fresh[result]) {
      continue;
    }
    for (const at::Tensor& tensor : tensors_in(results[result])) {
      const Target& target = targets.at(at++);
      TORCH_CHECK(Layout::of(tensor) == target.layout, "a result has another form than it was thought to have");
      if (tensor.defined() && tensor.numel() > 0) {
        std::memcpy(target.data, tensor.const_data_ptr(), target.layout.bytes());
      }
    }
  }
}

std::vector<bool> fresh_results(const c10::OperatorHandle& op, const Arguments& arguments) {
  std::vector<bool> fresh;
  for (size_t result = 0; result < op.schema().returns().size(); ++result) {
    fresh.push_back(arguments.returned(result) == nullptr);
  }
  return fresh;
}

bool Invocation::depends_on_values() const {
  if (!gives_tensors_only(op_.schema()) || op_.hasTag(at::Tag::data_dependent_output)) {
    return true;
  }
  if (!op_.hasTag(at::Tag::dynamic_output_shape)) {
    return false;
  }
  if (op_.schema().name() != "aten::index") {
    return true;
  }
  for (const Values values = arguments_.aliases(); const at::Tensor& index : tensors_in(values.at(1))) {
    if (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte) {
      return true;
    }
  }
  return false;
}

std::optional<Plan> Invocation::find_plan() {
  static std::mutex mutex;
  static auto* plans = new std::unordered_map<std::string, Plan>();
  if (depends_on_values()) {
    return std::nullopt;
  }
  const auto key = arguments_.key();
  if (key) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (const auto found = plans->find(*key); found != plans->end()) {
      return found->second;
    }
  }
  auto plan = make_plan();
  if (key && plan) {
    const std::lock_guard<std::mutex> lock(mutex);
    plans->emplace(*key, *plan);
  }
  return plan;
}

std::optional<Plan> Invocation::make_plan() {
  Values values = arguments_.zeros();
  Values before(values.size());
  if (arguments_.draws()) {
    arguments_.put_generators(before, true);
    // The device's generator goes on as far as the kernel will draw.
    arguments_.put_generators(values, false);
  }
  std::vector<at::Tensor> changed;
  for (size_t at = 0; at < values.size(); ++at) {
    const auto* info = op_.schema().arguments()[at].alias_info();
    if (info != nullptr && info->isWrite()) {
      const auto found = tensors_in(values[at]);
      changed.insert(changed.end(), found.begin(), found.end());
    }
  }
  try {
    const Values results = call(op_, values);
    drawing_ = std::move(before);
    return plan_of(results, changed);
  } catch (const std::exception&) {
    // On zeros it fails; on the values themselves it may not.
    return std::nullopt;
  }
}

Plan Invocation::plan_of(const Values& results, const std::vector<at::Tensor>& changed) const {
  Plan plan;
  for (size_t result = 0; result < results.size(); ++result) {
    plan.results.emplace_back();
    if (arguments_.returned(result) == nullptr) {
      for (const at::Tensor& tensor : tensors_in(results[result])) {
        plan.results.back().push_back(Layout::of(tensor));
      }
    }
  }
  for (const at::Tensor& tensor : changed) {
    plan.changed.push_back(Layout::of(tensor));
  }
  return plan;
}

void Invocation::apply(const Plan& plan) const {
  const auto changed = arguments_.changed();
  for (size_t at = 0; at < changed.size(); ++at) {
    if (on_device(changed[at]) && Layout::of(changed[at]) != plan.changed.at(at)) {
      reshape(changed[at], plan.changed.at(at));
    }
  }
}

Values Invocation::make_results(const Plan& plan, std::vector<Target>& targets, std::vector<Access>& writes) const {
  const auto add = [&](const Layout& layout) {
    at::Tensor tensor = allocate(layout);
    const Access access = access_of(tensor, true);
    targets.push_back({reinterpret_cast<void*>(access.range.begin), layout});
    writes.push_back(access);
    return tensor;
  };
  Values results;
  for (size_t result = 0; result < plan.results.size(); ++result) {
    if (const IValue* argument = arguments_.returned(result)) {
      results.push_back(*argument);
    } else if (op_.schema().returns()[result].type()->kind() == c10::TypeKind::ListType) {
      c10::List<at::Tensor> list;
      for (const Layout& layout : plan.results[result]) {
        list.push_back(add(layout));
      }
      results.emplace_back(std::move(list));
    } else {
      results.emplace_back(add(plan.results[result].at(0)));
    }
  }
  return results;
}

Values Invocation::queue(const Plan& plan) {
  apply(plan);
  std::vector<Access> accesses = arguments_.accesses();
  Values values = arguments_.aliases();
  for (size_t at = 0; at < drawing_.size(); ++at) {
    if (drawing_[at].isGenerator()) {
      values[at] = drawing_[at];
    }
  }
  std::vector<Target> targets;
  Values results = make_results(plan, targets, accesses);
  auto job = [op = op_, values = std::move(values), targets = std::move(targets),
              fresh = fresh_results(op_, arguments_), threads = threads_, name = name_] {
    use_threads(threads);
    try {
      store(call(op, values), fresh, targets);
    } catch (const c10::Error& error) {
      throw Failure(name + ", when its turn came: " + error.what_without_backtrace());
    }
  };
  World::get().launch(current(arguments_.device()), name_, accesses, std::move(job));
  return results;
}

Values Invocation::queue_and_wait() {
  Values values = arguments_.aliases();
  arguments_.put_generators(values, false);
  struct Outcome {
    Values results;
    std::exception_ptr error;
  };
  const auto outcome = std::make_shared<Outcome>();
  auto job = [op = op_, values, outcome, threads = threads_] {
    use_threads(threads);
    try {
      outcome->results = call(op, values);
    } catch (...) {
      outcome->error = std::current_exception();
    }
  };
  Stream& stream = current(arguments_.device());
  World::get().launch(stream, name_, arguments_.accesses(), std::move(job));
  translating([&] { World::get().sync(stream); });
  if (outcome->error) {
    std::rethrow_exception(outcome->error);
  }
  for (const at::Tensor& tensor : arguments_.changed()) {
    TORCH_CHECK(tensor.numel() > 0, name_, " into a tensor whose size depends on values is not supported");
  }
  if (!gives_tensors_only(op_.schema())) {
    return outcome->results;
  }
  const auto plan = plan_of(outcome->results, {});
  std::vector<Target> targets;
  std::vector<Access> writes;
  Values results = make_results(plan, targets, writes);
  if (!targets.empty()) {
    World::get().launch(stream, name_, writes, [outcome, fresh = fresh_results(op_, arguments_), targets] {
      store(outcome->results, fresh, targets);
    });
  }
  return results;
}

}  // namespace

void run_on_stream(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for (IValue& result : Invocation(op, *stack).run()) {
    stack->push_back(std::move(result));
  }
}

void run_on_metadata(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

}  // namespace fake
