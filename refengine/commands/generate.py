"""``refengine generate``: read the request, run it, say on stderr what the reply took."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backends.base import Backend, Sizes, backend_class, backend_names
from kernels_numba.fp8 import KV_TYPES
from kernels_numba.machine import KernelError, SetupError
from refengine.checkpoint import Checkpoint, load_mtp, load_weights
from refengine.commands.inputs import check_pages, find_model, given_bytes, machine_gib
from refengine.commands.reply import Reply, generate
from refengine.commands.report import check_report, write_report
from refengine.device import Device, open_device
from refengine.errors import UserError
from refengine.model import cache_shape, check_dims, open_head, open_model
from refengine.names import known_name
from refengine.registry import ModelSpec
from refengine.serve.drafters import Drafter, JoinedDrafter, MtpDrafter, NgramDrafter
from refengine.serve.replies import NoToken
from refengine.serve.sampling import Sampling
from refengine.serve.session import Session
from refengine.text import Message, Text, open_chat_template, open_text
from refengine.verify.hashes import token_hash

PROMPT_ROWS = 256
"""Rows a prompt pass, at most."""
PAGE_SIZE = 256
"""Positions a page, where nobody asks for another number."""
DRAFTERS: dict[str, Drafter | None] = {
    "none": None,
    "ngram": NgramDrafter(),
    "mtp": MtpDrafter(),
    "both": JoinedDrafter((MtpDrafter(), NgramDrafter())),
}
"""Who drafts, by the value of --drafts."""
WINDOW_ROWS = 8
"""Rows of a decode pass with drafts, at most."""


@dataclass(frozen=True)
class Request:
    """A reply as the command line asks for it. page_size: None is PAGE_SIZE, where the backend lets one choose."""

    model: str
    prompt: str
    chat: bool
    system: str | None
    tokens: int
    sampling: Sampling
    backend: str
    page_size: int | None
    kv: str
    drafts: str
    device: str

    @property
    def drafter(self) -> Drafter | None:
        return DRAFTERS[self.drafts]

    @property
    def needs_head(self) -> bool:
        """Whether the drafter looks at the MTP head's guesses."""
        return self.drafter is not None and self.drafter.guesses > 0


def run(request: Request, json: Path | None) -> int:
    """Generate a reply; the exit status: 0, or 1 where a kernel was stopped. Raises UserError for a request that makes no
    sense."""
    check(request)
    check_report(json)
    device = open_device(request.device)
    spec, folder, checkpoint = find_model(request.model)
    check_dims(spec)
    check_pages("--page-size", [request.page_size or PAGE_SIZE], spec)
    check_drafts(request, spec)
    text = open_text(spec, folder)
    prompt = prompt_ids(request, text, folder)
    backend = build(request, spec, room(request, len(prompt), spec), device)
    session = start(request, spec, checkpoint(), backend, device, prompt)
    try:
        reply = generate(session, request.tokens, text.stream())
    except SetupError:
        raise
    except (KernelError, NoToken) as stopped:
        print(f"refengine: {stopped}", file=sys.stderr)
        return 1
    print(f"refengine: {reply.summary}", file=sys.stderr)
    if json is not None:
        write_report(json, report(request, reply, device))
    return 0


# --- The request ----------------------------------------------------------------------------------------------------


def check(request: Request) -> None:
    """Refuse what can be refused before anything is read."""
    if request.tokens < 1:
        raise UserError(f"--tokens {request.tokens}: at least 1")
    if request.system is not None and not request.chat:
        raise UserError("--system: is part of a conversation; add --chat")
    check_sampling(request.sampling)
    known_name("--kv", request.kv, KV_TYPES)
    known_name("--drafts", request.drafts, tuple(DRAFTERS))
    check_page_size(known_name("--backend", request.backend, backend_names()), request.page_size)


def check_sampling(sampling: Sampling) -> None:
    """Refuse values out of range, and limits of a draw where nothing is drawn."""
    sampling.check(flags=True)
    for flag, value, off in (("--top-k", sampling.top_k, 0), ("--top-p", sampling.top_p, 1)):
        if sampling.temperature == 0 and value != off:
            raise UserError(f"{flag} {value}: greedy replies draw nothing; add --temperature above 0")


def check_drafts(request: Request, spec: ModelSpec) -> None:
    """Refuse drafts that branch where the model's cannot."""
    if isinstance(request.drafter, JoinedDrafter) and not spec.drafts_trees:
        raise UserError(f"--drafts {request.drafts}: branches; {spec.name} drafts chains: use ngram or mtp")


