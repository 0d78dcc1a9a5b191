"""Known mistakes in the Python layer are found.

A test that has never failed proves little. `planted.txt` changes a few lines each, and names the tests that have
to find it. The mistake is planted into a copy of the package that is being tested.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import ebbtide

TESTS = Path(__file__).resolve().parent
PACKAGE = Path(ebbtide.__file__).resolve().parent
# Importing torch takes longer than most of the tests, so all runs are children of one process that has done so.
SERVER = """
import os, sys
import pytest, torch, torch._dynamo
torch.set_num_threads(1)
print("ready", flush=True)
for line in sys.stdin:
    folder, *arguments = line.rstrip("\\n").split("\\t")
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        log = os.open("log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        for number, to in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
            os.dup2(to, number)
        sys.path[0] = folder
        status = pytest.main(arguments)
        sys.stdout.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclass
class Mistake:
    """One of the list."""

    name: str
    tests: list[str] = field(default_factory=list)
    file: str = ""
    places: list[tuple[list[str], list[str]]] = field(default_factory=list)


def mistakes(text: str) -> Iterator[Mistake]:
    for part in ("\n" + text).split("\n== ")[1:]:
        name, *lines = part.splitlines()
        mistake = Mistake(name)
        for line in lines:
            word, _, rest = line.partition(" ")
            if word == "by":
                mistake.tests = rest.split()
            elif word == "in":
                mistake.file = rest
            elif word == "-":
                if not mistake.places or mistake.places[-1][1]:
                    mistake.places.append(([], []))
                mistake.places[-1][0].append(rest.strip())
            elif word == "+":
                mistake.places[-1][1].append(rest)
            else:
                assert word in ("", "#"), f"{name}: what is `{line}`?"
        yield mistake


def planted(text: str, before: list[str], after: list[str]) -> str:
    """The text with other lines in one place."""
    lines = text.splitlines()
    bare, count = [line.strip() for line in lines], len(before)
    found = [number for number in range(len(lines)) if bare[number : number + count] == before]
    assert len(found) == 1, f"no longer matches: {before} is there {len(found)} times"
    indent = lines[found[0]].removesuffix(bare[found[0]])
    lines[found[0] : found[0] + count] = [indent + line for line in after]
    return "\n".join([*lines, ""])


def located(test: str) -> str:
    """A test as pytest names it."""
    if "::" in test:
        return str(TESTS / test)
    start = f"\ndef {test.partition('[')[0]}("
    found = [file for file in TESTS.rglob("test_*.py") if start in file.read_text()]
    assert len(found) == 1, f"{test} is in {len(found)} files"
    return f"{found[0]}::{test}"


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


MISTAKES = list(mistakes((TESTS / "planted.txt").read_text()))


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_planted_mistake_is_found(mistake: Mistake, server: subprocess.Popen[str], tmp_path: Path) -> None:
    copy = tmp_path / "ebbtide"
    shutil.copytree(PACKAGE, copy, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
    file = copy / "torch" / mistake.file
    text = file.read_text()
    for before, after in mistake.places:
        text = planted(text, before, after)
    file.unlink()  # a link so far
    file.write_text(text)
    # The project's settings have one for the cache, which is off here. What hangs is found, too.
    settings = f"-c {os.devnull} -p no:cacheprovider -x -q --timeout=60 --timeout-method=thread --basetemp=tmp"
    assert server.stdin is not None
    assert server.stdout is not None
    words = [tmp_path, *settings.split(), *map(located, mistake.tests)]
    print(*words, sep="\t", file=server.stdin, flush=True)
    status = server.stdout.readline().strip()
    log = (tmp_path / "log").read_text()
    assert status == "1", f"the tests ended with status {status}, not with a failure:\n{log}"
