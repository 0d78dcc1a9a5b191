"""Every input of torch's operator database, forward and backward under swap: `scripts/opinfo-all`.

Writes what each operator gave as JSON, and prints a table of everything that is not simply "the same bits".
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import torch

from . import native
from .inputs import DTYPES, differentiable, operators, samples, short
from .runs import Verdict

EXAMPLES = 5
"""How many differences are told for each operator."""

REASONS = {
    "different": "other bits or another error than plain torch",
    "unsettled": "plain torch itself gives other bits in identical runs",
    "raises": "plain torch raises, and the same error comes under swap",
    "undeclared": "the database declares no backward for this dtype",
}


@dataclass
class Given:
    """What one operator gave."""

    name: str
    inputs: int = 0
    runs: Counter[str] = field(default_factory=Counter)
    away: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    undeclared: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, case: str, way: str, verdict: Verdict) -> None:
        """Counts one run."""
        kind = "raises" if verdict.kind == "same" and verdict.error is not None else verdict.kind
        self.runs[kind] += 1
        self.away[way] += verdict.away
        if kind != "same":
            examples = self.examples.setdefault(kind, [])
            if len(examples) < EXAMPLES:
                examples.append(f"{case}, {way}: {verdict.text or verdict.error}")


def judge(name: str) -> Given:
    """All inputs of one operator."""
    torch.set_num_threads(1)
    op = next(op for op in operators() if op.full_name == name)
    began, given = time.monotonic(), Given(name)
    declared = differentiable(op)
    given.undeclared = [short(dtype) for dtype in DTYPES if dtype not in declared]
    ways = native.Ways()
    for dtype in declared:
        for one in samples(op, dtype):
            given.inputs += 1
            for case, verdicts in native.judged(one, ways):
                for way, verdict in verdicts.items():
                    given.add(case.name, way, verdict)
    ways.close()
    given.seconds = time.monotonic() - began
    return given


def judge_all(names: list[str], jobs: int) -> list[Given]:
    """All operators, several at once."""
    found = []
    # Fresh processes: threads of torch don't survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures = {pool.submit(judge, name): name for name in names}
        for number, future in enumerate(as_completed(futures), 1):
            given = future.result()
            found.append(given)
            bad = given.runs["different"]
            print(
                f"{number}/{len(names)} {given.name}: {given.inputs} inputs, {bad} differ, {given.seconds:.1f} s",
                file=sys.stderr,
            )
    return sorted(found, key=lambda given: given.name)


def table(found: list[Given]) -> str:
    """A table of exceptions with their reasons, and totals."""
    lines = ["| what | operators | runs | reason |", "| --- | --- | --- | --- |"]
    for kind in ("different", "unsettled", "raises"):
        of = [given for given in found if given.runs[kind]]
        runs = sum(given.runs[kind] for given in of)
        lines.append(f"| {kind} | {len(of)} | {runs} | {REASONS[kind]} |")
    undeclared = [given for given in found if given.undeclared]
    pairs = sum(len(given.undeclared) for given in undeclared)
    lines.append(f"| undeclared | {len(undeclared)} | {pairs} dtypes | {REASONS['undeclared']} |")
    for kind in ("different", "unsettled", "raises"):
        for given in found:
            if given.runs[kind]:
                lines += ["", f"{kind}: {given.name}, {given.runs[kind]} runs"]
                lines += [f"  {text}" for text in given.examples[kind]]
    return "\n".join([*lines, "", totals(found)])


def totals(found: list[Given]) -> str:
    """One line about all of it."""
    tested = [given for given in found if given.inputs]
    runs = sum(given.runs.total() for given in found)
    same = sum(given.runs["same"] for given in found)
    away: Counter[str] = sum((given.away for given in found), Counter())
    moved = ", ".join(f"{count} {way}" for way, count in sorted(away.items()))
    inputs = sum(given.inputs for given in found)
    return f"{len(tested)} operators, {inputs} inputs, {runs} runs, {same} with the same bits; tensors away: {moved}"


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(prog="scripts/opinfo-all", description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write the results to")
    parser.add_argument("--only", default="*", help="pattern of operators, such as 'linalg.*'")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once")
    return parser.parse_args()


def main() -> int:
    """Status 1 if anything differs, 2 if there was nothing to test."""
    given = arguments()
    names = [op.full_name for op in operators() if fnmatch.fnmatchcase(op.full_name, given.only)]
    if not names:
        print(f"scripts/opinfo-all: no operator matches {given.only!r}", file=sys.stderr)
        return 2
    found = judge_all(names, given.jobs)
    if given.json is not None:
        report = {"torch": torch.__version__, "reasons": REASONS, "operators": [vars(one) for one in found]}
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    print(table(found))
    return int(any(one.runs["different"] for one in found))


if __name__ == "__main__":
    sys.exit(main())
