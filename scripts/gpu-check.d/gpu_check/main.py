"""Runs the stages one after the other, each in a process of its own, and prints the table."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpu_check import table
from gpu_check.settings import SMALL, Record, Settings, Size, Stage, read, stages

ALL = 290.0  # seconds for everything; a stage gets what is left if that is less than its own limit
TOLD = 4.0  # how long before it is stopped a stage should be ready
PARTS = Path(__file__).resolve().parents[1]


def main() -> int:
    """The exit status: 1 if a result is wrong, 0 if not, also when something is missing."""
    began = time.time()
    args = _arguments()
    if args.table:
        print(table.table(args.table))
        return _status(args.table)
    out = args.out or Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="gpu-check-"))
    out.mkdir(parents=True, exist_ok=True)
    _say(f"results go to {out}")
    with tempfile.TemporaryDirectory(prefix="gpu-check-wheel-") as folder:
        _unpack(args.wheel or find_wheel(), Path(folder))
        with _environment(Path(folder)):
            _run_all(args, out, began)
    print(table.table(out))
    return _status(out)


def _status(out: Path) -> int:
    return 1 if any(record.get("wrong") for record in table.records(out).values()) else 0


def _say(text: str) -> None:
    print(f"gpu-check: {text}", file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu-check",
        description="Checks ebbtide on this machine's accelerator: exactness, time, memory. Under five minutes. "
        "What can't be run is named, and the rest still runs; the exit status is 1 only if a result is wrong.",
    )
    parser.add_argument(
        "--out", type=Path, help="folder for the results, one JSON a stage (default: $OUT, or a new one)"
    )
    parser.add_argument("--wheel", type=Path, help="the wheel (default: beside scripts/, or in target/wheels)")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the check itself")
    parser.add_argument("--cpu-small", action="store_true", help="the same on the CPU, which swaps to a file")
    parser.add_argument(
        "--patience",
        type=float,
        default=1.0,
        metavar="X",
        help="time limits are X times as long (default 1: under 5 min)",
    )
    parser.add_argument("--import", dest="back_end", metavar="MODULE", help="what each stage imports first: a back end")
    parser.add_argument("--table", type=Path, metavar="DIR", help="only print the table of results that are there")
    return parser.parse_args()


# ---- the wheel


def find_wheel() -> Path | None:
    """The newest wheel beside the folder of the scripts, as in a pack, or where `scripts/wheel` puts it."""
    root = PARTS.parents[1]
    target = Path(os.environ.get("CARGO_TARGET_DIR") or root / "target")
    found = [*root.glob("ebbtide-*.whl"), *(target / "wheels").glob("ebbtide-*.whl")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _unpack(wheel: Path | None, folder: Path) -> None:
    """A wheel of one package needs no more to be imported. Without one, the stages say that it is missing."""
    if wheel is None:
        _say("no wheel found; --wheel names one")
        return
    try:
        zipfile.ZipFile(wheel).extractall(folder)
    except (OSError, zipfile.BadZipFile) as error:
        _say(f"the wheel {wheel} can't be unpacked: {error}")


@contextmanager
def _environment(package: Path) -> Iterator[None]:
    """What the children import from; the wheel's ebbtide comes before any that is installed."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(package), str(PARTS), before]))
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


# ---- the stages


def _run_all(args: argparse.Namespace, out: Path, began: float) -> None:
    size = SMALL if args.small or args.cpu_small else Size()
    for stage in stages():
        (out / f"{stage.name}.json").unlink(missing_ok=True)
    for stage in stages():
        machine = read(out / "machine.json")
        if stage.module != "machine" and machine.get("ended") and "device" not in machine:
            Record(out / f"{stage.name}.json").put(skipped=True)  # `machine` says why
            continue
        begin = time.time()
        limit = min(stage.limit * args.patience, began + ALL * args.patience - begin)
        settings = Settings(size, args.cpu_small, out, stage.mode, begin + limit - TOLD)
        ended = _run(stage, settings, limit, args.back_end)
        _say(f"{stage.name}: {ended} after {time.time() - begin:.1f} s")


def _run(stage: Stage, settings: Settings, limit: float, back_end: str | None) -> str:
    """Runs one stage; how it ended. What it left is on disk, whatever happened to it."""
    command = [sys.executable, "-m", "gpu_check.child", stage.name, stage.module, settings.to_json()]
    command += [back_end] if back_end else []
    # In a group of its own, so that a stage that is stopped leaves no process behind.
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    try:
        output, stopped = child.communicate(timeout=max(1.0, limit))[0], False
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        output, stopped = child.communicate()[0], True
    except BaseException:
        os.killpg(child.pid, signal.SIGKILL)
        raise
    return _note(settings.out / f"{stage.name}.json", child.returncode, output, f"{limit:.0f} s" if stopped else "")


def _note(path: Path, status: int, output: str, stopped: str) -> str:
    """Adds to a record how its process ended."""
    values = read(path)
    record = Record(path)
    record.put(**{"missing": [], "wrong": [], **values}, exit_status=status, output=output[-4000:])
    if stopped:
        record.missing(f"stopped at its time limit of {stopped}; what it had is here")
        return "stopped"
    if status == 0:
        return "ended"
    if status == -signal.SIGKILL:  # the system does so when memory is short
        record.missing("was killed by the system")
    else:
        record.wrong(f"ended with status {status}")
    return f"failed with status {status}"
