"""Budgets: bytes in use against the budget, and steps under the plan against plans of one means alone.

For each budget three sessions on copies of one model take turns step by step: the plan, the best that swaps only, and
the best that recomputes only.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from managed import managed

import ebbtide.torch
from bench.model import GPT, Size
from bench.worker import digest
from ebbtide import _native
from ebbtide._plan import RECORDED
from ebbtide.errors import NoRoomError
from ebbtide.torch import _plan

Figures = dict[str, Any]
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def step(model: GPT, session: ebbtide.torch.Session | None, number: int) -> tuple[float, str]:
    """Seconds and the bits of all gradients."""
    size = (4, model.place.num_embeddings)
    random = torch.Generator().manual_seed(number)
    tokens, targets = (torch.randint(model.embed.num_embeddings, size, generator=random) for _ in range(2))
    began = time.perf_counter()
    if session is None:
        model(tokens, targets).backward()
    else:
        with session.step():
            loss = model(tokens, targets)
        loss.backward()
    seconds = time.perf_counter() - began
    bits = digest(model)
    model.zero_grad(set_to_none=True)
    return seconds, bits


def made(size: Size) -> GPT:
    """The same model each time."""
    torch.manual_seed(0)
    return GPT(size)


def record(size: Size) -> _native.Trace:
    """What a session has recorded of the model."""
    model = made(size)
    with ebbtide.torch.session(model, memory="100%") as session:
        for number in range(RECORDED + 1):
            step(model, session, number)
        assert session._planner is not None and session._planner.trace is not None
        return session._planner.trace


def one(size: Size, trace: _native.Trace, budget: int, rounds: int) -> Figures:
    """All plans for a budget, and plain training, side by side."""
    sessions: dict[str, tuple[GPT, ebbtide.torch.Session | None]] = {"plain": (made(size), None)}
    plans: dict[str, _native.Plan] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way, only in (("auto", None), ("swap", "swap"), ("recompute", "recompute")):
            try:
                plans[way] = _native.Plan.make(trace, budget, only)
            except NoRoomError:
                continue
            file = Path(folder) / f"{way}.json"
            file.write_text(plans[way].json())
            model = made(size)
            sessions[way] = (model, ebbtide.torch.session(model, plan=file))
    seconds: dict[str, list[float]] = {way: [] for way in sessions}
    same = True
    peak = 0
    for number in range(RECORDED + rounds):
        bits = set()
        for way, (model, session) in sessions.items():
            took, found = step(model, session, number)
            bits.add(found)
            if number >= RECORDED:
                seconds[way].append(took)
        same = same and len(bits) == 1
    model, session = sessions["auto"]
    assert session is not None
    with managed(session, model) as meter:
        step(model, session, 0)
        peak = meter.peak + _plan.static_bytes(model)
    for _, session in sessions.values():
        if session is not None:
            session.close()
    print(".", end="", file=sys.stderr, flush=True)
    others = [way for way in ("swap", "recompute") if way in seconds]
    ratios = [min(seconds[way][at] for way in others) for at in range(rounds)]
    return {
        "budget_bytes": budget,
        "measured_bytes": peak,
        "predicted_bytes": plans["auto"].predicted_peak_bytes,
        "identical": same,
        "seconds": {way: statistics.median(times) for way, times in seconds.items()},
        "predicted_ms": {way: plan.predicted_step_ms for way, plan in plans.items()},
        "to_better_pure": statistics.median(a / b for a, b in zip(seconds["auto"], ratios, strict=True)),
    }


def run(size: Size, rounds: int = 3) -> Figures:
    """Five budgets from the least to what keeping everything takes."""
    trace = record(size)
    base, least, most, _ = trace.range()
    budgets = [least + int((most - least) * share) for share in SHARES]
    found = [one(size, trace, budget, rounds) for budget in budgets]
    print(file=sys.stderr)
    return {
        "static_bytes": base,
        "budgets": found,
        "over": sum(each["measured_bytes"] > each["budget_bytes"] for each in found),
        "identical": all(each["identical"] for each in found),
        "worst_to_better_pure": max(each["to_better_pure"] for each in found),
    }
