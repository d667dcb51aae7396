"""Sample text from the newest checkpoint of a run.

    python tools/generate.py runs/default "def main("
    python tools/generate.py runs/default "import os" --tokens 200 --temperature 0.8 --top-p 0.95 --seed 1 --json
    python tools/generate.py runs/default/checkpoints/step_00000200 ""       # one checkpoint, from an empty prompt
    python tools/generate.py s3://bucket/run "def " --tokenizer tokenizer.json

The whole prefix is computed again for every token: simple, and exactly what training computed. Text shows as it grows.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megamoe.utils.errors import UserError, check  # noqa: E402


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="run folder, one of its checkpoints, or s3://bucket/prefix")
    parser.add_argument("prompt", nargs="?", default="", help="text to continue (default: the beginning of a document)")
    parser.add_argument("--tokens", type=int, default=128, help="at most so many new tokens (default 128)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 always takes the likeliest token (default 0.8)")
    parser.add_argument("--top-p", type=float, default=0.95, help="sample from the likeliest tokens that hold this probability (default 0.95)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text (default 0)")
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer file, when the run's own is not where it was")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of text as it grows")
    args = parser.parse_args(argv)
    try:
        check(args.tokens >= 0, "--tokens", args.tokens, "must be zero or above")
        check(args.temperature >= 0, "--temperature", args.temperature, "must be zero (always the likeliest) or above")
        check(0 < args.top_p <= 1, "--top-p", args.top_p, "must lie in (0, 1]; 1 samples from all tokens")
        print(json.dumps(generate(args)) if args.json else generate(args, show=sys.stdout)["stopped"], file=sys.stdout if args.json else sys.stderr)
    except UserError as error:
        print(f"generate: {error}", file=sys.stderr)
        return 2
    return 0


def generate(args: argparse.Namespace, show=None) -> dict:
    """Load, sample, and report; new text goes to `show` as soon as it is whole characters."""
    import torch

    checkpoint = newest_checkpoint(args.run)
    config, model, step, fingerprint = load(checkpoint, args.device)
    tokenizer = find_tokenizer(args.tokenizer, Path(args.run), config, fingerprint)
    prompt_ids = [tokenizer.eod_id, *map(int, tokenizer.encode(args.prompt))]
    random = torch.Generator().manual_seed(args.seed)
    new_ids: list[int] = []
    shown = ""
    if show:
        show.write(args.prompt)
    for token in sample(model, prompt_ids, args.tokens, temperature=args.temperature, top_p=args.top_p, tokenizer=tokenizer, random=random):
        new_ids.append(token)
        text = tokenizer.decode(new_ids)
        # A character may need several tokens; until it is whole, decoding ends in the replacement mark.
        if show and not text.endswith("\ufffd"):
            show.write(text[len(shown) :])
            show.flush()
            shown = text
    text = tokenizer.decode(new_ids)
    if show:
        show.write(text[len(shown) :] + "\n")
        show.flush()
    stopped = "end of document" if len(new_ids) < args.tokens else f"{args.tokens} tokens"
    return {"run": args.run, "checkpoint": checkpoint.location, "step": step, "model": config.model.name, "prompt": args.prompt, "text": text,
            "tokens": len(new_ids), "stopped": stopped, "seed": args.seed, "temperature": args.temperature, "top_p": args.top_p}


def sample(model, prompt_ids: list[int], max_tokens: int, *, temperature: float, top_p: float, tokenizer, random):
    """Yield new token ids until the end of the document (not yielded) or `max_tokens`.

    Args:
        model: a `Transformer` in evaluation mode: routing biases stay as they are.
        prompt_ids: at least one token; training put the end-of-document token in front of every document.
        temperature: divides the logits; 0 takes the likeliest.
        top_p: keep the smallest set of likeliest tokens that holds this probability.
        tokenizer: its `eod_id` ends the text; ids past its `vocab_size`, which pad some models' heads, are never drawn.
        random: a CPU `torch.Generator`, so that a seed gives the same text on every device that computes the same logits.
    """
    import torch

    from megamoe.layers.moe import hold_rounded

    device = next(model.parameters()).device
    ids = list(prompt_ids)
    # Weights stay: experts trained for MXFP4 are rounded once, not once a token.
    with hold_rounded(model):
        for _ in range(max_tokens):
            with torch.no_grad():
                tokens_T = torch.tensor(ids, device=device)
                hidden_TD = model(tokens_T, cu_seqlens=torch.tensor([0, len(ids)], dtype=torch.int32, device=device))
                logits_V = model.head(hidden_TD[-1:])[0, : tokenizer.vocab_size].float().cpu()
            token = choose_token(logits_V, temperature, top_p, random)
            if token == tokenizer.eod_id:
                return
            ids.append(token)
            yield token


def choose_token(logits_V, temperature: float, top_p: float, random) -> int:
    """One draw from the nucleus of softmax(logits / temperature). The likeliest token is always in it."""
    import torch

    if temperature == 0:
        return int(logits_V.argmax())
    probability_V, order_V = torch.softmax(logits_V.double() / temperature, -1).sort(descending=True, stable=True)
    # A token stays when those before it do not hold top_p yet.
    probability_V[probability_V.cumsum(-1) - probability_V >= top_p] = 0
    return int(order_V[torch.multinomial(probability_V, 1, generator=random)])


def newest_checkpoint(path: str):
    """The `Checkpoint` itself, or the newest committed one of a run folder, of a folder of checkpoints, or of s3://….

    Raises:
        UserError: there is none, or it is damaged.
    """
    from megamoe.checkpoint.objects import Objects, StoreError
    from megamoe.checkpoint.reader import committed, open_checkpoint, refuse_first_form

    path = path.rstrip("/")
    if path.rpartition("/")[2].startswith("step_"):
        return open_checkpoint(path)
    try:
        for place in [Objects(path)] if "://" in path else [Objects(path), Objects(f"{path}/checkpoints")]:
            if steps := committed(place):
                return open_checkpoint(f"{place.location}/{steps[-1]}")
            refuse_first_form(place)
    except StoreError as error:
        raise UserError(f"RUN={path}: cannot be read ({error})") from None
    raise UserError(f"RUN={path}: holds no complete checkpoint; name a run folder, or one of its checkpoints/step_… folders")


def load(checkpoint, device: str):
    """(Config, Transformer in evaluation mode, step, tokenizer fingerprint) of a `Checkpoint`.

    Raises:
        UserError: a damaged checkpoint, or a GPU that is not there.
    """
    import torch

    from megamoe.checkpoint.format import MODEL
    from megamoe.model.params import logical_name
    from megamoe.model.transformer import Transformer
    from megamoe.train.config import Config
    from megamoe.utils.plain import from_plain

    stored = checkpoint.state.get("config")
    check(isinstance(stored, dict), "RUN", checkpoint.location, "does not say which model it holds; name a checkpoint of a training run")
    config = from_plain(Config, stored)
    gpu = torch.cuda.is_available()
    check(device != "cuda" or gpu, "--device", device, "torch sees no GPU; use --device cpu")
    with torch.device("meta"):
        model = Transformer(config.model)
    weights = {path: checkpoint.read(MODEL + logical_name(path)) for path in model.state_dict()}
    if not gpu or device == "cpu":
        weights = {name: value.float() if value.dtype == torch.bfloat16 else value for name, value in weights.items()}
    model = Transformer(config.model)
    model.load_state_dict(weights, assign=True)
    model = model.to("cuda" if gpu and device != "cpu" else "cpu").eval()
    identity = checkpoint.state.get("identity")
    return config, model, checkpoint.step, identity.get("tokenizer") if isinstance(identity, dict) else None


def find_tokenizer(chosen: str | None, run: Path, config, fingerprint: str | None):
    """The tokenizer that the checkpoint was trained with: a named one, one kept in the run folder, or the run's own cached one.

    Args:
        run: the run folder, or a checkpoint in its `checkpoints`.

    Raises:
        UserError: none found, or not the one of the checkpoint: its ids would mean other text.
    """
    from megamoe.data.sources import token_files
    from megamoe.data.tokenizer import load_tokenizer

    kept = [p for folder in (run, *run.parents[:2]) for name in ("tokenizer.json", "*.tokenizer.json", "*.tiktoken", "tiktoken.model") for p in sorted(folder.glob(name))]
    if chosen or kept:
        tokenizer = load_tokenizer(chosen or kept[0], special_tokens=config.data.special_tokens, eod_token=config.data.eod_token)
    else:
        tokenizer = token_files(config.data, config.model.vocab_size)[0]
    check(fingerprint in (None, tokenizer.fingerprint), "--tokenizer", tokenizer.path, "is not the one the checkpoint was trained with; name that one")
    return tokenizer


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
