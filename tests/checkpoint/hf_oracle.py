"""A small release in the form of Kimi-K3's, and its forward, written from the released names and the paper's formulas.

Imports nothing of megamoe: it is what our conversion and our model are compared with. numpy and torch in float64; the
files are written and read with the safetensors library.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], dtype=torch.float64)
T = "language_model."


def k3_config(*, layers=5, experts=896, hidden=256, latent=128, expert=64, vocab=320) -> dict:
    """config.json: the released keys at reduced widths; the last two layers are both full attention, as released."""
    text = dict(
        model_type="kimi_linear", architectures=["KimiLinearForCausalLM"], dtype="bfloat16", vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=2, intermediate_size=96, hidden_act="situ", activation_situ_beta=4.0, activation_situ_linear_beta=25.0,
        rms_norm_eps=1e-5, initializer_range=0.02, q_lora_rank=48, kv_lora_rank=40, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, mla_use_nope=True,
        mla_use_output_gate=True, num_experts=experts, num_experts_per_token=16, num_shared_experts=2, moe_intermediate_size=expert, routed_expert_hidden_size=latent,
        latent_moe_use_norm=True, moe_router_activation_func="sigmoid", topk_method="noaux_tc", moe_renormalize=True, routed_scaling_factor=1.0, use_grouped_topk=True,
        num_expert_group=1, topk_group=1, first_k_dense_replace=1, moe_layer_freq=1, attn_res_block_size=3, num_nextn_predict_layers=0, tie_word_embeddings=False,
        linear_attn_config=dict(num_heads=3, head_dim=32, short_conv_kernel_size=4, use_full_rank_gate=True, gate_lower_bound=-5.0,
                                full_attn_layers=[layers - 1, layers], kda_layers=list(range(1, layers - 1))),
        quantization_config=dict(quant_method="compressed-tensors", format="mxfp4-pack-quantized"),
    )  # fmt: skip
    vision = dict(patch_size=2, init_pos_emb_height=4, init_pos_emb_width=4, vt_num_hidden_layers=27, vt_hidden_size=16, vt_intermediate_size=24, qkv_hidden_size=24, merge_kernel_size=[2, 2], text_hidden_size=hidden)
    return dict(model_type="kimi_k3", architectures=["KimiK3ForConditionalGeneration"], text_config=text, vision_config=vision, media_placeholder_token_id=163605)


def make_release(folder: Path, config: dict, seed: int = 0) -> None:
    """Write every tensor such a release has: a shard for each layer and one for what is left, with an index."""
    g = torch.Generator().manual_seed(seed)
    c = config["text_config"]
    la, D, V = c["linear_attn_config"], c["hidden_size"], c["vocab_size"]
    H, K = la["num_heads"], la["head_dim"]
    C = H * K
    tensors: dict[str, torch.Tensor] = {}
    where: dict[str, str] = {}
    folder.mkdir(parents=True)

    def flush(number: int) -> None:
        file = f"model-{number:05d}-of-{c['num_hidden_layers'] + 1:06d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(tensors, file))
        tensors.clear()

    def put(name, *shape, std=None, dtype=torch.bfloat16, mean=0.0):
        std = shape[-1] ** -0.5 if std is None else std
        tensors[name] = (torch.randn(shape, generator=g) * std + mean).to(dtype)

    f32 = torch.float32
    put(T + "model.embed_tokens.weight", V, D, std=1.0)
    for n in range(c["num_hidden_layers"]):
        at = f"{T}model.layers.{n}."
        for norm in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            put(f"{at}{norm}.weight", D, std=0.1, mean=1.0)
        for query in ("self_attention_res_proj", "mlp_res_proj"):
            put(f"{at}{query}.weight", 1, D, std=0.1)
        a = at + "self_attn."
        if n + 1 in la["full_attn_layers"]:
            A, nope, rope, v = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
            ql, kl = c["q_lora_rank"], c["kv_lora_rank"]
            put(a + "q_a_proj.weight", ql, D)
            put(a + "q_a_layernorm.weight", ql, std=0.1, mean=1.0)
            put(a + "q_b_proj.weight", A * (nope + rope), ql)
            put(a + "kv_a_proj_with_mqa.weight", kl + rope, D)
            put(a + "kv_a_layernorm.weight", kl, std=0.1, mean=1.0)
            put(a + "kv_b_proj.weight", A * (nope + v), kl)
            put(a + "g_proj.weight", A * v, D)
            put(a + "o_proj.weight", D, A * v)
        else:
            for p in "qkvg":
                put(f"{a}{p}_proj.weight", C, D)
            for p in "qkv":
                put(f"{a}{p}_conv1d.weight", C, 1, la["short_conv_kernel_size"], dtype=f32)
            put(a + "f_a_proj.weight", K, D)
            put(a + "f_b_proj.weight", C, K)
            put(a + "b_proj.weight", H, D)
            tensors[a + "A_log"] = torch.cat([torch.randn(H, generator=g) * 0.5, torch.zeros(K - H)])
            put(a + "dt_bias", C, std=1.0, dtype=f32)
            put(a + "o_norm.weight", K, std=0.1, mean=1.0, dtype=f32)
            put(a + "o_proj.weight", D, C)
        if n < c["first_k_dense_replace"]:
            F = c["intermediate_size"]
            put(at + "mlp.gate_proj.weight", F, D)
            put(at + "mlp.up_proj.weight", F, D)
            put(at + "mlp.down_proj.weight", D, F)
            flush(n + 1)
            continue
        m, E, Z, X = at + "block_sparse_moe.", c["num_experts"], c["routed_expert_hidden_size"], c["moe_intermediate_size"]
        S = X * c["num_shared_experts"]
        put(m + "gate.weight", E, D, std=0.1)
        put(m + "gate.e_score_correction_bias", E, std=0.05, dtype=f32)
        put(m + "routed_expert_down_proj.weight", Z, D)
        put(m + "routed_expert_up_proj.weight", D, Z)
        put(m + "routed_expert_norm.weight", Z, std=0.1, mean=1.0)
        put(m + "shared_experts.gate_proj.weight", S, D)
        put(m + "shared_experts.up_proj.weight", S, D)
        put(m + "shared_experts.down_proj.weight", D, S)
        for w, rows, columns in (("w1", X, Z), ("w2", Z, X), ("w3", X, Z)):
            packed = torch.randint(0, 256, (E, rows, columns // 2), generator=g, dtype=torch.uint8)
            # Groups without a large code: their scale is not the one that encoding would choose.
            packed[:, ::3, :16] &= 0xBB
            scale = torch.randint(121, 125, (E, rows, columns // 32), generator=g, dtype=torch.uint8)
            scale[:3, 1, 0] = 0
            for e in range(E):
                tensors[f"{m}experts.{e}.{w}.weight_packed"], tensors[f"{m}experts.{e}.{w}.weight_scale"] = packed[e].clone(), scale[e].clone()
        flush(n + 1)
    put(T + "model.output_attn_res_norm.weight", D, std=0.1, mean=1.0)
    put(T + "model.output_attn_res_proj.weight", 1, D, std=0.1)
    put(T + "model.norm.weight", D, std=0.1, mean=1.0)
    put(T + "lm_head.weight", V, D)
    v = config["vision_config"]
    W, Q, F, P = v["vt_hidden_size"], v["qkv_hidden_size"], v["vt_intermediate_size"], v["patch_size"]
    put("vision_tower.patch_embed.proj.weight", W, 3, P, P)
    put("vision_tower.patch_embed.pos_emb.weight", v["init_pos_emb_height"], v["init_pos_emb_width"], W)
    for i in range(v["vt_num_hidden_layers"]):
        at = f"vision_tower.encoder.blocks.{i}."
        for name, shape in (("norm0", (W,)), ("norm1", (W,)), ("wqkv", (3 * Q, W)), ("wo", (W, Q)), ("mlp.fc0", (F, W)), ("mlp.fc1", (W, F))):
            put(f"{at}{name}.weight", *shape)
    put("vision_tower.encoder.final_layernorm.weight", W)
    put("mm_projector.proj.0.weight", 4 * W, 4 * W)
    put("mm_projector.proj.2.weight", D, 4 * W)
    put("mm_projector.post_norm.weight", D)

    flush(c["num_hidden_layers"] + 1)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "config.json").write_text(json.dumps(config, indent=2))


class Release:
    """A folder read with the safetensors library, each tensor when it is asked for."""

    def __init__(self, folder: Path):
        self.at = {}
        for path in sorted(folder.glob("*.safetensors")):
            f = safe_open(path, "pt")
            self.at |= {name: f for name in f.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.at[name].get_tensor(name)

    def same_bytes(self, other: Release, name: str) -> bool:
        a, b = self[name], other[name]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def logits(release: Release, config: dict, tokens: torch.Tensor) -> torch.Tensor:
    """(T, V) float64 of one document, from the release's tensors."""
    c = config["text_config"]
    la = c["linear_attn_config"]

    def w(name: str) -> torch.Tensor:
        return release[T + name].double()

    def rms(x, weight, eps=c["rms_norm_eps"]):
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight

    def mix(rows, at):
        v = torch.stack(rows)
        k = v * (v.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        s = (k * w(at + "_norm.weight") * w(at + "_proj.weight")[0]).sum(-1)
        return (torch.softmax(s, 0)[..., None] * v).sum(0)

    def glu(x, gate, up, down):
        g, u = x @ gate.T, x @ up.T
        b, lb = c["activation_situ_beta"], c["activation_situ_linear_beta"]
        return (b * torch.tanh(g / b) * torch.sigmoid(g) * lb * torch.tanh(u / lb)) @ down.T

    def kda(x, at):
        H, K = la["num_heads"], la["head_dim"]

        def conv(p):
            y, taps = x @ w(f"{at}{p}_proj.weight").T, w(f"{at}{p}_conv1d.weight")[:, 0]
            padded = torch.cat([y.new_zeros(taps.shape[1] - 1, y.shape[1]), y])
            return torch.nn.functional.silu(sum(padded[i : i + len(y)] * taps[:, i] for i in range(taps.shape[1]))).view(-1, H, K)

        q, k, v = conv("q"), conv("k"), conv("v")
        q, k = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
        z = (x @ w(at + "f_a_proj.weight").T @ w(at + "f_b_proj.weight").T + w(at + "dt_bias")).view(-1, H, K)
        alpha = torch.exp(la["gate_lower_bound"] * torch.sigmoid(w(at + "A_log")[:H].exp()[:, None] * z))
        beta = torch.sigmoid(x @ w(at + "b_proj.weight").T)
        S, out = x.new_zeros(H, K, K), []
        for t in range(len(x)):
            S = alpha[t][..., None] * S
            S = S + beta[t][:, None, None] * k[t][..., None] * (v[t] - (S * k[t][..., None]).sum(1))[:, None, :]
            out.append((S * q[t][..., None]).sum(1) * K**-0.5)
        o = rms(torch.stack(out), w(at + "o_norm.weight"))
        gate = torch.sigmoid(x @ w(at + "g_proj.weight").T)
        return (gate * o.flatten(1)) @ w(at + "o_proj.weight").T

    def mla(x, at):
        A, nope, rope, V = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        q = (rms(x @ w(at + "q_a_proj.weight").T, w(at + "q_a_layernorm.weight"), 1e-6) @ w(at + "q_b_proj.weight").T).view(-1, A, nope + rope)
        latent, shared = (x @ w(at + "kv_a_proj_with_mqa.weight").T).split([c["kv_lora_rank"], rope], -1)
        kv = (rms(latent, w(at + "kv_a_layernorm.weight"), 1e-6) @ w(at + "kv_b_proj.weight").T).view(-1, A, nope + V)
        k = torch.cat([kv[..., :nope], shared[:, None].expand(-1, A, -1)], -1)
        s = torch.einsum("thd,shd->hts", q, k) * (nope + rope) ** -0.5
        s = s.masked_fill(torch.ones(len(x), len(x), dtype=torch.bool).triu(1), float("-inf"))
        o = torch.einsum("hts,shv->thv", torch.softmax(s, -1), kv[..., nope:]).flatten(1)
        return (torch.sigmoid(x @ w(at + "g_proj.weight").T) * o) @ w(at + "o_proj.weight").T

    def expert(at):
        name = f"{T}{at}"
        packed, scale = release[name + ".weight_packed"], release[name + ".weight_scale"]
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()
        return E2M1[codes] * torch.exp2(scale.double() - 127).repeat_interleave(32, 1)

    def moe(x, at):
        s = torch.sigmoid(x @ w(at + "gate.weight").T)
        top = torch.topk(s + w(at + "gate.e_score_correction_bias"), c["num_experts_per_token"], -1).indices
        p = s.gather(1, top)
        p = p / (p.sum(-1, keepdim=True) + 1e-20) * c["routed_scaling_factor"]
        z = x @ w(at + "routed_expert_down_proj.weight").T
        u = torch.zeros_like(z)
        for e in top.unique().tolist():
            token, slot = (top == e).nonzero(as_tuple=True)
            y = glu(z[token], *(expert(f"{at}experts.{e}.{m}") for m in ("w1", "w3", "w2")))
            u[token] += p[token, slot][:, None] * y
        routed = rms(u, w(at + "routed_expert_norm.weight")) @ w(at + "routed_expert_up_proj.weight").T
        return routed + glu(x, *(w(f"{at}shared_experts.{m}_proj.weight") for m in ("gate", "up", "down")))

    bank, prefix = [], w("model.embed_tokens.weight")[tokens]
    for n in range(c["num_hidden_layers"]):
        at = f"model.layers.{n}."
        h = mix([*bank, prefix], at + "self_attention_res") if bank else prefix
        if n % c["attn_res_block_size"] == 0:
            bank, prefix = [*bank, prefix], None
        x = rms(h, w(at + "input_layernorm.weight"))
        a = (mla if n + 1 in la["full_attn_layers"] else kda)(x, at + "self_attn.")
        prefix = a if prefix is None else prefix + a
        x = rms(mix([*bank, prefix], at + "mlp_res"), w(at + "post_attention_layernorm.weight"))
        if n < c["first_k_dense_replace"]:
            prefix = prefix + glu(x, *(w(f"{at}mlp.{m}_proj.weight") for m in ("gate", "up", "down")))
        else:
            prefix = prefix + moe(x, at + "block_sparse_moe.")
    return rms(mix([*bank, prefix], "model.output_attn_res"), w("model.norm.weight")) @ w("lm_head.weight").T


if __name__ == "__main__":
    # A source of about LAYERS - 1 GB for measuring conversions: python tests/checkpoint/hf_oracle.py FOLDER LAYERS
    make_release(Path(sys.argv[1]), k3_config(layers=int(sys.argv[2]), hidden=1792, latent=896, expert=768, vocab=4096))
