"""Settings of MindSpore under which a run can be repeated, and small operations don't wait for each other's threads."""

from __future__ import annotations

import mindspore as ms

ms.set_context(pynative_synchronize=True, deterministic="ON")
