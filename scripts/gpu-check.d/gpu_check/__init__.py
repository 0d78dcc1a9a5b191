"""The parts of `scripts/gpu-check`.

`main` unpacks the wheel and runs the stages, each by `child` in a process of its own. A stage is a function
`run(record, settings)` of the module that has its name; what it finds goes to a `Record`, which is on disk at
once, and `table` shows all records at the end. Only the children import torch.
"""
