#include "attention.h"

#include <ATen/SDPBackend.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>

#include "views.h"

namespace fake {

namespace {

// As the choice looks at it: form, type and whether it needs a gradient.
at::Tensor on_host(const at::Tensor& tensor) {
  at::Tensor result = on_device(tensor) ? alias(tensor) : tensor;
  if (on_device(tensor) && tensor.requires_grad()) {
    result.set_requires_grad(true);
  }
  return result;
}

std::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

}  // namespace

int64_t attention_choice(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& mask,
    double dropout,
    bool causal,
    std::optional<double> scale,
    bool grouped) {
  const auto host_mask = mask && mask->defined() ? std::optional<at::Tensor>(on_host(*mask)) : std::nullopt;
  const int64_t choice = at::_fused_sdp_choice(
      on_host(query), on_host(key), on_host(value), host_mask, dropout, causal, scale, grouped);
  const bool fused = choice == static_cast<int64_t>(at::SDPBackend::flash_attention);
  return fused ? static_cast<int64_t>(at::SDPBackend::overrideable) : choice;
}

AttentionResults attention(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& mask,
    double dropout,
    bool causal,
    bool /*debug*/,
    std::optional<double> scale) {
  auto [out, logsumexp] =
      at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, causal, mask, scale);
  return {out, logsumexp, {}, {}, query.size(2), key.size(2), {}, {}, {}};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& grad,
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const at::Tensor& mask,
    std::array<bool, 4> /*wanted*/,
    const at::Tensor& out,
    const at::Tensor& logsumexp,
    const at::Tensor& /*cumulated_q*/,
    const at::Tensor& /*cumulated_k*/,
    c10::SymInt /*max_q*/,
    c10::SymInt /*max_k*/,
    double dropout,
    bool causal,
    const at::Tensor& /*seed*/,
    const at::Tensor& /*offset*/,
    std::optional<double> scale) {
  auto [query_grad, key_grad, value_grad] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad, query, key, value, out, logsumexp, dropout, causal, optional(mask), scale);
  return {query_grad, key_grad, value_grad, {}};
}

}  // namespace fake

namespace at::native {

REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &fake::attention_choice)

}  // namespace at::native
