"""Writes synthetic checkpoints in the Hugging Face layout, whole or not at all, and keeps them in a cache."""

import hashlib
import json
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from safetensors.numpy import save_file

from kernels_numba.machine.cache import cache_root
from refengine.checkpoint.config import CONFIG, config_of
from refengine.checkpoint.files import INDEX, SINGLE
from refengine.checkpoint.progress import progress
from refengine.checkpoint.reader import Checkpoint, open_checkpoint
from refengine.checkpoint.values import VERSION, synthetic
from refengine.errors import UserError
from refengine.registry import ModelSpec, Tensor, check_spec

SHARD_BYTES = 2 << 30
ITEM_BYTES = {"BF16": 2, "F32": 4, "I64": 8}


def make_checkpoint(spec: ModelSpec, folder: str | Path, seed: int = 0, shard_bytes: int = SHARD_BYTES) -> Path:
    """Write a checkpoint with generated weights, the same bits for the same layout and seed on every platform.

    The folder appears complete or not at all. Tensors go into one file, or into shards of at most `shard_bytes` bytes
    of tensors (one tensor at least) and an index. Returns the folder.
    Raises UserError if the layout breaks a rule, or the folder exists or cannot be written.
    """
    folder = Path(folder)
    check_spec(spec)
    if folder.exists():
        raise UserError(f"{folder}: already exists; name another folder or remove it")
    try:
        _write_whole(spec, folder, seed, shard_bytes)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror or error}") from error
    return folder


def cached_checkpoint(spec: ModelSpec, seed: int = 0) -> Path:
    """Folder of the synthetic checkpoint of this layout and seed, made on first use.

    It lies under $REFENGINE_CACHE, or ~/.cache/refengine. Raises UserError if it cannot be written.
    """
    folder = cache_root() / "checkpoints" / f"{spec.name}-{_key(spec, seed)}"
    if folder.exists():
        return folder
    try:
        return make_checkpoint(spec, folder, seed)
    except UserError:
        if folder.exists():  # another process was faster
            return folder
        raise


def open_cached(spec: ModelSpec, seed: int = 0) -> Checkpoint:
    """The synthetic checkpoint of this layout and seed, opened; made on first use.

    Raises UserError as cached_checkpoint and open_checkpoint do; where the cached one is damaged, it says what to delete.
    """
    folder = cached_checkpoint(spec, seed)
    try:
        return open_checkpoint(folder, spec)
    except UserError as damage:
        raise UserError(f"{damage}; delete {folder} to have it made again") from damage


def _key(spec: ModelSpec, seed: int) -> str:
    layout = {key: part for key, part in asdict(spec).items() if part is not None}
    if not spec.mtp.layers:
        del layout["mtp"]
    if spec.gated_delta_net.gate == "silu":
        del layout["gated_delta_net"]["gate"]
    content = json.dumps([VERSION, seed, layout], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _write_whole(spec: ModelSpec, folder: Path, seed: int, shard_bytes: int) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    _check_room(spec, folder.parent)
    unfinished = folder.parent / f".{folder.name}.{uuid.uuid4().hex}"
    unfinished.mkdir()
    try:
        _write(spec, unfinished, seed, shard_bytes)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _check_room(spec: ModelSpec, folder: Path) -> None:
    """Refuse before the first byte what the disk has no room for."""
    needed = sum(tensor.size * ITEM_BYTES[tensor.dtype] for tensor in _tensors(spec))
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{folder}: {spec.name} takes {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free; "
            "name a larger disk with $REFENGINE_CACHE"
        )


def _write(spec: ModelSpec, folder: Path, seed: int, shard_bytes: int) -> None:
    shards = list(_shards(_tensors(spec), shard_bytes))
    names = [SINGLE] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(1, len(shards) + 1)]
    tensors = progress(_tensors(spec), f"making {spec.name}")
    for name, shard in zip(names, shards, strict=True):
        arrays = {tensor.name: synthetic(tensor, spec, seed) for tensor in islice(tensors, len(shard))}
        save_file(arrays, folder / name, metadata={"format": "pt"})
    _write_json(folder / CONFIG, config_of(spec))
    if len(shards) > 1:
        _write_json(folder / INDEX, _index(names, shards))


def _tensors(spec: ModelSpec) -> tuple[Tensor, ...]:
    """All that a checkpoint holds, the MTP head last."""
    return (*spec.tensors(), *spec.mtp_tensors())


def _shards(tensors: tuple[Tensor, ...], shard_bytes: int) -> Iterator[list[Tensor]]:
    shard: list[Tensor] = []
    used = 0
    for tensor in tensors:
        size = ITEM_BYTES[tensor.dtype] * tensor.size
        if shard and used + size > shard_bytes:
            yield shard
            shard, used = [], 0
        shard.append(tensor)
        used += size
    yield shard


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _index(names: list[str], shards: list[list[Tensor]]) -> dict[str, object]:
    weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    total = sum(ITEM_BYTES[tensor.dtype] * tensor.size for shard in shards for tensor in shard)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def _write_json(path: Path, data: dict[str, object]) -> None:
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
