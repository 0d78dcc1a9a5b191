"""Models that a session can't take. What is wrong with other settings: `ebbtide._checks`. No state."""

from __future__ import annotations

import torch
from torch import nn

from ebbtide.errors import SettingError


def check_model(model: object) -> None:
    """Refuses what can't be trained, or has no layers to hang on to."""
    if not isinstance(model, nn.Module):
        raise SettingError(f"session() got a {type(model).__name__}, not a torch.nn.Module", "pass the model itself")
    if (hasattr(model, "_orig_mod") and hasattr(model, "dynamo_ctx")) or model._compiled_call_impl is not None:
        raise SettingError(
            "the model as a whole is under torch.compile, which leaves no layers to hang on to",
            "open the session on the plain model and compile its blocks: block = torch.compile(block)",
        )
    first = next(model.parameters(), None)
    if first is None:
        raise SettingError(
            f"{type(model).__name__} has no parameters, so there is nothing to train",
            "pass the model that is trained, or put `with ebbtide.torch.offload():` around code",
        )
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise SettingError(
                f"{name} is on the meta device, without memory", "materialise the model first (to_empty)"
            )
    for device in {parameter.device for parameter in model.parameters()}:
        if not _is_there(device):
            raise SettingError(
                f"the model is on {device}, an accelerator that isn't there",
                'move it to a device of this machine, as model.to("cpu")',
            )


def _is_there(device: torch.device) -> bool:
    """Whether this machine has a device. Tensors of one that it lacks are those of PyTorch's fake mode."""
    if device.type == "cpu":
        return True
    try:
        return bool(torch.get_device_module(device).is_available())
    except (AttributeError, RuntimeError):
        return False
