"""Chat templates of Hugging Face folders: a conversation as prompt text.

A template is a Jinja program in `chat_template.jinja`, else in `tokenizer_config.json`, and
untrusted: it runs in Jinja's immutable sandbox, where access to Python internals is an error (in
transformers some of it gives an empty string), with limited work (huggingface/template_limits.py).

Messages of users (the API, --batch, --chat, --interactive) go through `parse_messages`, which gives
templates role and text: what it does not know is refused, since a template would ignore it, and
so is a message that the template leaves out.

Equivalence (test_all.py): the text that transformers 5 renders. Needs: jinja2, which comes with
torch.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import functools
import importlib.metadata
import json
import os
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface.tokenizer import TokenizerConfig, one_line, read_file

if TYPE_CHECKING:
    import jinja2
    from huggingface.template_limits import LimitedEnvironment


MESSAGE_FIELDS = ("role", "content", "name", "reasoning_content", "reasoning", "thinking")
# of the API's answers: empty, as they are sent back, they ask for nothing
RESPONSE_FIELDS = {"refusal", "tool_calls", "function_call", "audio", "annotations"}


def parse_messages(messages: Any, system: str | None = None) -> list[dict[str, str]]:
    """A user's messages in OpenAI's form as `ChatTemplate.render` takes them: the content is the
    text of its parts, a field that is null is absent. system: the system message of a conversation
    without one. ValueError begins with the field, as in messages[2].content[0].type."""
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of one or more objects")
    parsed = [_parse_message(m, f"messages[{i}]") for i, m in enumerate(messages)]
    if system is not None and not any(m["role"] == "system" for m in parsed):
        parsed = [{"role": "system", "content": system}, *parsed]
    return parsed


def _parse_message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise ValueError(f"messages must be a list of one or more objects; {where} is none")
    given = {name: value for name, value in message.items() if value is not None}
    for name, value in [*given.items()]:
        # parsed: the openai package's reading of the content, which it sends back too
        if name == "parsed" or (name in RESPONSE_FIELDS and value in ([], "")):
            del given[name]
        elif name not in MESSAGE_FIELDS:
            have = ", ".join(MESSAGE_FIELDS)
            raise ValueError(f"{where}.{name} is not supported; supported: {have}")
    if not isinstance(given.get("role"), str) or not given["role"]:
        raise ValueError(f"{where}.role: every message must have a role")
    given["content"] = _parse_content(given.get("content"), f"{where}.content")
    for name, value in given.items():
        if not isinstance(value, str):
            raise ValueError(f"{where}.{name} must be text")
    return given


def _parse_content(content: Any, where: str) -> str:
    """The text of a string, or of parts of type text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ValueError(f"{where} must be text or a list of parts of type text")
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, dict):
            raise ValueError(f"{where}[{i}] must be a part: an object with type and text")
        if part.get("type") != "text":
            raise ValueError(f"{where}[{i}].type must be text: content is text or parts of it")
        for name, value in part.items():
            if value is not None and name not in ("type", "text"):
                raise ValueError(f"{where}[{i}].{name} is not supported; supported: type, text")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{where}[{i}].text must be text")
        texts.append(part["text"])
    return "".join(texts)