def check_page_size(backend: str, page_size: int | None) -> None:
    """Refuse a page size of less than 1, or one that the backend would not heed."""
    if page_size is None:
        return
    if page_size < 1:
        raise UserError(f"--page-size {page_size}: at least 1")
    kind = backend_class(backend)
    if not kind.paged:
        raise UserError(f"--page-size {page_size}: {backend} has no pages; add --backend paged")
    if kind.layout.page not in (None, page_size):
        raise UserError(f"--page-size {page_size}: {backend} has pages of {kind.layout.page}; add --backend paged")


def prompt_ids(request: Request, text: Text, folder: Path | None) -> list[int]:
    """The token ids of the prompt, in its conversation with --chat."""
    prompt = given_text("--prompt", request.prompt)
    if request.chat:
        prompt = conversation(request, prompt, folder)
    try:
        ids = text.encode(prompt, templated=request.chat)
    except UnicodeError as problem:
        raise not_utf8("--prompt") from problem
    if not ids:
        raise UserError("--prompt: makes no token; give at least one character")
    return ids


def given_text(flag: str, value: str) -> str:
    """The text of a flag; bytes that are no UTF-8 are surrogate escapes."""
    return given_bytes(flag, value).decode("utf-8", "surrogateescape")


def system_text(value: str) -> str:
    """The text of --system, which the template takes with the prompt's."""
    text = given_text("--system", value)
    try:
        text.encode()
    except UnicodeError as problem:
        raise not_utf8("--system") from problem
    return text


def not_utf8(flag: str) -> UserError:
    """The refusal of a text that a tokenizer cannot read."""
    return UserError(f"{flag}: is not UTF-8, which this model's tokenizer reads; convert it")


def conversation(request: Request, prompt: str, folder: Path | None) -> str:
    """The prompt as the user's turn, behind --system."""
    turns: list[Message] = [{"role": "user", "content": prompt}]
    if request.system is not None:
        turns.insert(0, {"role": "system", "content": system_text(request.system)})
    return open_chat_template(folder).render(turns)


def room(request: Request, prompt: int, spec: ModelSpec) -> int:
    """Positions of the stream. Raises UserError when the model has fewer."""
    context = prompt + request.tokens
    if context > spec.max_positions:
        raise UserError(
            f"--tokens {request.tokens}: makes {context} positions with the prompt's {prompt}, {spec.name} has "
            f"{spec.max_positions}; ask for fewer"
        )
    return context


def build(request: Request, spec: ModelSpec, context: int, device: Device) -> Backend:
    """The backend. Raises UserError when it takes more memory than there is."""
    rows = 1 if request.drafter is None else WINDOW_ROWS
    sizes = Sizes(context, page_size=request.page_size or PAGE_SIZE, window_rows=rows, kv=request.kv)
    kind, shape = backend_class(request.backend), cache_shape(spec, mtp=request.needs_head)
    gib = kind.arena_bytes(shape, sizes) / 2**30
    large = request.page_size is not None and request.page_size > context
    flag = f"--page-size {request.page_size}" if large else f"--tokens {request.tokens}"
    full = UserError(f"{flag}: {request.backend} takes {gib:.4g} GiB, more than there is; ask for fewer")
    if device.name == "cpu" and gib > machine_gib():
        raise full
    try:
        return kind(shape, sizes, device.xp)
    except MemoryError as problem:
        raise full from problem


def start(
    request: Request, spec: ModelSpec, checkpoint: Checkpoint, backend: Backend, device: Device, prompt: list[int]
) -> Session:
    """The model, with its MTP head where drafts are the head's, and the prompt that it will read.

    Raises UserError where the checkpoint has no head.
    """
    if request.needs_head:
        checkpoint.check_mtp()
    model = open_model(spec, load_weights(checkpoint, spec), device, backend.sizes.context)
    head = open_head(spec, load_mtp(checkpoint, spec), model, device) if request.needs_head else None
    stop = frozenset(spec.tokens.end)
    return Session(model, backend, device, [prompt], PROMPT_ROWS, [request.sampling], [request.drafter], head, stop)


# --- The report -----------------------------------------------------------------------------------------------------


def report(request: Request, reply: Reply, device: Device) -> dict[str, Any]:
    """A reply as JSON."""
    figures = (
        ("prompt_tokens", reply.prompt_tokens, "tokens"),
        ("tokens", len(reply.tokens), "tokens"),
        ("token_hash", token_hash(reply.tokens), "sha256/16"),
        ("drafts_accepted", reply.accepted, "drafts"),
    )
    claims = [{"name": f"generate/{name}", "value": value, "unit": unit} for name, value, unit in figures]
    return {"claims": claims, "request": asdict(request), "device": device.title, "reply": asdict(reply)}
