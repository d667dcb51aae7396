"""Secrets come from the environment only; what still looks like one is blanked before it is written anywhere.

Applies to the saved configuration, to logs and to what W&B uploads. A string under a name that ends in a word such as
`key`, `token`, `secret` or `password` is a secret unless the name stands in `NOT_SECRET`: when in doubt the value goes.
Numbers never are: this field counts tokens everywhere (`global_batch_tokens`, `special_tokens: {name: id}`).
"""

from __future__ import annotations

import difflib
import re

REDACTED = "[redacted]"

# Settings of ours that only sound like secrets. A test holds this list against every field of `Config`.
NOT_SECRET = frozenset({"text_key", "eod_token"})

_SECRET_WORD = re.compile(r"(key|token|secret|password|passwd|passphrase|credential|auth)s?$")
# scheme://user:password@host, and ?token=… in any string
_URL_PASSWORD = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*://[^/\s:@]*):[^/\s]*@")
_QUERY_SECRET = re.compile(r"([?&;][\w.\-]*(?:key|token|secret|password|signature|sig|credential)[\w.\-]*)=[^&;\s#'\"]+", re.IGNORECASE)
# Shapes that services give their keys: W&B, Hugging Face, GitHub, GitLab, OpenAI and others, AWS, Slack, Google, JSON web tokens.
_KNOWN_SHAPE = re.compile(r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|AKIA|ASIA|xox[abprs]-|AIza|eyJ[\w-]{8,}\.|wandb_v\d_)[\w.\-]{8,}")
_SECRET_WORDS = ("token", "secret", "password", "passwd", "passphrase", "credential", "apikey")


def redact(value: object, name: str = "") -> object:
    """A copy of plain dicts, lists and scalars without secrets; the input is left as it is.

    Empty strings stay: they say that nothing is set.
    """
    if isinstance(value, dict):
        return {key: redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(item, name) for item in value]
    if not isinstance(value, str) or not value:
        return value
    return REDACTED if is_secret_name(name) else redact_text(value)


def redact_text(text: str) -> str:
    """Blank the passwords and query secrets of URLs and keys of known shape inside a text and keep the rest readable."""
    text = _KNOWN_SHAPE.sub(REDACTED, text)
    return _QUERY_SECRET.sub(rf"\1={REDACTED}", _URL_PASSWORD.sub(rf"\1:{REDACTED}@", text))


def shown_value(name: str, value: str) -> str:
    """What an error may repeat of a value under a name that no setting has. Such a name may be a misspelt secret's, and a
    value may be one under any name: numbers and short plain words stay, what is long and mixed goes."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name.rpartition(".")[2])
    misspelt = any(difflib.get_close_matches(word.lower(), _SECRET_WORDS, n=1, cutoff=0.8) for word in words)
    mixed = re.search(r"(?=[\w+/=.\-]*\d)(?=[\w+/=.\-]*[A-Za-z])[\w+=\-]{16,}", value)
    if value and not re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?", value) and (misspelt or mixed or any(is_secret_name(w) for w in words)):
        return REDACTED
    return redact_text(value)


def is_secret_name(name: str) -> bool:
    """Whether a string under this name is a secret. Words are told apart by case too: `apiKey` is `API_KEY`."""
    if name.lower() in NOT_SECRET:
        return False
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return any(_SECRET_WORD.search(word.lower()) for word in words)
