"""``refengine generate`` streams the same text whatever the cache, draws by the seed alone, and refuses in one line."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from small_tokenizer import make_tokenizer, with_beginning, write_tokenizer

from backends.base import Backend, Sizes, backend_class
from kernels_numba.machine import KernelError
from refengine import cli
from refengine.checkpoint import load_weights, make_checkpoint, spec_of_folder
from refengine.commands import generate
from refengine.commands import reply as output
from refengine.commands.inputs import find_model
from refengine.device import open_device
from refengine.model import Qwen35, cache_shape
from refengine.registry import load_model
from refengine.registry.parts import Mtp
from refengine.serve.forward import Forward
from refengine.serve.session import Session
from refengine.verify.hashes import token_hash
from refengine.verify.launches import one_of_each_kind
from refengine.verify.predictable import predictable

PROMPT = "A page table says where each page of a stream lies. "
HOT = ("--temperature", "5")
"""Draws among many tokens."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A checkpoint folder of two layers whose text is bytes."""
    spec = one_of_each_kind(load_model("qwen3.5-tiny"))
    return make_checkpoint(spec, tmp_path_factory.mktemp("checkpoints") / "plain")


@pytest.fixture
def folder(plain, tmp_path):
    """The same checkpoint in a folder of its own, to put files beside it."""
    here = tmp_path / "checkpoint"
    here.mkdir()
    for file in plain.iterdir():
        (here / file.name).symlink_to(file)
    return here


