// Fused attention: the CPU's, where the CPU would choose it.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

namespace fake {

// The fused kernel for arguments for which the CPU has one, else a composition of simple operators.
int64_t attention_choice(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& mask,
    double dropout,
    bool causal,
    std::optional<double> scale,
    bool grouped);

using AttentionResults = std::tuple<
    at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor>;

AttentionResults attention(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& mask,
    double dropout,
    bool causal,
    bool debug,
    std::optional<double> scale);

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& grad,
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const at::Tensor& mask,
    std::array<bool, 4> wanted,
    const at::Tensor& out,
    const at::Tensor& logsumexp,
    const at::Tensor& cumulated_q,
    const at::Tensor& cumulated_k,
    c10::SymInt max_q,
    c10::SymInt max_k,
    double dropout,
    bool causal,
    const at::Tensor& seed,
    const at::Tensor& offset,
    std::optional<double> scale);

}  // namespace fake
