"""``refengine models``: the registry as a table, one entry in full, a checkpoint held against an entry."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from refengine.checkpoint import open_checkpoint
from refengine.checkpoint.config import CONFIG, config_of, spec_beside
from refengine.checkpoint.files import Stored, list_tensors
from refengine.commands.report import check_report, show, write_report
from refengine.errors import UserError
from refengine.names import known_name
from refengine.registry import ModelSpec, Tensor, available, load_model
from refengine.registry.family import load_family


def run(name: str | None, check: Path | None, page_size: int, json: Path | None) -> int:
    """Show the registry or one entry, or check a checkpoint; the exit status. Raises UserError for a bad call."""
    if page_size < 1:
        raise UserError(f"--page-size {page_size}: at least 1")
    if check is not None and name is None:
        raise UserError(f"--check {check}: name the entry too: refengine models NAME --check {check}")
    check_report(json)
    specs = [load_model(n) for n in (available() if name is None else [entry_name(name)])]
    if check is not None:
        return checked(check, specs[0])
    show(overview(specs, page_size) if name is None else in_full(specs[0], page_size))
    if json is not None:
        entries = [entry(s, page_size) for s in specs]
        figures = [claim for one in entries for claim in claims(one)]
        write_report(json, {"claims": figures, "page_size": page_size, "models": entries})
    return 0


def entry_name(name: str) -> str:
    """A registry name, or the path of a YAML file of the same form."""
    return name if name.endswith((".yaml", ".yml")) else known_name("NAME", name, available())


# --- What is shown --------------------------------------------------------------------------------------------------


def overview(specs: list[ModelSpec], page_size: int) -> Table:
    """A row a model."""
    shown = Table("model", "layers", "full attention", "hidden", "heads / KV", "head dim", "KV bytes a token",
                  f"KV bytes a page of {page_size}", "state bytes a stream")  # fmt: skip
    for column in shown.columns[1:]:
        column.justify = "right"
    for s in specs:
        a = s.attention
        sizes = (s.kv_bytes_per_token(), s.bytes_a_page(page_size), s.state_bytes)
        shown.add_row(s.name, str(s.layers), str(len(s.attention_layers)), str(s.hidden), f"{a.heads} / {a.kv_heads}",
                      str(a.head_dim), *(f"{n:,}" for n in sizes))  # fmt: skip
    return shown


def in_full(spec: ModelSpec, page_size: int) -> Table:
    """Every field of an entry and what follows from it."""
    shown = Table("key", "value", title=spec.name, title_justify="left")
    for key, value in flattened(asdict(spec) | {"layer_types": layer_letters(spec)}).items():
        if value is not None:
            shown.add_row(key, str(value).lower() if isinstance(value, bool) else str(value))
    shown.add_section()
    for key, value in derived(spec, page_size).items():
        shown.add_row(key.replace("_", " "), f"{value:,}")
    return shown


def layer_letters(spec: ModelSpec) -> str:
    """The layers in order: f full attention, l linear attention."""
    return "".join(kind[0] for kind in spec.layer_types)


def derived(spec: ModelSpec, page_size: int) -> dict[str, int]:
    """What follows from an entry: sizes in bytes, counts."""
    tensors = spec.tensors()
    return {
        "kv_bytes_a_token": spec.kv_bytes_per_token(),
        f"kv_bytes_a_page_of_{page_size}": spec.bytes_a_page(page_size),
        "kv_bytes_a_full_context": spec.kv_bytes_per_token() * spec.max_positions,
        "state_bytes_a_stream": spec.state_bytes,
        "tensors": len(tensors),
        "parameters": sum(t.size for t in tensors),
    }


def entry(spec: ModelSpec, page_size: int) -> dict[str, Any]:
    """A model for the JSON report."""
    return asdict(spec) | {"derived": derived(spec, page_size)}


def claims(model: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Figures that can be quoted."""
    units = {"tensors": "tensors", "parameters": "parameters"}
    return [
        {"name": f"models/{model['name']}/{key}", "value": value, "unit": units.get(key, "bytes")}
        for key, value in model["derived"].items()
    ]


def flattened(data: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """A nested mapping by dotted keys."""
    out: dict[str, Any] = {}
    for key, value in data.items():
        out |= flattened(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return out


# --- A checkpoint against an entry ----------------------------------------------------------------------------------


def checked(folder: Path, spec: ModelSpec) -> int:
    """Hold a checkpoint against an entry: what disagrees, a line each on stderr. Returns the exit status."""
    found = list(findings(folder, spec))
    for line in found:
        print(f"refengine: --check {folder}: {line}", file=sys.stderr)
    if found:
        return 2
    head = len(held_head(spec, list_tensors(folder)))
    mtp = f"{head} of its MTP head" if head else "no MTP head"
    print(f"{folder} agrees with {spec.name}: {CONFIG} and {len(spec.tensors())} tensors, {mtp}")
    return 0


def findings(folder: Path, spec: ModelSpec) -> Iterator[str]:
    """What is wrong with a checkpoint: keys of its config, else tensors, else what the loader alone looks at."""
    try:
        first = list(config_findings(folder, spec)) or list(tensor_findings(folder, spec))
        yield from first
        if not first:
            open_checkpoint(folder, spec)
    except UserError as problem:
        yield str(problem)


def config_findings(folder: Path, spec: ModelSpec) -> Iterator[str]:
    """Each key of config.json that says something else than the entry."""
    have, want = (flattened(config_of(s)) for s in (spec_beside(folder, spec), spec))
    for key in want:
        if have[key] != want[key] and key != "eos_token_id":
            yield f"{CONFIG}: {key}: {have[key]} where {spec.name} has {want[key]}"


def tensor_findings(folder: Path, spec: ModelSpec) -> Iterator[str]:
    """Each tensor that is missing or has another shape or type than the entry's."""
    stored = list_tensors(folder)
    expected = [spec.tensors(prefix) for prefix in load_family(spec.family).prefixes]
    model = max(expected, key=lambda tensors: sum(t.name in stored for t in tensors))
    for tensor in (*model, *held_head(spec, stored)):
        if (found := stored.get(tensor.name)) is None:
            yield f"{tensor.name}: missing; {spec.name} needs it"
        elif found.shape != tensor.shape:
            yield f"{tensor.name}: shape {list(found.shape)} where {spec.name} has {list(tensor.shape)}"
        elif found.dtype not in tensor.dtypes:
            yield f"{tensor.name}: type {found.dtype} where {' or '.join(tensor.dtypes)} is needed"


def held_head(spec: ModelSpec, stored: Mapping[str, Stored]) -> tuple[Tensor, ...]:
    """The tensors of the MTP head, which a checkpoint has whole or not at all; none where it has not one of them."""
    head = spec.mtp_tensors()
    return head if any(tensor.name in stored for tensor in head) else ()