@pytest.fixture
def call(monkeypatch, capsys):
    """Call the command: (exit status, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["refengine", "generate", *map(str, arguments), "--device", "cpu"])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return left.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def reply(call, tmp_path):
    """Generate, and return what the report says of the reply."""

    def run(model, *arguments, prompt=PROMPT, tokens=8):
        path = tmp_path / "report.json"
        status, out, err = call(model, "--prompt", prompt, "--tokens", tokens, "--json", path, *arguments)
        assert status == 0, err
        said = json.loads(path.read_text())["reply"]
        assert out == said["text"] + "\n"
        return said

    return run


# --- The reply ----------------------------------------------------------------------------------------------------------


def test_stdout_is_the_text_and_stderr_one_line(call, plain, tmp_path):
    report = tmp_path / "report.json"
    status, out, err = call(plain, "--prompt", PROMPT, "--tokens", 5, "--json", report)
    said = json.loads(report.read_text())
    tokens = said["reply"]["tokens"]
    assert status == 0 and re.fullmatch(r"refengine: 52 prompt tokens, 5 tokens in \d+\.\d s, --tokens reached\n", err)
    assert out == bytes(t for t in tokens if t < 256).decode("utf-8", "replace") + "\n"
    claims = {c["name"]: c["value"] for c in said["claims"]}
    figures = {"prompt_tokens": 52, "tokens": 5, "token_hash": token_hash(tokens), "drafts_accepted": 0}
    assert claims == {f"generate/{name}": value for name, value in figures.items()}


def test_greedy_tokens_are_those_of_compare(plain, reply):
    """The loop that the equalities are proved of."""
    spec, _, checkpoint = find_model(str(plain))
    device = open_device("cpu")
    backend = backend_class("window")(cache_shape(spec), Sizes(100), device.xp)
    model = Qwen35(spec, load_weights(checkpoint(), spec), device, 100)
    session = Session(model, backend, device, [list(PROMPT.encode())], 20)
    assert len(list(session.run(8))) == 3 + 7
    assert reply(plain)["tokens"] == session.replies[0]


CACHES = [
    ("--backend", "window"),
    ("--backend", "paged", "--page-size", "16"),
    ("--backend", "paged"),
    ("--backend", "paged-p256"),
    ("--backend", "mixed"),
]


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("sampled", [(), HOT], ids=["greedy", "drawn"])
def test_every_cache_gives_the_same_text(plain, reply, kv, sampled):
    replies = [reply(plain, *cache, "--kv", kv, *sampled)["tokens"] for cache in CACHES]
    assert all(tokens == replies[0] for tokens in replies) and len(set(replies[0])) > 2


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ((), Sizes(53)),
        (("--kv", "fp8"), Sizes(53, kv="fp8")),
        (("--page-size", "16"), Sizes(53, page_size=16)),
        (("--drafts", "ngram"), Sizes(53, window_rows=generate.WINDOW_ROWS)),
    ],
    ids=["as it is", "fp8", "pages", "drafts"],
)
def test_what_is_asked_for_reaches_the_cache(plain, reply, monkeypatch, arguments, wanted):
    """Were it not heeded, the text would be the same."""
    sizes, init = [], Backend.__init__
    monkeypatch.setattr(Backend, "__init__", lambda *a: sizes.append(a[2]) or init(*a))
    reply(plain, *arguments, tokens=1)
    assert sizes == [wanted]


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("sampled", [(), ("--temperature", "0.2", "--seed", "1")], ids=["greedy", "drawn"])
def test_drafts_change_nothing_but_the_passes(plain, reply, monkeypatch, sampled, kv):
    """Weights of a model that can be guessed, so that drafts are accepted, and others are not."""
    monkeypatch.setattr(generate, "load_weights", lambda *a: predictable(load_weights(*a), 2.0**-6))
    steps, step = [], Forward.__call__
    monkeypatch.setattr(Forward, "__call__", lambda *a: steps.append(1) or step(*a))
    replies, passes = {}, {}
    for drafts in ("none", "ngram", "mtp", "both"):
        replies[drafts] = reply(plain, "--drafts", drafts, "--kv", kv, *sampled, tokens=24)
        passes[drafts] = len(steps)
        steps.clear()
    assert all(r["tokens"] == replies["none"]["tokens"] for r in replies.values())
    assert replies["none"]["drafted"] == replies["none"]["accepted"] == 0 and passes["none"] == 24
    for drafts in ("ngram", "mtp", "both"):
        accepted, drafted = replies[drafts]["accepted"], replies[drafts]["drafted"]
        assert 0 < accepted <= drafted and passes[drafts] == 24 - accepted


def test_the_summary_tells_of_drafts(call, plain):
    status, _, err = call(plain, "--prompt", "abcabcabc", "--tokens", 4, "--drafts", "mtp")
    assert status == 0 and re.search(r", --tokens reached, \d of [1-9]\d* drafts accepted\n$", err)


def test_a_checkpoint_without_a_head_drafts_otherwise(call, plain, tmp_path, monkeypatch):
    """The head's drafts are refused before any weight is read."""
    folder = tmp_path / "headless"
    make_checkpoint(replace(spec_of_folder(plain), mtp=Mtp(0)), folder)
    assert call(folder, *HI, "--drafts", "ngram", "--tokens", 1)[0] == 0
    monkeypatch.setattr(generate, "load_weights", lambda *_: pytest.fail("it read the weights"))
    one_line(call(folder, *HI, "--drafts", "mtp"), "--drafts ngram or none")


def test_draws_repeat_with_the_seed_and_differ_with_another(plain, reply):
    drawn = {seed: reply(plain, *HOT, "--seed", seed)["tokens"] for seed in (0, 1, 2)}
    assert reply(plain, *HOT, "--seed", 1)["tokens"] == drawn[1]
    assert len({tuple(t) for t in drawn.values()}) == 3


@pytest.mark.parametrize("narrow", [("--top-k", "1"), ("--top-p", "0")])
def test_a_draw_from_one_token_is_greedy(plain, reply, narrow):
    assert reply(plain, *HOT, *narrow)["tokens"] == reply(plain)["tokens"] != reply(plain, *HOT)["tokens"]


def test_each_token_is_shown_before_the_next_pass(call, plain, monkeypatch):
    """It streams: pass, text, pass, text; then what is left, and the end of the line."""
    events = []
    step, show = Forward.__call__, output.show
    monkeypatch.setattr(Forward, "__call__", lambda *a: events.append("pass") or step(*a))
    monkeypatch.setattr(output, "show", lambda piece: events.append("text") or show(piece))
    assert call(plain, "--prompt", PROMPT, "--tokens", 3)[0] == 0
    assert events == ["pass", "text"] * 3 + ["text"] * 2


