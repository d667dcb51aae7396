"""Sampled text comes from the distribution that was asked for, and stops where the document does.

Why it matters: sampling is how people judge a model; a nucleus off by one token or a tokenizer of another run makes a
good model look broken. A stand-in model with known logits shows each property alone.
Not covered: the quality of text, speed, GPUs.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megamoe.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("generate_tool", ROOT / "tools" / "generate.py")
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)

EOD = 0


class Counting(torch.nn.Module):
    """After token n comes n+1, with certainty; after 5, the end. Ids 6 and 7 pad the head and look likeliest of all."""

    def __init__(self):
        super().__init__()
        self.anchor = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[list[int]] = []

    def forward(self, tokens_T, *, cu_seqlens):
        assert cu_seqlens.tolist() == [0, len(tokens_T)] and cu_seqlens.dtype == torch.int32
        self.seen.append(tokens_T.tolist())
        return tokens_T[:, None].float()

    def head(self, hidden_TD):
        following_T = (hidden_TD[:, 0].long() + 1) % 6
        logits_TV = torch.nn.functional.one_hot(following_T, 8).float() * 100
        logits_TV[:, 6:] = 1000
        return logits_TV


TOKENIZER = SimpleNamespace(eod_id=EOD, vocab_size=6)


def draw(model, prompt, n, temperature=1.0, top_p=1.0, seed=0):
    return list(tool.sample(model, prompt, n, temperature=temperature, top_p=top_p, tokenizer=TOKENIZER, random=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("temperature", [0, 0.5, 1.0])
def test_text_ends_with_the_document_and_never_in_padding(temperature):
    assert draw(Counting(), [EOD], 100, temperature) == [1, 2, 3, 4, 5]


def test_text_ends_at_the_limit_and_the_whole_prefix_is_seen():
    model = Counting()
    assert draw(model, [EOD, 1], 2) == [2, 3]
    assert model.seen == [[0, 1], [0, 1, 2]]
    assert draw(model, [EOD], 0) == []


def counts(logits, temperature, top_p, n=4000):
    random = torch.Generator().manual_seed(1)
    draws = torch.tensor([tool.choose_token(torch.tensor(logits), temperature, top_p, random) for _ in range(n)])
    return torch.bincount(draws, minlength=len(logits)).double() / n


def test_sampling_follows_the_softmax():
    logits = [0.0, 2.0, 1.0]
    for temperature in (1.0, 2.0):
        expected = torch.softmax(torch.tensor(logits, dtype=torch.float64) / temperature, 0)
        # Four standard errors of a frequency over 4,000 draws.
        assert torch.allclose(counts(logits, temperature, 1.0), expected, atol=4 * 0.5 / 4000**0.5)


@pytest.mark.parametrize(("top_p", "kept"), [(1e-9, [0]), (0.49, [0]), (0.51, [0, 1]), (0.79, [0, 1]), (0.81, [0, 1, 2]), (1.0, [0, 1, 2])])
def test_the_nucleus_is_the_smallest_set_that_holds_top_p(top_p, kept):
    logits = torch.tensor([0.5, 0.3, 0.2]).log().tolist()
    got = counts(logits, 1.0, top_p, n=300)
    assert got.nonzero().flatten().tolist() == kept


def test_a_seed_gives_the_same_draw_and_another_seed_another():
    logits = torch.zeros(1000)

    def one(seed):
        random = torch.Generator().manual_seed(seed)
        return [tool.choose_token(logits, 1.0, 1.0, random) for _ in range(4)]

    assert one(3) == one(3) != one(4)


def test_the_newest_complete_checkpoint_is_taken(tmp_path):
    from megamoe.checkpoint.writer import write_checkpoint

    for step in (10, 200):
        write_checkpoint(tmp_path / "checkpoints", step, [("model/x", torch.zeros(1))], {})
    (tmp_path / "checkpoints" / "step_00000300").mkdir()
    assert tool.newest_checkpoint(str(tmp_path)).step == 200
    assert tool.newest_checkpoint(str(tmp_path / "checkpoints")).step == 200
    assert tool.newest_checkpoint(str(tmp_path / "checkpoints" / "step_00000010")).step == 10


def test_a_tokenizer_of_another_run_is_refused(tmp_path, monkeypatch):
    import megamoe.data.sources as sources

    theirs = SimpleNamespace(fingerprint="b", path="cache/tokenizer.json")
    monkeypatch.setattr(sources, "token_files", lambda data, vocab_size: (theirs, [], []))
    config = SimpleNamespace(data=SimpleNamespace(special_tokens={}, eod_token=""), model=SimpleNamespace(vocab_size=6))
    assert tool.find_tokenizer(None, tmp_path, config, "b") is theirs
    with pytest.raises(UserError, match="not the one the checkpoint was trained with"):
        tool.find_tokenizer(None, tmp_path, config, "a")


@pytest.mark.parametrize(
    ("args", "message"),
    [(["--top-p", "0"], "--top-p=0.0: must lie"), (["--temperature", "-1"], "--temperature=-1.0: must be"), (["--tokens", "-1"], "--tokens=-1: must be"), ([], "holds no complete checkpoint")],
)
def test_mistakes_are_one_line(args, message, tmp_path, capsys):
    assert tool.main([str(tmp_path), "x", *args]) == 2
    seen = capsys.readouterr()
    assert seen.out == "" and seen.err.count("\n") == 1 and message in seen.err


def test_characters_of_several_tokens_are_shown_whole(monkeypatch, tmp_path):
    """Each token is one byte of `é`: nothing of it may be shown before its second byte."""
    import io

    shown = []

    class Show(io.StringIO):
        def write(self, text):
            shown.append(text)

    data = [0xC3, 0xA9, 0x21]
    tokenizer = SimpleNamespace(eod_id=EOD, encode=lambda text: [], decode=lambda ids: bytes(ids).decode("utf-8", "replace"))
    monkeypatch.setattr(tool, "newest_checkpoint", lambda path: SimpleNamespace(location=path))
    monkeypatch.setattr(tool, "load", lambda checkpoint, device: (SimpleNamespace(model=SimpleNamespace(name="m")), None, 7, None))
    monkeypatch.setattr(tool, "find_tokenizer", lambda *a: tokenizer)
    monkeypatch.setattr(tool, "sample", lambda *a, **k: iter(data))
    args = SimpleNamespace(run=str(tmp_path), prompt="caf", device="cpu", tokenizer=None, tokens=8, temperature=1.0, top_p=1.0, seed=0)
    found = tool.generate(args, show=Show())
    assert "".join(shown) == "café!\n" and not any("\ufffd" in part for part in shown)
    assert (found["text"], found["stopped"], found["step"]) == ("é!", "end of document", 7)
    json.dumps(found)
