"""The whole model: its layer loop, documents, causality, recomputation, cuts into stages, and every switch.

Why it matters: what is checked here cannot be seen from a layer: the order in which rows enter the bank, a document
reading its neighbour, statistics counted twice when backward runs a layer again, a stage that begins inside an AttnRes
block. float64 on a toy that has every part of the family.

Not covered: agreement with foreign code (test_kimi_linear_parity.py, tests/layers/test_kda.py); several ranks
(tests/parallel).
"""

from __future__ import annotations

import pytest
import torch

from megamoe.layers.balance import update_router_biases
from megamoe.layers.kda import KDA
from megamoe.layers.router import Router
from megamoe.layers.stream import Stream
from megamoe.model.block import RECOMPUTE
from megamoe.model.config import Activation, AttnResKind, Balancing, GateKind, OutputGate, RopeKind
from megamoe.model.mtp import mtp_labels
from megamoe.model.transformer import Transformer
from megamoe.ops.attn_res_mix.reference import attn_res_mix
from megamoe.testing.models import cu_seqlens, toy_config, toy_model

LENGTHS = (7, 0, 20, 1, 5)
T = sum(LENGTHS)


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 50, (T,), generator=generator), torch.randint(0, 50, (T,), generator=generator), cu_seqlens(*LENGTHS)


def step(model, tokens, labels, cu, **kwargs):
    """Summed loss with gradients in place."""
    model.zero_grad()
    hidden = model(tokens, cu_seqlens=cu, **kwargs)
    loss = model.token_losses(hidden, labels).sum()
    if model.config.mtp.num_layers:
        loss = loss + 0.3 * model.mtp_token_losses(hidden, tokens, labels, cu_seqlens=cu, **kwargs).sum()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(a, b, atol=0.0):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=atol, rtol=0, msg=lambda m, name=name: f"{name}: {m}")


def literal_loop(model, tokens, stream, kind):
    """The layer loop as the paper has it: block size 2, or every sublayer a row."""

    def mix(place, rows):
        return attn_res_mix(rows, place.proj.weight[0], place.norm.weight, eps=1e-5)

    def attention(layer, h):
        x = layer.input_layernorm(h)
        return layer.self_attn(x, stream)[0] if isinstance(layer.self_attn, KDA) else layer.self_attn(x, stream)

    def ffn(layer, h):
        x = layer.post_attention_layernorm(h)
        return layer.block_sparse_moe(x)[0] if layer.is_moe else layer.mlp(x)

    layers, x = list(model.layers.values()), model.embed_tokens.weight[tokens]
    if kind is AttnResKind.off:
        for layer in layers:
            x = x + attention(layer, x)
            x = x + ffn(layer, x)
        return x
    if kind is AttnResKind.full:
        rows = [x]
        for layer in layers:
            rows.append(attention(layer, mix(layer.self_attention_res, rows)))
            rows.append(ffn(layer, mix(layer.mlp_res, rows)))
        return mix(model.output_attn_res, rows)
    rows, total = [x], None
    for number, layer in enumerate(layers):
        if number % 2 == 0 and number:
            h = mix(layer.self_attention_res, rows + [total])
            rows.append(total)
            total = attention(layer, h)
        elif number == 0:
            total = attention(layer, x)  # nothing to mix yet
        else:
            total = total + attention(layer, mix(layer.self_attention_res, rows + [total]))
        total = total + ffn(layer, mix(layer.mlp_res, rows + [total]))
    assert len(rows) == 3
    return mix(model.output_attn_res, rows + [total])


@pytest.mark.parametrize("kind", list(AttnResKind))
def test_layer_loop_is_the_papers(kind):
    model, (tokens, _, cu) = toy_model(toy_config(attn_res=kind)), batch()
    expected = literal_loop(model, tokens, Stream.build(T, cu), kind)
    torch.testing.assert_close(model(tokens, cu_seqlens=cu), expected, atol=1e-12, rtol=0)