def test_an_end_token_ends_the_reply(folder, reply):
    """The registry's, or the checkpoint's generation_config.json; it is counted and shows nothing."""
    whole = reply(folder)["tokens"]
    place = next(n for n, t in enumerate(whole) if n > 1 and t < 128 and t not in whole[:n])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [300, whole[place]]}))
    ended = reply(folder)
    assert ended["ended"] and ended["tokens"] == whole[: place + 1]
    assert ended["text"] == bytes(t for t in whole[:place] if t < 256).decode("utf-8", "replace")


def test_a_prompt_comes_from_a_file_byte_by_byte(plain, reply, tmp_path):
    (tmp_path / "prompt").write_bytes(b"\xff\xfea page")
    assert reply(plain, prompt=f"@{tmp_path / 'prompt'}", tokens=2)["prompt_tokens"] == 8


# --- With a tokenizer ---------------------------------------------------------------------------------------------------


def test_a_tokenizer_reads_and_writes(folder, reply):
    write_tokenizer(folder)
    tokenizer, said = with_beginning(make_tokenizer()), reply(folder, prompt="the page of a table", tokens=12)
    assert said["prompt_tokens"] == len(tokenizer.encode("the page of a table").ids) < 19
    assert said["text"] == tokenizer.decode(said["tokens"], skip_special_tokens=True)


def test_chat_is_the_rendered_conversation(folder, reply, monkeypatch):
    pytest.importorskip("jinja2", reason="jinja2 is not installed: the extra [hf]")
    write_tokenizer(folder)
    tokenizer, prompts = make_tokenizer(), []
    read = Session.read
    monkeypatch.setattr(Session, "read", lambda self, *a: prompts.append(self.prompts[0]) or read(self, *a))
    reply(folder, "--chat", "--system", "be short", prompt="a page", tokens=1)
    start, end = (tokenizer.token_to_id(f"<|im_{word}|>") for word in ("start", "end"))
    words = [tokenizer.encode(t).ids for t in ("system\nbe short", "\n", "user\na page", "\n", "assistant\n")]
    assert prompts == [[start, *words[0], end, *words[1], start, *words[2], end, *words[3], start, *words[4]]]


# --- On a terminal ------------------------------------------------------------------------------------------------------


class Screen:
    """A stdout that is a terminal of some encoding."""

    def __init__(self, encoding="utf-8", terminal=True):
        self.encoding, self.isatty, self.text = encoding, lambda: terminal, ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize(
    ("screen", "shown"),
    [
        (Screen(), "é\t\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}\n"),
        (Screen(terminal=False), "é\t\x1b[2J\x9b\n"),
        (Screen("ascii"), "?\t\N{REPLACEMENT CHARACTER}[2J?\n"),
    ],
    ids=["terminal", "pipe", "ascii"],
)
def test_a_reply_cannot_steer_the_terminal(monkeypatch, screen, shown):
    """A pipe gets the text as it is."""
    monkeypatch.setattr(sys, "stdout", screen)
    output.show("é\t\x1b[2J\x9b\n")
    assert screen.text == shown


# --- Refusals -----------------------------------------------------------------------------------------------------------

