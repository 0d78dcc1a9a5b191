"""Runs one stage: `python -m gpu_check.child STAGE MODULE SETTINGS [IMPORT]`."""

from __future__ import annotations

import importlib
import sys
import traceback

from gpu_check.settings import Record, Settings, one_line


def main() -> None:
    """Whatever goes wrong is in the record, and the traceback on stderr."""
    name, module, text, *first = sys.argv[1:]
    settings = Settings.from_json(text)
    record = Record(settings.out / f"{name}.json")
    try:
        for back_end in first:
            importlib.import_module(back_end)
        if settings.cpu:
            _one_thread()
        importlib.import_module(f"gpu_check.{module}").run(record, settings)
    except Exception as error:
        traceback.print_exc()
        record.missing(f"failed: {one_line(error)}")
    record.put(ended=True)


def _one_thread() -> None:
    """Models this small take longer with more threads."""
    import torch

    torch.set_num_threads(1)


if __name__ == "__main__":
    main()
