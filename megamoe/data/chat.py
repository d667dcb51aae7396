"""Conversations as tokens, in the K3 family's XTML template, and which of them carry loss.

    element   <open> tag attr="v" <sep> … <close> tag <sep>
    message   element `message` with its role, then <end_of_msg>
    assistant channels inside a message: think, response, tools (with one call per tool call, one argument per key)

Markers are special tokens; everything else, tags and attributes too, is ordinary text, so no text can pose as structure.
Loss is taken on what the assistant writes: from its first channel's <open> to <end_of_msg>, both included.

Order: tool declarations, thinking effort, the conversation, one-shot options, and for generation the opening of the
assistant's first channel. Source: arXiv:2607.24653 app. F and the released tokenizer's documentation; code ours.
The texts of the system messages that the template adds (type `tool-choice` and so on) are our reading.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megamoe.data.tokenizer import CHAT_MARKERS, Tokenizer
from megamoe.utils.errors import UserError

OPEN, CLOSE, SEP, END_OF_MESSAGE = CHAT_MARKERS
ROLES = ("system", "user", "assistant", "tool")
EFFORTS = ("low", "medium", "high", "max")


@dataclass(frozen=True)
class Segment:
    """A run of text, or one marker.

    Attributes:
        text: the text, or the marker's name.
        is_marker: whether it is one special token.
        counted: whether its tokens are targets.
    """

    text: str
    is_marker: bool
    counted: bool


class BadConversation(ValueError):
    """A conversation that the template cannot write; the message says what is wrong, the reader of the file adds where."""


def render(conversation: dict, *, thinking: bool = True, generate: bool = False) -> list[Segment]:
    """Lay a conversation out as segments.

    Args:
        conversation: `messages` in OpenAI's form: role; content as text or a list of text parts; for the assistant
            reasoning_content, tool_calls and weight (0 keeps the message out of the loss); for a tool tool_call_id.
            Beside it tools, thinking_effort, tool_choice and response_format. Other keys are left alone.
        thinking: whether assistant messages have a think channel; it is written even when empty. Without, reasoning is
            left out.
        generate: end with the prefix that asks the model for its next message.

    Raises:
        BadConversation: see there.
    """
    messages = conversation.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise BadConversation("needs `messages`, a list of objects with role and content")
    out = _Writer()
    if conversation.get("tools"):
        out.message("system", _compact(conversation["tools"], sort=True), type="tool-declare")
    effort = conversation.get("thinking_effort")
    if effort is not None:
        if effort not in EFFORTS:
            raise BadConversation(f"thinking_effort={effort!r} must be one of {', '.join(EFFORTS)}")
        out.message("system", effort, type="thinking-effort")
    for message, calls in _in_call_order(messages):
        role = message.get("role")
        if role not in ROLES:
            raise BadConversation(f"role={role!r} must be one of {', '.join(ROLES)}")
        if role == "assistant":
            _assistant(out, message, thinking)
        elif role == "tool":
            index, name = calls
            out.message("tool", _text(message), tool=name, index=str(index))
        else:
            out.message(role, _text(message))
    for key in ("tool_choice", "response_format"):
        value = conversation.get(key)
        if value is not None:
            out.message("system", value if isinstance(value, str) else _compact(value, sort=True), type=key.replace("_", "-"))
    if generate:
        out.open("message", role="assistant")
        out.open("think" if thinking else "response")
    return out.segments


def encode(conversations: Sequence[dict], tokenizer: Tokenizer, *, thinking: bool = True) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids (n,) int32 and targets (n,) bool of each conversation; all text goes to the tokenizer in one batch.

    Raises:
        BadConversation: from `render`.
        UserError: the tokenizer has no marker tokens.
    """
    marker_ids = marker_ids_of(tokenizer)
    rendered = [render(c, thinking=thinking) for c in conversations]
    texts = [s.text for segments in rendered for s in segments if not s.is_marker]
    encoded = iter(tokenizer.encode_batch(texts))
    result = []
    for segments in rendered:
        parts = [np.array([marker_ids[s.text]], np.int32) if s.is_marker else next(encoded) for s in segments]
        counted = np.repeat([s.counted for s in segments], [len(p) for p in parts])
        result.append((np.concatenate(parts), counted))
    return result