HI = ("--prompt", "hi")
REFUSED = [
    ((), "--prompt"),
    ((*HI, "--nope"), "--nope"),
    ((*HI, "--tokens", "0"), "--tokens 0"),
    ((*HI, "--tokens", "300000"), "--tokens 300000"),
    (("--prompt", ""), "--prompt"),
    (("--prompt", "@missing"), "--prompt @missing"),
    (("--prompt", __file__), "to read it"),
    ((*HI, "--system", "s"), "--system"),
    ((*HI, "--chat"), "chat_template"),
    ((*HI, "--chat", "--system", "@missing"), "--system @missing"),
    ((*HI, "--temperature", "-1"), "--temperature -1"),
    ((*HI, "--temperature", "nan"), "--temperature nan"),
    ((*HI, *HOT, "--top-p", "1.5"), "--top-p 1.5"),
    ((*HI, *HOT, "--top-k", "-1"), "--top-k -1"),
    ((*HI, "--top-k", "5"), "--top-k 5"),
    ((*HI, "--top-p", "0.5"), "--top-p 0.5"),
    ((*HI, "--seed", "-1"), "--seed -1"),
    ((*HI, "--backend", "pagd"), "did you mean paged"),
    ((*HI, "--page-size", "0"), "--page-size 0"),
    ((*HI, "--page-size", "48", "--backend", "window"), "window has no pages"),
    ((*HI, "--page-size", "48", "--backend", "paged-p256"), "pages of 256"),
    ((*HI, "--kv", "fp4"), "--kv fp4"),
    ((*HI, "--drafts", "mpt"), "did you mean mtp"),
    ((*HI, "--json", "missing/report.json"), "--json missing/report.json"),
]


def one_line(answer, named):
    status, out, err = answer
    assert (status, out) == (2, "") and err.startswith("refengine: ") and err.count("\n") == 1 and named in err


@pytest.mark.parametrize(("arguments", "named"), REFUSED, ids=[" ".join(a) for a, _ in REFUSED])
def test_refusal_is_one_line(call, plain, monkeypatch, arguments, named):
    """It names the flag, nothing was run, status 2."""
    monkeypatch.setattr(generate, "load_weights", lambda *_: pytest.fail("it read the weights"))
    one_line(call(plain, *arguments), named)


def test_models_that_cannot_speak_are_refused(call, plain, folder, tmp_path):
    for model, named in [
        ("qwen3.5-tny", "qwen3.5-tiny"),
        ("qwen3.5-0.8b", "tokenizer.json"),
        (tmp_path, "config.json"),
    ]:
        one_line(call(model, *HI), named)
    one_line(call("qwen3.5-tiny", *HI, "--chat"), "--chat")


def test_a_prompt_that_a_tokenizer_cannot_read_is_refused(call, folder, tmp_path):
    write_tokenizer(folder)
    (tmp_path / "prompt").write_bytes(b"\xff")
    one_line(call(folder, "--prompt", f"@{tmp_path / 'prompt'}"), "--prompt: is not UTF-8")
    one_line(call(folder, *HI, "--chat", "--system", f"@{tmp_path / 'prompt'}"), "--system: is not UTF-8")


def test_a_missing_tokenizers_library_is_one_line(call, folder, monkeypatch):
    write_tokenizer(folder)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    one_line(call(folder, *HI), "the extra [hf]")


def test_a_cache_that_does_not_fit_is_refused(call, plain, monkeypatch):
    monkeypatch.setattr(generate, "machine_gib", lambda: 1e-4)
    one_line(call(plain, *HI), "--tokens 64: paged takes")


# --- Findings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passes", [0, 3])
def test_a_stopped_kernel_is_a_finding(call, plain, monkeypatch, passes):
    """What was written until then is a line of text."""
    hidden, left = Qwen35.hidden, iter(range(passes))

    def stop(*arguments):
        if next(left, None) is None:
            raise KernelError("rms_norm: norms.py:1: index 9 of 8")
        return hidden(*arguments)

    whole = call(plain, *HI, "--tokens", passes)[1] if passes else ""
    monkeypatch.setattr(Qwen35, "hidden", stop)
    assert whole.endswith("\n") == (passes > 0)
    assert call(plain, *HI) == (1, whole, "refengine: rms_norm: norms.py:1: index 9 of 8\n")


def test_logits_of_nan_are_a_finding(call, plain, monkeypatch):
    """No token is made of them."""
    monkeypatch.setattr(Qwen35, "logits", lambda *_: np.full((1, 320), np.nan, np.float32))
    status, out, err = call(plain, *HI)
    assert (status, out) == (1, "") and "every logit is NaN" in err
