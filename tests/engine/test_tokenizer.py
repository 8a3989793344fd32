"""Tokenizers of a model's folder, chat templates, text from streams of tokens, and stop strings."""

from __future__ import annotations

import doctest
import functools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, processors

from tests.engine.backends import KINDS, byte_level
from tilewise.core.errors import InputError, UnsupportedError
from tilewise.engine import detokenizer, tokenizer
from tilewise.engine.tokenizer import Detokenizer, StopStrings, Tokenizer

CHATML = (
    "{% for message in messages %}{{ bos_token + message['role'] + '\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}\n{% if add_generation_prompt %}{{ bos_token + 'assistant\n' }}{% endif %}"
)
CONFIG: dict[str, Any] = {
    "bos_token": "<|start|>",
    "eos_token": {"__type": "AddedToken", "content": "<|end|>"},
    "chat_template": CHATML,
}
CHAT = [{"role": "user", "content": "Grüße"}]
TEXTS = st.one_of(st.text(), st.text("the in 你好ü🙂👩‍👩‍👧\n.'", max_size=40))


@functools.cache
def kind(name: str) -> Tokenizer:
    return Tokenizer(KINDS[name]())


def folder(path: Path, settings: dict[str, Any], **files: Any) -> Path:
    byte_level().save(str(path / "tokenizer.json"))
    for name, entries in {"tokenizer_config": settings, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(entries))
    return path


def chat(template: str, messages: Any, **more: Any) -> str:
    return Tokenizer(byte_level(), config=CONFIG, templates={"default": template}).apply_chat_template(messages, **more)


# A model's folder


def test_a_folder_is_read(tmp_path: Path) -> None:
    made = Tokenizer.read(folder(tmp_path, CONFIG, generation_config={"eos_token_id": [5, 1]}, config={"x": 1}))
    assert made.vocab_size == made.backend.get_vocab_size() > 400
    assert (made.bos_id, made.eos_id, made.pad_id) == (0, 1, None)
    assert made.eos_ids == (5, 1)
    assert made.special_ids == {0, 1}
    ids = made.encode("It doesn't<|end|>")
    assert ids[-1] == 1
    assert made.decode(ids) == "It doesn't"
    assert made.decode(ids, skip_special=False) == "It doesn't<|end|>"


def test_ends_of_text_are_those_of_config_json_where_nothing_else_says_more(tmp_path: Path) -> None:
    assert Tokenizer.read(folder(tmp_path, CONFIG, config={"eos_token_id": 7})).eos_ids == (7, 1)


@pytest.mark.parametrize("entries", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": False}])
def test_first_and_last_tokens_are_those_of_transformers(tmp_path: Path, entries: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    path = folder(tmp_path, {"tokenizer_class": "PreTrainedTokenizerFast", **CONFIG, **entries})
    backend = byte_level()
    backend.post_processor = processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 0)])
    backend.save(str(path / "tokenizer.json"))
    made, theirs = Tokenizer.read(path), transformers.AutoTokenizer.from_pretrained(path)
    for special in (True, False):
        assert made.encode("a word", special) == theirs.encode("a word", add_special_tokens=special)
    assert made.encode("a word")[0] == 0


def test_first_and_last_tokens_that_only_the_configuration_asks_for(tmp_path: Path) -> None:
    made = Tokenizer.read(folder(tmp_path, {**CONFIG, "add_bos_token": True, "add_eos_token": True}))
    plain = made.encode("a word", special=False)
    assert made.encode("a word") == [0, *plain, 1]
    assert made.encode("<|start|>a word") == [0, *plain, 1]
    assert made.encode("") == [0, 1]


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no tokenizer\.json"):
        Tokenizer.read(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        Tokenizer.read(tmp_path)
    folder(tmp_path, CONFIG)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(InputError, match=r"tokenizer_config\.json"):
        Tokenizer.read(tmp_path)


@pytest.mark.parametrize("ids", [[-1], [1.5], ["a"], [1 << 40]])
def test_ids_that_are_none_are_refused(ids: list[Any]) -> None:
    with pytest.raises(InputError, match="ids"):
        kind("byte_level").decode(ids)
    with pytest.raises(InputError, match="ids"):
        Detokenizer(kind("byte_level")).push(ids)


@pytest.mark.parametrize("text", [3, None, b"a", "\ud800"])
def test_text_that_is_none_is_refused(text: Any) -> None:
    with pytest.raises(InputError, match="text"):
        kind("byte_level").encode(text)


# Chat templates


def test_a_chat_becomes_a_prompt(tmp_path: Path) -> None:
    made = Tokenizer.read(folder(tmp_path, CONFIG))
    text = "<|start|>user\nGrüße<|end|>\n<|start|>assistant\n"
    assert made.apply_chat_template(CHAT) == text
    assert made.apply_chat_template(CHAT, add_generation_prompt=False) == text.removesuffix("<|start|>assistant\n")
    assert made.encode_chat(CHAT) == made.encode(text, special=False)
    assert made.encode_chat(CHAT)[0] == 0


def test_templates_in_files_win(tmp_path: Path) -> None:
    folder(tmp_path, CONFIG)
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0].name }}")
    made = Tokenizer.read(tmp_path)
    assert made.apply_chat_template(CHAT) == "file"
    assert made.apply_chat_template(CHAT, tools=[{"name": "clock"}]) == "clock"


