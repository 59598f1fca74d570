"""Text becomes the token ids that the model has, and token ids become whole characters as they come: joined, the pieces are
the text of all tokens at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizer import SPECIALS, TEMPLATE, byte_ids, make_tokenizer, with_beginning, write_tokenizer

from refengine.errors import UserError
from refengine.registry import load_model
from refengine.text import open_chat_template, open_text
from refengine.text.byte_text import ByteText
from refengine.text.extra import INSTALL
from refengine.text.tokenizer import TokenizerText, finished, open_tokenizer

TINY = load_model("qwen3.5-tiny")
HARD = "aé€😀\N{REPLACEMENT CHARACTER}z"
"""Characters of one to four bytes."""


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def texts(tokenizer):
    """Text of either kind."""
    return {"bytes": ByteText(), "tokenizer": TokenizerText(tokenizer)}


def pieces(text, ids):
    """What each token shows, and the end."""
    stream = text.stream()
    return [*(stream.push(i) for i in ids), stream.end()]


def needs_jinja():
    pytest.importorskip("jinja2", reason="jinja2 is not installed: the extra [hf]")


# --- Streams ----------------------------------------------------------------------------------------------------------


def test_no_half_character_is_shown_of_bytes():
    text = ByteText()
    assert pieces(text, text.encode("é€😀")) == ["", "é", "", "", "€", "", "", "", "😀", ""]


def test_no_half_character_is_shown_of_tokens(tokenizer, texts):
    """The emoji is in no merge, so each of its bytes is a token."""
    ids = texts["tokenizer"].encode("😀 the page")
    assert len(ids) > 5
    shown = pieces(texts["tokenizer"], ids)
    assert shown[:4] == ["", "", "", "😀"] and shown[-1] == "" and "".join(shown) == "😀 the page"
    assert "" not in shown[4:-1]


@pytest.mark.parametrize("kind", ["bytes", "tokenizer"])
@pytest.mark.parametrize("cut", range(1, 4))
def test_a_character_that_never_came_whole_is_marked(texts, kind, cut):
    """At the end, and only there."""
    text = texts[kind]
    ids = text.encode("a") + text.encode("😀")[:cut]
    assert pieces(text, ids) == ["a"] + [""] * cut + ["\N{REPLACEMENT CHARACTER}"]


@given(st.text(alphabet=st.one_of(st.sampled_from(HARD), st.characters(codec="utf-8"))))
def test_text_comes_back(texts, written):
    for text in texts.values():
        assert "".join(pieces(text, text.encode(written))) == written


@given(st.lists(st.integers(0, 319)))
def test_bytes_of_any_ids_are_the_text_of_all_at_once(ids):
    assert "".join(pieces(ByteText(), ids)) == bytes(i for i in ids if i < 256).decode("utf-8", "replace")


@given(st.lists(st.integers(0, 319)))
def test_tokens_of_any_ids_are_the_text_of_all_at_once(tokenizer, texts, ids):
    """Special tokens and ids past the tokenizer's show nothing."""
    assert "".join(pieces(texts["tokenizer"], ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@given(st.one_of(st.binary(), st.lists(st.sampled_from(HARD.encode())).map(bytes)))
def test_broken_characters_too(tokenizer, texts, written):
    """Each byte a token; most of them belong to characters of several."""
    ids = [byte_ids(tokenizer)[b] for b in written]
    assert "".join(pieces(texts["tokenizer"], ids)) == written.decode("utf-8", "replace")


def test_what_may_still_become_another_character_is_held_back():
    end = "\N{REPLACEMENT CHARACTER}"
    assert [finished("a" + end * n) for n in range(5)] == ["a", "a", "a", "a", "a" + end]


# --- Ids --------------------------------------------------------------------------------------------------------------


def test_bytes_that_are_no_text_are_ids_too():
    assert ByteText().encode(b"\xff\x00a".decode("utf-8", "surrogateescape")) == [255, 0, 97]


def test_a_tokenizer_wants_utf_8(texts):
    with pytest.raises(UnicodeError):
        texts["tokenizer"].encode(b"\xff".decode("utf-8", "surrogateescape"))


def test_the_template_alone_names_the_special_tokens_of_a_conversation(tokenizer):
    """A plain text gets what the tokenizer puts around one; a templated text does not get it twice."""
    start, text = tokenizer.token_to_id(SPECIALS[0]), TokenizerText(with_beginning(tokenizer))
    assert text.encode("a")[0] == start and text.encode(SPECIALS[0] + "a", templated=True) == text.encode("a")


def test_a_long_prompt_is_not_cut(tokenizer):
    """A limit that the file carries is for training."""
    tokenizer = type(tokenizer).from_str(tokenizer.to_str())
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    assert len(TokenizerText(tokenizer).encode("z" * 20)) == 20


# --- Which text a model has -------------------------------------------------------------------------------------------


def refused(call, *words):
    with pytest.raises(UserError) as refusal:
        call()
    assert all(word in str(refusal.value) for word in words) and "\n" not in str(refusal.value).strip()


def test_a_folder_has_its_tokenizer_and_generated_weights_have_bytes(tmp_path):
    write_tokenizer(tmp_path)
    spec = load_model("qwen3.5-0.8b")
    assert open_text(spec, tmp_path).encode("the page") == with_beginning(make_tokenizer()).encode("the page").ids
    assert open_text(TINY, None).encode("the") == list(b"the")
    refused(lambda: open_text(spec, None), "qwen3.5-0.8b", "tokenizer.json")


@pytest.mark.parametrize("other", ["tokenizer_config.json", "vocab.json", "merges.txt", "tokenizer.model"])
def test_a_tokenizer_in_another_form_is_no_reason_for_bytes(tmp_path, other):
    assert open_text(TINY, tmp_path).encode("a") == [97]
    (tmp_path / other).write_text("{}")
    refused(lambda: open_text(TINY, tmp_path), "tokenizer.json", other)


def test_a_missing_library_names_the_extra(tmp_path, monkeypatch):
    for module in ("tokenizers", "jinja2", "jinja2.sandbox"):
        monkeypatch.setitem(sys.modules, module, None)
    refused(
        lambda: open_tokenizer(tmp_path, 320), "tokenizer.json", "tokenizers is not installed", "[hf]", "pip install"
    )
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    refused(lambda: open_chat_template(tmp_path).render([]), "--chat", "jinja2 is not installed", "[hf]")


def test_the_readme_has_the_command_that_installs_the_extra():
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"\n    {INSTALL}\n" in readme


def test_a_damaged_tokenizer_is_refused(tmp_path, tokenizer):
    (tmp_path / "tokenizer.json").write_text("{}")
    refused(lambda: open_tokenizer(tmp_path, 320), "tokenizer.json", "cannot be read")


def test_a_tokenizer_of_more_ids_than_the_model_has_is_refused(tmp_path):
    """An id past the vocabulary would read past the embedding."""
    write_tokenizer(tmp_path)
    largest = make_tokenizer().get_vocab_size() - 1
    open_tokenizer(tmp_path, largest + 1)
    refused(lambda: open_tokenizer(tmp_path, largest), f"id {largest}", f"vocabulary is {largest}")


# --- Chat templates -----------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "a < b"}
SYSTEM = {"role": "system", "content": "be short"}
RENDERED = "<|im_start|>user\na < b<|im_end|>\n<|im_start|>assistant\n"


def config(folder, **keys):
    (folder / "tokenizer_config.json").write_text(json.dumps(keys))


def test_a_template_renders_the_conversation(tmp_path):
    needs_jinja()
    config(tmp_path, chat_template=TEMPLATE)
    template = open_chat_template(tmp_path)
    assert template.render([USER]) == RENDERED
    assert template.render([SYSTEM, USER]) == "<|im_start|>system\nbe short<|im_end|>\n" + RENDERED


def test_the_file_goes_before_the_key(tmp_path):
    needs_jinja()
    config(tmp_path, chat_template="old", eos_token="<|im_end|>", bos_token={"content": "<s>"}, unk_token=None)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    assert open_chat_template(tmp_path).render([USER]) == "<s>a < b<|im_end|>"


def test_of_several_templates_the_default_is_taken(tmp_path):
    needs_jinja()
    config(tmp_path, chat_template=[{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}])
    assert open_chat_template(tmp_path).render([USER]) == "yes"
    config(tmp_path, chat_template=[{"name": "tools", "template": "no"}])
    refused(lambda: open_chat_template(tmp_path), "chat_template", "default")


def test_templates_have_what_transformers_gives_them(tmp_path):
    needs_jinja()
    source = "{{ messages[0] | tojson }}{{ strftime_now('%%') }}{% for m in messages %}{% break %}{% endfor %}{{ tools is none }}"
    (tmp_path / "chat_template.jinja").write_text(source)
    assert open_chat_template(tmp_path).render([USER]) == '{"role": "user", "content": "a < b"}%True'


def test_lines_of_a_template_that_hold_a_statement_alone_leave_nothing(tmp_path):
    needs_jinja()
    (tmp_path / "chat_template.jinja").write_text("{% if true %}\n  {% endif %}\nx")
    assert open_chat_template(tmp_path).render([USER]) == "x"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% if %}", "Expected an expression"),
        ("{{ raise_exception('no system turn') }}", "no system turn"),
        ("{{ messages[0].content.nope() }}", "nope"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ 1 // 0 }}", "zero"),
    ],
    ids=["damaged", "refuses", "unknown", "changes what it is given", "breaks out", "fails"],
)
def test_a_template_that_stops_is_one_line(tmp_path, source, said):
    """Nothing that a checkpoint's template does gets out of its sandbox."""
    needs_jinja()
    (tmp_path / "chat_template.jinja").write_text(source)
    refused(lambda: open_chat_template(tmp_path).render([USER]), "chat_template.jinja", said, "--chat")


def test_no_template_is_refused(tmp_path):
    refused(lambda: open_chat_template(None), "--chat", "generated weights")
    refused(lambda: open_chat_template(tmp_path), "--chat", "chat_template.jinja", str(tmp_path))
    config(tmp_path, chat_template=None)
    refused(lambda: open_chat_template(tmp_path), "--chat", "chat_template.jinja")
    config(tmp_path, chat_template=3)
    refused(lambda: open_chat_template(tmp_path), "tokenizer_config.json", "chat_template")
