"""Merging on the CPU at the speed of memory: numba kernels that equal the torch operators to the last bit.

`columns` says what they work on, `backend` whether they can be used. The kernels themselves are `compiled`, which
merges, and `passes`, which counts and adds up before; `formats` and `draws` are what both are made of. Which method
runs on which kernel is said in `mpfs.merge.operators.fast`.
"""
