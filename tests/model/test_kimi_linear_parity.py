"""The Kimi-Linear switches together give the model that `transformers` implements independently, in float32 on a CPU.

Why it matters: every module of the family (projections and their row orders, convolutions, unbounded gate, delta rule,
NoPE MLA, sigmoid router with late weights and scaling, shared expert, both norm epsilons, residual order) is checked
against code that shares nothing with ours, on the same weights. Logits, loss and gradients.

Not covered: what Kimi-Linear lacks (bounded gate, AttnRes, latent width and norm, SiTU, output gate of MLA); document
packing (transformers runs one document per call here).
"""

from __future__ import annotations

import sys

import pytest
import torch

from megamoe.layers.config import FFNConfig, GateKind, KDAConfig, MLAConfig, MoEConfig, OutputGate
from megamoe.model.config import Activation, AttnResKind, Balancing, ModelConfig
from megamoe.model.init import init_parameters
from megamoe.model.transformer import Transformer

transformers = pytest.importorskip("transformers", minversion="5.20", reason="needs transformers with KimiLinearForCausalLM: pip install 'transformers>=5.20'")

VOCAB, WIDTH, LAYERS, HEADS, HEAD_DIM = 96, 48, 5, 3, 16


def our_config() -> ModelConfig:
    return ModelConfig(
        name="kimi_linear_toy", vocab_size=VOCAB, d_model=WIDTH, num_layers=LAYERS, full_attn_layers=[3, 5], attn_res=AttnResKind.off, init_std=0.1,
        kda=KDAConfig(num_heads=HEADS, head_dim=HEAD_DIM, gate=GateKind.softplus, output_gate=OutputGate.lowrank),
        mla=MLAConfig(num_heads=HEADS, q_lora_rank=None, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, output_gate=False),
        ffn=FFNConfig(act=Activation.silu, dense_size=64),
        moe=MoEConfig(num_experts=8, top_k=3, expert_size=20, latent=None, num_shared_experts=1, routed_scaling_factor=2.446, balancing=Balancing.sign),
    )  # fmt: skip


def their_model():
    # Where flash-linear-attention is installed transformers takes its GPU kernels at import, on a CPU too. Hide it for
    # that moment: the plain PyTorch path is the one that shares no code with ours.
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name == "fla" or name.startswith("fla.")}
    sys.modules["fla"] = None
    try:
        from transformers import KimiLinearConfig, KimiLinearForCausalLM
    finally:
        del sys.modules["fla"]
        sys.modules.update(hidden)

    config = KimiLinearConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=64, moe_intermediate_size=20, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, n_shared_experts=1, routed_scaling_factor=2.446, kv_lora_rank=24, q_lora_rank=None, qk_rope_head_dim=8, v_head_dim=16,
        qk_nope_head_dim=16, num_experts_per_tok=3, num_local_experts=8, linear_head_dim=HEAD_DIM, linear_num_heads=HEADS, rms_norm_eps=1e-5,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"],
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return KimiLinearForCausalLM(config).float().eval()


def as_theirs(name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The value of their parameter `name`, put together from ours: three fusions and two reshapes."""
    ours = name.replace("model.", "", 1)
    if "conv1d" in name:
        return torch.cat([tensors[ours.replace("conv1d", f"{x}_conv1d")] for x in "qkv"])
    if "forget_gate" in name:
        ours = ours.replace("forget_gate.", "")
    if name.endswith("A_log"):
        return tensors[ours].view(1, 1, -1, 1)
    layer = int(name.split(".")[2]) if ".layers." in name else None
    if layer is not None and layer >= 1:
        ours = ours.replace(".mlp.", ".block_sparse_moe.")
    if ours.endswith("experts.gate_up_proj"):
        return torch.cat([tensors[ours.replace("gate_up_proj", w)] for w in ("w1", "w3")], 1)
    return tensors[ours.replace("experts.down_proj", "experts.w2") if ours.endswith("experts.down_proj") else ours]


@pytest.fixture(scope="module")
def pair():
    torch.manual_seed(0)
    config = our_config()
    ours, theirs = Transformer(config), their_model()
    init_parameters(ours, config, seed=3)
    with torch.no_grad():
        for p in ours.parameters():  # nothing at its initial one or zero: a swapped norm must show
            p.add_(0.05 * torch.randn_like(p))
        for block in ours.layers.values():
            if block.is_moe:
                block.block_sparse_moe.gate.e_score_correction_bias.normal_(0, 0.2)
        tensors = dict(ours.state_dict())
        for name, x in theirs.state_dict().items():
            x.copy_(as_theirs(name, tensors))
    return ours.eval(), theirs


def test_same_weights_give_the_same_logits(pair):
    """Issue bar: 1e-4. Two lengths, one longer than a KDA chunk and no multiple of it."""
    ours, theirs = pair
    for length in (7, 150):
        tokens_T = torch.randint(0, VOCAB, (length,))
        with torch.no_grad():
            expected = theirs(tokens_T[None], use_cache=False).logits[0]
            got = ours.head(ours(tokens_T, cu_seqlens=torch.tensor([0, length], dtype=torch.int32)))
        assert expected.std() > 0.3, "the toy's logits are too small to tell anything"
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_same_weights_give_the_same_gradients(pair):
    """Every gradient, relative to its largest entry."""
    ours, theirs = pair
    tokens_T = torch.randint(0, VOCAB, (70,))
    labels_T = torch.randint(0, VOCAB, (70,))
    ours.zero_grad()
    theirs.zero_grad()
    ours.token_losses(ours(tokens_T, cu_seqlens=torch.tensor([0, 70], dtype=torch.int32)), labels_T).mean().backward()
    torch.nn.functional.cross_entropy(theirs(tokens_T[None], use_cache=False).logits[0], labels_T).backward()
    grads = {name: p.grad for name, p in ours.named_parameters()}
    for name, p in theirs.named_parameters():
        expected, got = p.grad, as_theirs(name, grads)
        torch.testing.assert_close(got, expected, atol=2e-3 * expected.abs().max().item() + 1e-7, rtol=0, msg=lambda m, name=name: f"{name}: {m}")
