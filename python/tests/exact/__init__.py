"""Exactness: a training step under swap gives the bits of plain torch, compared byte for byte."""