SWITCHES = {
    "default": {},
    "kimi_linear": dict(
        attn_res=AttnResKind.off, kda__gate=GateKind.softplus, kda__output_gate=OutputGate.lowrank, mla__output_gate=False, mla__q_lora_rank=None,
        ffn__act=Activation.silu, moe__latent=None, moe__routed_scaling_factor=2.446, moe__balancing=Balancing.sign,
    ),
    "full_attn_res": dict(attn_res=AttnResKind.full),
    "tied_mtp": dict(tie_embeddings=True, mtp__num_layers=1),
    "mtp_plain": dict(attn_res=AttnResKind.off, mtp__num_layers=1),
    "rotary": dict(mla__rope=RopeKind.rotary),
    "linear": dict(mla__rope=RopeKind.linear, mla__rope_factor=2.0),
    "yarn": dict(mla__rope=RopeKind.yarn, mla__rope_factor=4.0, mla__original_max_seq_len=16),
    "threshold": dict(moe__balancing=Balancing.threshold),
    "no_balancing_no_shared": dict(moe__balancing=Balancing.none, moe__num_shared_experts=0, moe__latent_norm=False),
    "dense": dict(moe__first_dense_layers=5),
    "all_kda": dict(full_attn_layers=[]),
    "all_mla": dict(full_attn_layers=[1, 2, 3, 4, 5]),
}  # fmt: skip


@pytest.mark.parametrize("name", SWITCHES)
def test_gradient_is_the_derivative_with_every_switch(name):
    """Along a random direction through all parameters at once, against a central difference; then one step downhill."""
    model, (tokens, labels, cu) = toy_model(toy_config(**SWITCHES[name])), batch()
    loss, grads = step(model, tokens, labels, cu)
    count_since_last_call(model)
    assert all(g.isfinite().all() for g in grads.values())
    silent = [n for n, g in grads.items() if not g.any() and not n.startswith(("layers.0.self_attention_res", "mtp.block.self_attention_res"))]
    assert not silent, "parameters without any gradient"
    params = list(model.parameters())

    def at(distance, along):
        """(loss, slots per expert) with all parameters moved."""
        with torch.no_grad():
            for p, d in zip(params, along):
                p.add_(d, alpha=distance)
            value = step_loss(model, tokens, labels, cu)
            for p, d in zip(params, along):
                p.sub_(d, alpha=distance)
        return value, count_since_last_call(model)

    # Routing is piecewise constant: take the first direction along which no token changes an expert.
    for _ in range(5):
        direction, h = [torch.randn_like(p) for p in params], 1e-6
        (above, routed_above), (below, routed_below) = at(h, direction), at(-h, direction)
        if torch.equal(routed_above, routed_below):
            break
    else:
        pytest.fail("no direction without a change of experts: the toy sits on a tie")
    exact = sum((grads[n] * d).sum() for (n, _), d in zip(model.named_parameters(), direction))
    torch.testing.assert_close((above - below) / (2 * h), exact, atol=1e-5, rtol=1e-5)
    norm = sum(g.square().sum() for g in grads.values()).sqrt()
    assert at(-1e-6 / norm.item(), list(grads.values()))[0] < loss
    update_router_biases(model)
    assert all(b.isfinite().all() for b in model.buffers())


def count_since_last_call(model):
    """Slots per expert since the last call, (layers, experts), biases untouched."""
    routers = [m for m in model.modules() if isinstance(m, Router)]
    counts = [r.count_E.clone() for r in routers]
    for r in routers:
        r.reset_stats()
    return torch.stack(counts) if counts else torch.zeros(0)


def step_loss(model, tokens, labels, cu):
    hidden = model(tokens, cu_seqlens=cu)
    loss = model.token_losses(hidden, labels).sum()
    if model.config.mtp.num_layers:
        loss = loss + 0.3 * model.mtp_token_losses(hidden, tokens, labels, cu_seqlens=cu).sum()
    return loss