def test_templates_by_name_in_the_configuration(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    made = Tokenizer.read(folder(tmp_path, {**CONFIG, "chat_template": named}))
    assert (made.apply_chat_template(CHAT), made.apply_chat_template(CHAT, tools=[])) == ("plain", "tools")


TEMPLATES = [
    CHATML,
    "{%- for m in messages %}\n  {%- if m.role == 'user' %}\n[{{ m.content | trim }}]\n  {%- endif %}\n{% endfor %}",
    "{{ messages | tojson }} {{ tools | tojson(indent=2) }} {{ messages[0] | tojson(sort_keys=True) }}",
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{{ strftime_now('%Y') }} {{ eos_token }} {{ dict(a=1).a }} {% if documents %}no{% endif %}{{ extra }}",
    "{% for m in messages %}{{ m.content if m.content is defined else 'none' }}{{ m.tool_calls }}{% endfor %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_mean_what_they_mean_in_transformers(tmp_path: Path, template: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **CONFIG, "chat_template": template}
    path = folder(tmp_path, config)
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    messages = [
        {"role": "user", "content": " <b>Grüße</b> "},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "clock"}]},
        {"role": "tool", "content": "12:00"},
    ]
    messages = messages if template in TEMPLATES[2:4] + TEMPLATES[6:] else [messages[0], messages[2]]
    tools = [{"name": "clock", "parameters": {}}]
    for prompt in (True, False):
        arguments: dict[str, Any] = {"tools": tools, "add_generation_prompt": prompt, "extra": "more"}
        text = Tokenizer.read(path).apply_chat_template(messages, **arguments)
        assert text == theirs.apply_chat_template(messages, tokenize=False, **arguments)


def test_a_tokenizer_without_a_template_says_so() -> None:
    with pytest.raises(InputError, match="without a chat template"):
        kind("byte_level").apply_chat_template(CHAT)


