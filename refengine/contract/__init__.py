"""The kernel contract: every kernel that can be launched, through five gates that prove that they can fail. Spec contract.

Read ``entry`` (what a kernel's entry says), ``workbench`` (guarded, poisoned buffers), ``gates`` (the questions), ``controls``
(planted faults that must come out red), ``limits`` (registers and bytes), then ``entries`` for the kernels themselves.
"""
