"""Merging on the CPU at the speed of memory: numba kernels that equal the torch operators to the last bit.

`columns` says what they work on, `backend` whether they can be used, `compiled` is the kernels themselves. Which
method runs on which kernel is said in `mpfs.merge.operators.fast`.
"""
