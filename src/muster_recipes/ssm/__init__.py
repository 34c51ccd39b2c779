"""Guess & Check against gradient descent on diagonal state-space models, over many widths.

Nothing is imported here: `config`, `data_file`, `plan` and `streams` need the standard library
only, `problem` and `theory` numpy, and torch is loaded where something is trained or drawn on a
GPU.
"""
