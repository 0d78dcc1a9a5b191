"""How PyTorch's modules are walked, for `ebbtide._layers`, which says what layers and patterns are."""

from __future__ import annotations

from torch import nn

from ebbtide._layers import Kind


def _class(module: nn.Module) -> type:
    return type(getattr(module, "_orig_mod", module))  # what torch.compile(block) wraps counts, not the wrapper


KIND = Kind(
    named=lambda model: dict(model.named_modules()),
    children=lambda module: module.named_children(),
    has_parameters=lambda module: next(module.parameters(), None) is not None,
    containers=(nn.ModuleList, nn.Sequential),
    class_of=_class,
    containers_text="a ModuleList or Sequential",
    names_text="model.named_modules()",
    instead="ebbtide.torch.offload()",
)
