"""The figures of the PyTorch front end; run by `scripts/bench-torch`."""