@pytest.mark.parametrize("name", ["default", "kimi_linear", "yarn", "tied_mtp"])
def test_a_packed_document_is_the_document_alone(name):
    """Hidden states, and the gradients of the packed batch as the sum over documents."""
    model, (tokens, labels, cu) = toy_model(toy_config(**SWITCHES[name])), batch()
    hidden = model(tokens, cu_seqlens=cu)
    _, packed = step(model, tokens, labels, cu)
    total = {n: torch.zeros_like(g) for n, g in packed.items()}
    for t, l, h in zip(tokens.split(LENGTHS), labels.split(LENGTHS), hidden.split(LENGTHS)):
        if not len(t):
            continue
        alone = cu_seqlens(len(t))
        torch.testing.assert_close(model(t, cu_seqlens=alone), h, atol=1e-12, rtol=0)
        for n, g in step(model, t, l, alone)[1].items():
            total[n] += g
    assert_same(packed, total, atol=1e-10)


def test_later_tokens_change_nothing_before_them():
    """To the last bit or two: later tokens change how many rows an expert multiplies, and with it a product's rounding.
    The KDA op by itself is held to bit equality in tests/ops/test_kda_chunk.py."""
    model, (tokens, _, _) = toy_model(toy_config()), batch()
    whole = cu_seqlens(T)
    before = model(tokens, cu_seqlens=whole)
    for P in (1, 16, 17, 30):
        changed = tokens.clone()
        changed[P:] = (changed[P:] + 7) % 50
        after = model(changed, cu_seqlens=whole)
        torch.testing.assert_close(after[:P], before[:P], atol=1e-13, rtol=0)
        assert (after[P] - before[P]).abs().max() > 1e-3


@pytest.mark.parametrize("policy", RECOMPUTE[1:])
@pytest.mark.parametrize("kind", [AttnResKind.block, AttnResKind.full])
def test_recomputation_changes_no_bit(policy, kind):
    """Loss, every gradient, and the routing statistics: counted once although backward runs the router again."""
    config, data = toy_config(attn_res=kind, mtp__num_layers=1), batch()
    results = []
    for recompute in ("none", policy):
        model = toy_model(config, recompute=recompute)
        loss, grads = step(model, *data)
        stats = {n: b.clone() for n, b in model.named_buffers() if n.endswith(("count_E", "histogram_EB"))}
        assert sum(int(b.sum()) for n, b in stats.items() if n.endswith("count_E")) == 5 * T * 2
        update_router_biases(model)
        results.append({"loss": loss, **grads, **stats, **{n: b for n, b in model.named_buffers() if n.endswith("bias")}})
    assert_same(*results)


@pytest.mark.parametrize("cuts", [(1,), (2, 3), (4,)])
def test_parts_of_a_model_are_the_model(cuts):
    """Cut anywhere, also inside an AttnRes block: the bank and the running sum are all that travels."""
    config, (tokens, labels, cu) = toy_config(mtp__num_layers=1), batch()
    whole = toy_model(config)
    loss, grads = step(whole, tokens, labels, cu)
    borders = [0, *cuts, config.num_layers]
    parts = [toy_model(config, layers=range(a, b), embed=a == 0, head=b == config.num_layers) for a, b in zip(borders, borders[1:])]
    stream, bank, prefix = Stream.build(T, cu), (), parts[0].embed(tokens)
    for part in parts:
        bank, prefix = part.run_layers(bank, prefix, stream)
        assert len(bank) == config.bank_rows_before(borders[parts.index(part) + 1])
    last = parts[-1]
    hidden = last.finish(bank, prefix)
    total = last.token_losses(hidden, labels).sum() + 0.3 * last.mtp_token_losses(hidden, tokens, labels, cu_seqlens=cu).sum()
    total.backward()
    torch.testing.assert_close(total.detach(), loss, atol=1e-12, rtol=0)
    summed: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, p in part.named_parameters():
            summed[name] = summed.get(name, 0) + p.grad  # the embedding lives on the first and, for MTP, the last part
    assert_same(summed, grads, atol=1e-11)