class ChatTemplate:
    """A Jinja chat template, which renders a conversation as prompt text.

    source: the file, for errors. templates: by name, "default", and "tool_use" for conversations
    with tools. variables: available in templates, bos_token, eos_token, ...
    """

    def __init__(self, source: Path, templates: dict[str, str], variables: dict[str, str]):
        if "default" not in templates:
            raise ValueError(
                f"{source}: none of its chat templates ({', '.join(sorted(templates))}) is named "
                "default; rename one"
            )
        self.source, self.variables = source, variables
        used = (name for name in ("default", "tool_use") if name in templates)
        self.templates = {name: self._compile(name, templates[name]) for name in used}

    def _compile(self, name: str, text: str) -> jinja2.Template:
        environment = template_environment()
        try:
            return environment.compile_limited(text)
        except Exception as e:  # a template may raise anything
            line = f" line {e.lineno}," if getattr(e, "lineno", None) else ""
            raise ValueError(
                f"{self.source}: chat template {name!r},{line} does not compile ({one_line(e)}); "
                "copy it again or fix it"
            ) from None

    def prompt(self, messages: Any, system: str | None = None) -> str:
        """A user's messages (see parse_messages) as a prompt for the assistant's answer. ValueError
        if the template leaves one out, as many do with roles that they do not know. All renderings
        that this takes have the work of one."""
        parsed = parse_messages(messages, system)
        prompt = self.render(parsed)
        marks = [f"[message {i} of {len(parsed)}]" for i in range(len(parsed))]
        try:
            marked = self._render(self._values([m | {"content": x} for m, x in zip(parsed, marks)]))
        except ValueError:  # a template that wants a form of the content
            return prompt
        for i, (message, mark) in enumerate(zip(parsed, marks)):
            if mark not in marked and self._leaves_out(parsed, i, prompt):
                i -= len(parsed) - len(messages)
                where = "the system prompt" if i < 0 else f"messages[{i}]"
                role = message["role"]
                raise ValueError(f"{where}: the chat template leaves it out (role {role!r})")
        return prompt

    def _leaves_out(self, messages: list[dict[str, str]], i: int, prompt: str) -> bool:
        """Whether the prompt is the same with another text in messages[i]. A template may shorten
        or change a text that it does not leave out."""
        changed = [*messages]
        changed[i] = messages[i] | {"content": f"x{messages[i]['content']}"}
        try:
            return self._render(self._values(changed)) == prompt
        except ValueError:
            return False

    def render(
        self, messages: list[dict[str, str]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Render a conversation as text, to be encoded with bos=False.

        messages: {"role": ..., "content": ...}. add_generation_prompt appends the start of the
        assistant's turn. variables: template-specific (tools, enable_thinking, ...). ValueError if
        the template rejects the messages or fails.
        """
        from huggingface.template_limits import start_rendering

        if not messages or not all(isinstance(m, dict) for m in messages):
            raise ValueError(f"messages must be a list of one or more objects, not {messages!r}")
        values = self._values(messages, add_generation_prompt, **variables)
        start_rendering(values)
        return self._render(values)

    def _values(
        self, messages: list[dict[str, str]], add_generation_prompt: bool = True, **variables: Any
    ) -> dict[str, Any]:
        """What the template's variables are."""
        values = {**self.variables, "tools": None, "documents": None, **variables}
        messages = [_for_template(message) for message in messages]
        return values | {"messages": messages, "add_generation_prompt": add_generation_prompt}

    def _render(self, values: dict[str, Any]) -> str:
        """Render with the work that is left since start_rendering."""
        from huggingface.template_limits import TooMuchWork
        from jinja2 import TemplateError
        from jinja2.sandbox import SecurityError

        with_tools = values["tools"] is not None and "tool_use" in self.templates
        template = self.templates["tool_use" if with_tools else "default"]
        try:
            return template.render(values)
        except TooMuchWork:
            why = "does too much work on these messages: endless loops? Use another template"
        except SecurityError as e:
            why = f"violates the sandbox ({one_line(e)}); use a template from a trusted source"
        except Exception as e:  # a template may raise anything
            why = f"rejects these messages: {one_line(e)}"
            if type(e) is not TemplateError:  # raised by raise_exception in the template
                why = f"fails on these messages ({type(e).__name__}: {one_line(e)}); fix either"
        raise ValueError(f"{self.source}: the chat template {why}")


def load_chat_template(
    folder: str | os.PathLike, special_tokens: Mapping[str, str] | None = None
) -> ChatTemplate | None:  # fmt: skip
    """The chat template of a folder; None if it has none. special_tokens: bos_token, ... of its
    base model, for those that the folder does not name."""
    config = TokenizerConfig(Path(folder))
    path, templates = chat_template_texts(Path(folder), config)
    variables = {**(special_tokens or {}), **config.special_tokens}
    return ChatTemplate(path, templates, variables) if templates else None


def chat_template_texts(folder: Path, config: TokenizerConfig) -> tuple[Path, dict[str, str]]:
    """The file that a folder's chat templates are in, and the templates by name: of
    chat_template.jinja and additional_chat_templates/*.jinja, else of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    files = {"default": path} if os.path.lexists(path) else {}
    files |= {p.stem: p for p in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if files:
        return path, {name: _read_text(p) for name, p in files.items()}
    found = config.values.get("chat_template")
    if found is None:
        return config.path, {}
    entries = found if isinstance(found, list) else [{"name": "default", "template": found}]
    try:
        templates = {str(entry["name"]): entry["template"] for entry in entries}
    except (TypeError, KeyError):
        templates = {"": None}
    if not all(isinstance(template, str) for template in templates.values()):
        raise ValueError(
            f"{config.path}: chat_template must be a string, or a list of objects with a name and "
            "a template; copy the file again"
        )
    return config.path, templates


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: without None values, and with reasoning under both names
    that templates use."""
    message = {key: value for key, value in message.items() if value is not None}
    for key in ("reasoning_content", "thinking", "reasoning"):
        if key in message:
            return {"thinking": message[key]} | message | {"reasoning_content": message[key]}
    return message


def _read_text(path: Path) -> str:
    try:
        return read_file(path).decode()
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}: not UTF-8 text ({e}); copy it again") from None


@functools.cache
def template_environment() -> LimitedEnvironment:
    """The Jinja environment of chat templates, as in transformers."""
    from huggingface.template_limits import LimitedEnvironment, limited_filter
    from jinja2 import TemplateError
    from jinja2.sandbox import SecurityError

    version = importlib.metadata.version("jinja2")
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < (3, 1, 6):
        raise ValueError(f"jinja2 {version} has an insecure sandbox; pip install -U jinja2")

    class Sandbox(LimitedEnvironment):
        def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
            # Jinja's default is an undefined value that renders as an empty string
            raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__}")

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    generation, namespace = _jinja_classes()
    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = limited_filter("tojson", _tojson)
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
        "namespace": namespace,
        "dict": _Dict(),
    }
    return environment


def _jinja_classes() -> tuple[type, type]:
    """The {% generation %} tag, which marks assistant text, and namespace()."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import SecurityError
    from jinja2.utils import Namespace

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class PublicNamespace(Namespace):
        def __init__(*args: Any, **values: Any) -> None:  # a value may be named self
            for name in dict(*args[1:], **values):
                check(name)
            Namespace.__init__(*args, **values)

        def __setitem__(self, name: str, value: Any) -> None:
            check(name)
            Namespace.__setitem__(self, name, value)

    def check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"namespace attribute {name!r}")

    return Generation, PublicNamespace


class _Dict:
    """dict() for templates. The type itself would allow dict.update(message, ...)."""

    def __call__(self, *args: Any, **values: Any) -> dict:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict:
        return dict.fromkeys(*args)


def _tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Plain JSON; Jinja's own filter escapes < and > for HTML."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