@pytest.mark.parametrize(
    ("messages", "name"),
    [
        ([], "messages"),
        ("Hello", "messages"),
        (["Hello"], r"messages\[0\]"),
        ([{"content": "Hello"}], r"messages\[0\]\['role'\]"),
        ([{"role": "robot", "content": "Hello"}], r"messages\[0\]\['role'\]"),
        ([*CHAT, {"role": "assistant"}], r"messages\[1\]\['content'\]: got no content"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\['content'\]"),
        ([{"role": "user", "content": "a", "image": object()}], r"messages\[0\]"),
    ],
)
def test_messages_that_are_none_are_refused(messages: Any, name: str) -> None:
    with pytest.raises(InputError, match=f"^{name}"):
        chat(CHATML, messages)


def test_a_role_that_the_template_names_is_taken() -> None:
    template = "{% if messages[0]['role'] == 'robot' %}beep{% endif %}"
    assert chat(template, [{"role": "robot", "content": ""}]) == "beep"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing + 'a' }}", "nothing"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ namespace(_a=1) }}", "_a"),
        ("{% set n = namespace() %}{% set n._a = 1 %}", "_a"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_what_a_template_refuses_is_about_the_messages(template: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        chat(template, CHAT)


# Text from a stream of tokens


def streamed(made: Tokenizer, ids: list[int], skip_special: bool = True) -> str:
    stream = Detokenizer(made, skip_special)
    return "".join([*(stream.push([number]) for number in ids), stream.flush()])


@pytest.mark.parametrize("name", KINDS)
@given(text=TEXTS, skip=st.booleans())
def test_a_stream_of_a_texts_tokens_is_the_text(name: str, text: str, skip: bool) -> None:
    made = kind(name)
    ids = [0, *made.encode(text), 1]
    assert streamed(made, ids, skip) == made.decode(ids, skip)


@pytest.mark.parametrize("name", ["byte_level", "metaspace", "word_piece"])
@given(data=st.data(), skip=st.booleans())
def test_a_stream_of_any_tokens_is_what_they_are_together(name: str, data: st.DataObject, skip: bool) -> None:
    made = kind(name)
    ids = data.draw(st.lists(st.integers(0, made.vocab_size + 3)))
    assert streamed(made, ids, skip) == made.decode(ids, skip)


@given(data=st.data())
def test_bytes_that_are_no_text_cost_no_character_before_them(data: st.DataObject) -> None:
    """Runs of byte tokens: what Python makes of the bytes, but one U+FFFD for each byte that is none."""
    made = kind("byte_fallback")
    run = data.draw(st.one_of(st.binary(max_size=8), st.text("ü你🙂").map(str.encode)))
    shown = "".join(
        letter if letter != "\udc80" else "\ufffd"
        for letter in run.decode("utf-8", "surrogateescape").translate(dict.fromkeys(range(0xDC80, 0xDD00), "\udc80"))
    )
    word = made.encode("the")
    assert streamed(made, [*word, *(3 + byte for byte in run), *word]) == f"the{shown} the"
    if "\ufffd" not in shown or shown == "\ufffd" * len(run):
        assert f"the{shown} the" == made.decode([*word, *(3 + byte for byte in run), *word])


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_no_part_of_a_character_is_shown(name: str) -> None:
    made, stream = kind(name), Detokenizer(kind(name))
    number = {byte: made.backend.token_to_id(f"<0x{byte:02X}>") for byte in "🚁".encode()}
    ids = made.encode("🚁") if name == "byte_level" else list(number.values())
    assert len(ids) > 1
    said = [stream.push([one]) for one in ids]
    assert (said[:-1], said[-1]) == ([""] * (len(ids) - 1), "🚁")
    assert stream.push(ids[:1]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""
    assert stream.push(ids) == "🚁"


def test_a_token_takes_the_same_work_wherever_it_stands() -> None:
    decoded: list[int] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(kind("metaspace").backend, name)

        def decode(self, ids: list[int], **more: Any) -> str:
            decoded.append(len(ids))
            text: str = kind("metaspace").backend.decode(ids, **more)
            return text

    made = Tokenizer(Counting())
    ids = made.encode("The quick brown fox. " * 50)
    decoded.clear()
    streamed(made, ids)
    assert max(decoded) <= 2
    assert len(decoded) <= 2 * len(ids)


def test_a_decoder_that_would_need_the_whole_text_is_refused() -> None:
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    with pytest.raises(UnsupportedError, match="ByteLevel"):
        Detokenizer(Tokenizer(backend))
    backend.decoder = decoders.Sequence([decoders.ByteLevel()])
    assert streamed(Tokenizer(backend), backend.encode("a Grüße").ids) == "a Grüße"


# Stop strings


def first_stop(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """Letter by letter: the stop string that is complete first, the longest of these."""
    for end in range(len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end if include else end - max(map(len, done))], True
    return text, False


@given(
    pieces=st.lists(st.text("ab\n", max_size=4)),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_a_stop_string_is_found_across_pieces(pieces: list[str], stops: list[str], include: bool) -> None:
    watch, shown, stopped = StopStrings(stops, include), "", False
    for piece in pieces:
        text, stopped = watch.push(piece)
        shown += text
    assert (shown + watch.flush(), stopped) == first_stop("".join(pieces), stops, include)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    watch = StopStrings("</end>")
    assert [watch.push(text) for text in ("a <", "b </e", "nd", "x <")] == [
        ("a ", False),
        ("<b ", False),
        ("", False),
        ("</endx ", False),
    ]
    assert (watch.flush(), watch.flush()) == ("<", "")


def test_text_after_a_stop_string_is_ignored() -> None:
    watch = StopStrings(["b", "c"], include_stop=True)
    assert (watch.push("abc"), watch.stopped) == (("ab", True), True)
    assert (watch.push("d"), watch.flush()) == (("", True), "")


@pytest.mark.parametrize("stops", ["", [""], ["a", 3]])
def test_stop_strings_that_are_none_are_refused(stops: Any) -> None:
    with pytest.raises(InputError, match="stops"):
        StopStrings(stops)


@pytest.mark.parametrize("module", [tokenizer, detokenizer])
def test_examples_run(module: Any) -> None:
    done = doctest.testmod(module)
    assert done.attempted
    assert not done.failed
