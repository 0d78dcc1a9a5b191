"""What a policy may answer: about a saved tensor, and about the output of an operation.

A policy for *tensors* (`swap_wrapper`, `swap`, `async_save_on_cpu`) is asked once for each tensor that
could be swapped, and keeps it or swaps it. A policy for *operations* (`checkpoint`,
`create_selective_checkpoint_contexts`) is asked once for each operation of a checkpointed region, and
may also have its output computed again. Both may answer with PyTorch's own
`torch.utils.checkpoint.CheckpointPolicy`. No framework is imported here.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from ebbtide.errors import SettingError


class CheckpointPolicy(enum.Enum):
    """What becomes of a tensor between forward and backward.

    `MUST_SAVE` and `PREFER_SAVE` keep it on the device, `MUST_RECOMPUTE` and `PREFER_RECOMPUTE` compute
    it again in backward, `MUST_SWAP` moves it out and brings it back. In eager mode nothing overrides a
    preference, so the two words of a pair mean the same.

    Example:
        >>> def large(tensor):
        ...     big = tensor.numel() > 4096
        ...     return CheckpointPolicy.MUST_SWAP if big else CheckpointPolicy.MUST_SAVE
        >>> block = swap_wrapper(block, policy_fn=large)
    """

    MUST_SAVE = 0
    PREFER_SAVE = 1
    MUST_RECOMPUTE = 2
    PREFER_RECOMPUTE = 3
    MUST_SWAP = 4

    @property
    def saves(self) -> bool:
        """Whether the tensor stays on the device."""
        return self in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)

    @property
    def recomputes(self) -> bool:
        """Whether the tensor is computed again."""
        return self in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


# PyTorch's enum has the first four names as well, and two of its own for what is a swap here.
_OTHER_NAMES = {
    "MUST_CPU_OFFLOAD": CheckpointPolicy.MUST_SWAP,
    "PREFER_CPU_OFFLOAD": CheckpointPolicy.MUST_SWAP,
}
_ANSWERS = "answer CheckpointPolicy.MUST_SAVE or CheckpointPolicy.MUST_SWAP"


def known_policy(answer: object) -> CheckpointPolicy | None:
    """The policy that an answer means; None for what is no policy, ours or PyTorch's."""
    if isinstance(answer, CheckpointPolicy):
        return answer
    if isinstance(answer, enum.Enum) and type(answer).__module__ == "torch.utils.checkpoint":
        return _OTHER_NAMES.get(answer.name) or CheckpointPolicy.__members__.get(answer.name)
    return None


def decide_by(policy_fn: Callable[[Any], object]) -> Callable[[Any], bool]:
    """Makes a question with the answers swap (True) and keep (False) of a policy for tensors.

    Raises:
        SettingError: In the question, for any answer but must-save and must-swap.
    """

    def decide(tensor: Any) -> bool:
        answer = policy_fn(tensor)
        policy = known_policy(answer)
        if policy is CheckpointPolicy.MUST_SWAP:
            return True
        if policy is CheckpointPolicy.MUST_SAVE:
            return False
        shape = tuple(tensor.shape)
        raise SettingError(f"the policy answered {answer!r} for a tensor of shape {shape}", _ANSWERS)

    return decide


def operation_policy(answer: object, operation: object) -> CheckpointPolicy:
    """The policy that an answer about an operation means; True is must-save, False prefer-recompute.

    Raises:
        SettingError: The answer is neither a policy nor a bool.
    """
    if isinstance(answer, bool):
        return CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE
    policy = known_policy(answer)
    if policy is None:
        hint = "answer one of CheckpointPolicy, or True to save and False to recompute"
        raise SettingError(f"the policy answered {answer!r} for the operation {operation}", hint)
    return policy


def check_policy(policy_fn: object) -> None:
    """Refuses what can't be asked.

    Raises:
        SettingError: It is neither None nor callable.
    """
    if policy_fn is not None and not callable(policy_fn):
        raise SettingError(f"policy_fn is {policy_fn!r}", "pass a function of a tensor, or None")
