"""Attention kernels in numba.cuda: they know arrays and addresses, and no model.

Each kernel owns the order of its sums. ``machine`` is what they run on: a GPU, or the lock-step CPU machine, with the
same bits. Imports run one way: refengine, backends, kernels_numba.
"""
