"""Which file holds which tensor: one model.safetensors, or shards and their index, checked before anything is read."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from refengine.checkpoint.strict_json import load_json, parse_json
from refengine.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Stored:
    """A tensor as its file describes it; `dtype` is the safetensors name (BF16, F32, ...)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def list_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint by name, from the index if there is one; files it does not name are ignored.

    Raises UserError naming the file, shard or tensor that is missing, damaged or contradicts the index.
    """
    if (folder / INDEX).exists():
        return _indexed(folder)
    if not (folder / SINGLE).exists():
        raise UserError(f"{folder}: holds neither {SINGLE} nor {INDEX}")
    return read_header(folder / SINGLE)


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one safetensors file; their ranges must fill the file exactly and no name stands twice.

    Raises UserError naming the file.
    """
    try:
        with safe_open(path, framework="numpy"):
            pass
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = parse_json(file.read(size), path.name)
    except SafetensorError as error:
        raise UserError(f"{path.name}: damaged or cut short: {' '.join(str(error).split())}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    header.pop("__metadata__", None)
    return {name: Stored(path, entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}


def _indexed(folder: Path) -> dict[str, Stored]:
    shard_of = _weight_map(load_json(folder / INDEX))
    shards = {shard: _shard(folder, shard) for shard in sorted(set(shard_of.values()))}
    for name, shard in shard_of.items():
        if name not in shards[shard]:
            raise UserError(f"{INDEX}: {name}: listed in {shard}, which has no such tensor")
    for shard, tensors in shards.items():
        for name in tensors:
            if shard_of.get(name) != shard:
                raise UserError(f"{shard}: {name}: not listed for this shard in {INDEX}")
    return {name: shards[shard][name] for name, shard in shard_of.items()}


def _weight_map(index: Mapping[str, Any]) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{INDEX}: weight_map: must be an object from tensor to shard")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise UserError(f"{INDEX}: {name}: shard {shard!r} is not the name of a .safetensors file")
    return weight_map


def _shard(folder: Path, shard: str) -> dict[str, Stored]:
    if not (folder / shard).exists():
        raise UserError(f"{shard}: missing, though {INDEX} lists it")
    return read_header(folder / shard)
