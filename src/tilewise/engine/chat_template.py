"""Chat templates of Hugging Face's tokenizers: messages become one text, in Jinja's sandbox."""

from __future__ import annotations

import datetime
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tilewise.core.errors import InputError, MissingExtraError, shown
from tilewise.core.optional import importing

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def read_templates(folder: pathlib.Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a model's folder by name; "default" is the one for plain chats.

    Files win over tokenizer_config.json: `chat_template.jinja`, and `additional_chat_templates/*.jinja`.
    """
    written = config.get("chat_template")
    if isinstance(written, str):
        found = {"default": written}
    elif isinstance(written, list):
        try:
            found = {str(entry["name"]): str(entry["template"]) for entry in written}
        except (KeyError, TypeError):
            expected, hint = "a text, or a list of objects with name and template", "download the file anew"
            raise InputError(
                "tokenizer_config.json chat_template", got=shown(written), expected=expected, hint=hint
            ) from None
    else:
        found = {}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    if (folder / "chat_template.jinja").is_file():
        found["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return found


def render(
    templates: Mapping[str, str],
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
) -> str:
    """The text of a chat. With tools, the template "tool_use" is taken where there is one.

    Raises:
        InputError: no template; messages or tools that are no plain data; an unknown role; a message without content;
            what the template itself refuses.
        MissingExtraError: no jinja2.

    Source: `apply_chat_template` of Hugging Face's transformers.
    """
    template = templates.get("tool_use", templates.get("default")) if tools is not None else templates.get("default")
    if template is None:
        raise InputError(
            "chat template",
            got=f"templates named {sorted(templates)}" if templates else "a tokenizer without a chat template",
            expected="chat_template.jinja, or chat_template in tokenizer_config.json",
            hint="take a model that was tuned for chats, or write the prompt yourself and encode it",
        )
    plain = _checked(messages, template)
    try:
        compiled = _compiled(template)
        text: str = compiled.render(
            **{"documents": None, **variables},
            messages=plain,
            tools=None if tools is None else _plain("tools", tools),
            add_generation_prompt=add_generation_prompt,
        )
    except (MissingExtraError, InputError):
        raise
    except Exception as wrong:  # a template is a program: whatever it raises is about these messages
        raise InputError(
            "messages",
            got=f"{type(wrong).__name__} in the chat template: {wrong}",
            expected="messages that the model's chat template accepts",
            hint="look at the order of roles, and whether the model knows system messages and tools",
        ) from wrong
    return text


def _checked(messages: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """Messages as plain data without empty entries."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise InputError(
            "messages",
            got=shown(messages),
            expected="a list of at least one message",
            hint='for example [{"role": "user", "content": "Hello"}]',
        )
    plain: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        name = f"messages[{number}]"
        if not isinstance(message, Mapping):
            raise InputError(
                name, got=shown(message), expected="a dict with role and content", hint="give each message as a dict"
            )
        role = message.get("role")
        # A template may know roles of its own, by their names.
        if not isinstance(role, str) or not (role in ROLES or f"'{role}'" in template or f'"{role}"' in template):
            raise InputError(
                f"{name}['role']",
                got=shown(role),
                expected=f"one of {sorted(ROLES)}, or a role that the chat template names",
                hint="most models know system, user and assistant",
            )
        content = message.get("content")
        if not isinstance(content, (str, list)) and not (content is None and message.get("tool_calls")):
            raise InputError(
                f"{name}['content']",
                got="no content" if content is None else shown(content),
                expected="a string, or a list of parts; only a message with tool_calls may have none",
                hint="give content as a string",
            )
        plain.append({key: value for key, value in _plain(name, message).items() if value is not None})
    return plain


def _plain(name: str, value: Any) -> Any:
    """A copy of JSON's types alone: a template must not reach methods of the caller's objects."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as wrong:
        raise InputError(
            name,
            got=f"{shown(value)} ({wrong})",
            expected="dicts, lists, strings, numbers, booleans and None",
            hint="convert other objects first; give tools as JSON schemas",
        ) from wrong


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    """The template with what transformers offers: trimmed blocks, break and continue, tojson, strftime_now."""
    with importing("jinja2>=3.1.6", "engine", name="chat template"):
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks the assistant's text for training; here it only keeps its body."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Namespace(jinja2.utils.Namespace):
        """Without names that begin with an underscore, which Python gives a meaning."""

        def __init__(*args: Any, **named: Any) -> None:  # `self` may be one of the template's names
            names = dict(*args[1:], **named)
            for name in names:
                _refuse_underscore(name)
            jinja2.utils.Namespace.__init__(args[0], names)

        def __setitem__(self, name: str, value: Any) -> None:
            _refuse_underscore(name)
            jinja2.utils.Namespace.__setitem__(self, name, value)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )  # Jinja's own escapes HTML

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(
        raise_exception=raise_exception,
        strftime_now=lambda form: datetime.datetime.now().strftime(form),
        namespace=Namespace,
        dict=lambda *args, **named: dict(*args, **named),
    )
    return environment.from_string(template)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise ValueError(f"a namespace cannot hold {name!r}")
