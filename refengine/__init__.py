"""refengine: a reference engine for paged attention.

It runs models of the Qwen 3.5 family through interchangeable cache backends, with or without a GPU, and proves that
they give the same bits. Parts: `registry` (model layouts), `checkpoint` (weights), `model` (forward passes) and `cli`.
"""

__version__ = "0.1.0"
