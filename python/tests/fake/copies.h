// Copies between the host and the device, and what else needs a kernel of its own.
//
// A copy reads all its bytes first and writes them a moment later. Host memory that is not pinned is read
// before the call returns, or written before it returns. Pinned memory belongs to a copy that does not
// block until the copy is complete; the block is told of the stream, as PyTorch's other devices do.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <optional>
#include <tuple>

namespace fake {

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking);
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to);

at::Tensor empty(
    c10::IntArrayRef sizes,
    std::optional<at::ScalarType> type,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> format);
at::Tensor empty_strided(
    c10::IntArrayRef sizes,
    c10::IntArrayRef strides,
    std::optional<at::ScalarType> type,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory);
const at::Tensor& resize(
    const at::Tensor& tensor,
    c10::IntArrayRef sizes,
    std::optional<at::MemoryFormat> format);
void record_stream(at::Tensor& tensor, c10::Stream stream);
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train);

}  // namespace fake
