"""Builds the fake accelerator's library with g++.

Objects and the library are kept under names that contain a hash of what they are made from, so a build
after a change compiles only what the change touches, and two processes never disturb each other.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils import cpp_extension

HERE = Path(__file__).resolve().parent
FOLDER_VARIABLE = "FAKE_ACCELERATOR_BUILD"
COMPILER_VARIABLE = "CXX"

FLAGS = ["-std=c++20", "-O1", "-fPIC", "-Wall", "-Wextra"]
LIBRARIES = ["-ltorch", "-ltorch_cpu", "-lc10"]


def folder() -> Path:
    """Where built files are kept."""
    given = os.environ.get(FOLDER_VARIABLE)
    return Path(given) if given else HERE.parents[2] / "target" / "fake-accelerator"


def compiler() -> str:
    return os.environ.get(COMPILER_VARIABLE, "g++")


def compile_command(source: Path, target: Path) -> list[str]:
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = [compiler(), *FLAGS, abi]
    for include in cpp_extension.include_paths():
        command += ["-isystem", include]
    return [*command, "-c", str(source), "-o", str(target)]


def link_command(objects: list[Path], target: Path) -> list[str]:
    command = [compiler(), "-shared", "-o", str(target), *map(str, objects)]
    for path in cpp_extension.library_paths():
        command += [f"-L{path}", f"-Wl,-rpath,{path}"]
    return [*command, *LIBRARIES]


def digest(*parts: bytes) -> str:
    sum_ = hashlib.sha256()
    for part in parts:
        sum_.update(len(part).to_bytes(8, "little"))
        sum_.update(part)
    return sum_.hexdigest()[:16]


def with_headers(source: Path) -> bytes:
    """A file, and what it includes of ours."""
    found: dict[Path, bytes] = {}
    todo = [source]
    while todo:
        path = todo.pop()
        if path not in found:
            found[path] = path.read_bytes()
            todo += [HERE / name for name in re.findall(r'#include "(.+)"', found[path].decode())]
    return b"".join(text for _, text in sorted(found.items()))


def run(command: list[str], target: Path) -> None:
    """Runs a command that makes a file, which appears only when it is complete."""
    with tempfile.NamedTemporaryFile(dir=target.parent, suffix=target.suffix, delete=False) as part:
        unfinished = Path(part.name)
    try:
        command = [str(unfinished) if word == str(target) else word for word in command]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
        if done.stderr:
            sys.stderr.write(done.stderr)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def build() -> Path:
    """The path of the library, which is built if it has to be."""
    into = folder()
    into.mkdir(parents=True, exist_ok=True)
    tools = " ".join([torch.__version__, compiler(), *FLAGS, *cpp_extension.include_paths()]).encode()
    sources = sorted(HERE.glob("*.cpp"))
    objects = [into / f"{source.stem}-{digest(tools, with_headers(source))}.o" for source in sources]
    library = into / f"libfake-{digest(*(path.name.encode() for path in objects))}.so"
    with open(into / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return library
        missing = [pair for pair in zip(sources, objects, strict=True) if not pair[1].exists()]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(lambda pair: run(compile_command(*pair), pair[1]), missing))
        run(link_command(objects, library), library)
    return library


if __name__ == "__main__":
    print(build())
