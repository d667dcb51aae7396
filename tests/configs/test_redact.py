"""No secret reaches a file, a log or an upload; no setting is lost to over-caution.

Why it matters: a key in a saved configuration is a key in every checkpoint and dashboard copied from it.
Not covered: secrets under innocent names, or inside free text that is not a URL.
"""

from __future__ import annotations

import pytest

from launch.schema import compose, to_dict
from megamoe.utils.redact import REDACTED, is_secret_name, redact, redact_text


@pytest.mark.parametrize(
    "name",
    ["key", "api_key", "WANDB_API_KEY", "wandbApiKey", "apikey", "accessKey", "aws_secret_access_key", "token", "hf_token", "HF_TOKEN", "sessionToken",
     "secret", "client_secret", "password", "db_passwd", "passphrase", "credentials", "storage_keys", "auth", "SECRET"],
)
def test_secrets_are_known_by_name(name):
    assert is_secret_name(name)
    assert redact({"a": [{name: "hunter2"}]}) == {"a": [{name: REDACTED}]}


@pytest.mark.parametrize(
    "name", ["tokenizer", "text_key", "eod_token", "vocab", "vocab_size", "keyboard", "tokenized", "author", "secretary", "kda", "run_dir", "wandb_project"]
)
def test_settings_are_not_secrets(name):
    assert redact({name: "value"}) == {name: "value"}


def test_counts_of_tokens_are_not_secrets():
    plain = {"global_batch_tokens": 8192, "num_key_value_heads": 4, "special_tokens": {"<|eod|>": 3}, "token": True, "key": None, "api_key": ""}
    assert redact(plain) == plain


def test_every_default_setting_survives():
    """A new field whose name sounds like a secret must be put on one side or the other on purpose."""
    for overrides in ([], ["data=indexed", "data.paths=[a]", "data.eod_token=end", "data.tokenizer=t.json"]):
        plain = to_dict(compose(overrides))
        assert redact(plain) == plain


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("s3://me:hunter2@store:9000/a?x=1", f"s3://me:{REDACTED}@store:9000/a?x=1"),
        ("redis://:hunter2@queue/0", f"redis://:{REDACTED}@queue/0"),
        ("https://u:p@ss:hunter2@h/x", f"https://u:{REDACTED}@h/x"),
        ("https://h/x?sig=hunter2&y=2", f"https://h/x?sig={REDACTED}&y=2"),
        ("GET https://h/x?api_key=hunter2 failed", f"GET https://h/x?api_key={REDACTED} failed"),
        ("az://c/b?sv=1&X-Amz-Signature=hunter2", f"az://c/b?sv=1&X-Amz-Signature={REDACTED}"),
    ],
)
def test_urls_lose_their_passwords(text, clean):
    assert redact_text(text) == clean and "hunter2" not in redact_text(text)
    assert redact({"paths": [text]}) == {"paths": [clean]}


@pytest.mark.parametrize("text", ["https://host:443/a@b", "user@host:path", "C:/a:b@c", "step 3: loss 2.0 @ 10 tok/s", "https://h/x?page=2"])
def test_innocent_text_stays(text):
    assert redact_text(text) == text


def test_redaction_leaves_its_input_alone():
    plain = {"token": "hunter2", "nested": {"paths": ["s3://a:b@c"]}}
    redact(plain)
    assert plain == {"token": "hunter2", "nested": {"paths": ["s3://a:b@c"]}}
