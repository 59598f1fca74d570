"""Forward passes: layer by layer over a backend, which owns all that a layer remembers."""

from refengine.model.dims import check_dims
from refengine.model.mtp import MtpHead
from refengine.model.qwen3_5 import Qwen35, cache_shape

__all__ = ["MtpHead", "Qwen35", "cache_shape", "check_dims"]