def test_padding_is_invisible():
    """A padding document at the end: same loss and gradients, same statistics, whatever tokens it holds."""
    model, (tokens, labels, cu) = toy_model(toy_config()), batch()
    loss, grads = step(model, tokens, labels, cu)
    stats = [b.clone() for n, b in model.named_buffers() if n.endswith(("count_E", "histogram_EB"))]
    count_since_last_call(model)
    mask = torch.arange(T + 9) < T
    padded = torch.cat([tokens, torch.randint(0, 50, (9,))])
    padded_loss, padded_grads = step(model, padded, torch.cat([labels, torch.full((9,), -100)]), torch.cat([cu, cu[-1:] + 9]), token_mask_T=mask)
    torch.testing.assert_close(padded_loss, loss, atol=1e-12, rtol=0)
    assert_same(padded_grads, grads, atol=1e-11)
    assert all(torch.equal(a, b) for a, b in zip(stats, (b for n, b in model.named_buffers() if n.endswith(("count_E", "histogram_EB")))))


def test_mtp_predicts_the_token_after_next_from_the_past_and_the_next():
    config, (tokens, labels, cu) = toy_config(mtp__num_layers=1), batch()
    labels[3] = -100
    shifted = mtp_labels(labels, Stream.build(T, cu))
    ends = [6, 26, 27, 32]
    for t in range(T):
        assert shifted[t] == (-100 if t in ends else labels[t + 1])
    model = toy_model(config)

    def losses(x):
        return model.mtp_token_losses(model(x, cu_seqlens=cu), x, labels, cu_seqlens=cu)

    before = losses(tokens)
    assert not before[[2, *ends]].any() and (before > 0).sum() == T - 5
    changed = tokens.clone()
    changed[12] = (changed[12] + 1) % 50
    differs = ((losses(changed) - before).abs() > 1e-10).nonzero()[:, 0].tolist()
    assert min(differs) == 11, "token 12 reaches the prediction made at 11, and none before"
    assert max(differs) < 26, "and stays in its document"


def test_bfloat16_is_close_to_float32():
    """Weights cast once; the loss moves by rounding, the decay parameters stay in fp32, every gradient is finite."""
    # Small weights: with large ones a rounding moves tokens to other experts and the gradients are of another function.
    config, data = toy_config(mtp__num_layers=1, init_std=0.05), batch()
    exact, grads32 = step(toy_model(config, dtype=torch.float32, jitter=0.02), *data)
    model = toy_model(config, dtype=torch.float32, jitter=0.02).bfloat16()
    rounded, grads16 = step(model, *data)
    assert rounded.dtype == torch.float32 and abs(rounded / exact - 1) < 0.01
    assert {n for n, p in model.named_parameters() if p.dtype == torch.float32} == {n for n, p in model.named_parameters() if p.megamoe.keep_wide}
    for name, g in grads16.items():
        assert g.isfinite().all()
    big = [n for n, g in grads32.items() if g.norm() > 0.1 * max(x.norm() for x in grads32.values())]
    assert big and all(torch.nn.functional.cosine_similarity(grads16[n].float().flatten(), grads32[n].flatten(), dim=0) > 0.99 for n in big)


def test_wrong_inputs_are_named():
    model, (tokens, labels, cu) = toy_model(toy_config()), batch()
    with pytest.raises(ValueError, match="cu_seqlens=torch.int64"):
        model(tokens, cu_seqlens=cu.long())
    with pytest.raises(ValueError, match="token_mask_T"):
        model(tokens, cu_seqlens=cu, token_mask_T=torch.ones(3))
    with pytest.raises(ValueError, match="mtp.num_layers=0"):
        model.mtp_token_losses(model(tokens, cu_seqlens=cu), tokens, labels, cu_seqlens=cu)
    with pytest.raises(ValueError, match="recompute='some'"):
        Transformer(toy_config(), recompute="some")