def marker_ids_of(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of the four markers.

    Raises:
        UserError: the tokenizer lacks one.
    """
    missing = [name for name in CHAT_MARKERS if name not in tokenizer.special_ids]
    if missing:
        raise UserError(f"data.tokenizer={tokenizer.path} has no special token {missing[0]}, which conversations need; add {' '.join(CHAT_MARKERS)} to it, or choose a tokenizer that has them")
    return {name: tokenizer.special_ids[name] for name in CHAT_MARKERS}


class _Writer:
    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.counted = False

    def mark(self, name: str) -> None:
        self.segments.append(Segment(name, True, self.counted))

    def text(self, text: str) -> None:
        if text:
            self.segments.append(Segment(text, False, self.counted))

    def open(self, tag: str, **attributes: str) -> None:
        self.mark(OPEN)
        self.text(tag + "".join(f' {key}="{_escaped(value)}"' for key, value in attributes.items()))
        self.mark(SEP)

    def close(self, tag: str) -> None:
        self.mark(CLOSE)
        self.text(tag)
        self.mark(SEP)

    def element(self, tag: str, content: str, **attributes: str) -> None:
        self.open(tag, **attributes)
        self.text(content)
        self.close(tag)

    def message(self, role: str, content: str, **attributes: str) -> None:
        self.element("message", content, role=role, **attributes)
        self.mark(END_OF_MESSAGE)


def _assistant(out: _Writer, message: dict, thinking: bool) -> None:
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise BadConversation(f"weight={weight!r} of an assistant message must be 0 or 1")
    calls = message.get("tool_calls") or []
    content = _text(message)
    out.open("message", role="assistant")
    out.counted = bool(weight)
    if thinking:
        out.element("think", message.get("reasoning_content") or "")
    if content or not calls:
        out.element("response", content)
    if calls:
        out.open("tools")
        for index, call in enumerate(calls, start=1):
            out.open("call", tool=_function(call)["name"], index=str(index))
            _arguments(out, _function(call).get("arguments"))
            out.close("call")
        out.close("tools")
    out.close("message")
    out.mark(END_OF_MESSAGE)
    out.counted = False


def _arguments(out: _Writer, arguments: object) -> None:
    parsed = arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments else {}
        except json.JSONDecodeError:
            parsed = None
    if parsed is None and arguments is None:
        return
    if not isinstance(parsed, dict):
        # What no parser of ours could take apart is shown to the model and never asked of it.
        counted, out.counted = out.counted, False
        out.element("json", arguments if isinstance(arguments, str) else _compact(arguments), type="object")
        out.counted = counted
        return
    for key, value in parsed.items():
        out.element("argument", value if isinstance(value, str) else _compact(value), key=key, type=_json_type(value))


def _in_call_order(messages: list[dict]):
    """Each message with (index, tool name) where it is a tool's; results of one assistant message come in the order of its calls."""
    calls: list[dict] = []
    results: list[tuple[int, dict, str]] = []
    for message in [*messages, None]:
        if message is not None and message.get("role") == "tool":
            ids = [call.get("id") for call in calls]
            wanted = message.get("tool_call_id")
            at = ids.index(wanted) if wanted is not None and wanted in ids else len(results) if wanted is None and len(results) < len(calls) else None
            if at is None:
                raise BadConversation(f"tool message with tool_call_id={wanted!r} answers no call of the assistant message before it")
            results.append((at, message, _function(calls[at])["name"]))
            continue
        for at, result, name in sorted(results, key=lambda r: r[0]):
            yield result, (at + 1, name)
        if message is None:
            return
        results, calls = [], message.get("tool_calls") or []
        yield message, None


def _function(call: object) -> dict:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadConversation("tool_calls needs objects with function.name and function.arguments")
    return function


def _text(message: dict) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    raise BadConversation(f"content of a {message.get('role')} message must be text, or a list of parts of type text")


def _json_type(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = {str: "string", type(None): "null", int: "number", float: "number", dict: "object", list: "array"}
    return kinds[type(value)]


def _compact(value: object, *, sort: bool = False) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=sort)


def _escaped(value: str) -> str:
    return value.replace("&", "&amp;").replace('"', "&quot;")
