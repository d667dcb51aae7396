"""The names of a release, from the configuration alone: one table, read in both directions.

A row is one tensor of ours. `form` says how the release stores it:

    same      under the same name, behind the release's prefix
    heads     A_log. K3: zeros after the heads, up to the head width. Kimi-Linear: (1, 1, H, 1)
    experts   ours is a stack, dim 0 the global expert; the release has a tensor per expert: MXFP4 as
              weight_packed and weight_scale, else weight
    passed    not part of our model: its bytes are kept under hf/ and given back

Shapes are written in the letters of `sizes`. `fp32` rows are kept wide, the others are bf16. Rows stand in the order of
a released file; the tensors of one expert stand together. Layer 0's attention-side AttnRes tensors are in the table like
any others: the release carries them although nothing reads them there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from megamoe.checkpoint.format import MODEL
from megamoe.model.config import AttnResKind, ModelConfig, OutputGate

HF = "hf/"  # namespace of what the release has and our model has not

# place    needs          name                                                   shape     fp32   form
TABLE = """
front      -              model.embed_tokens.weight                              V D       -      same
layer      -              input_layernorm.weight                                 D         -      same
layer      -              post_attention_layernorm.weight                        D         -      same
layer      attn_res       self_attention_res_norm.weight                         D         -      same
layer      attn_res       self_attention_res_proj.weight                         1 D       -      same
layer      attn_res       mlp_res_norm.weight                                    D         -      same
layer      attn_res       mlp_res_proj.weight                                    1 D       -      same
kda        -              self_attn.q_proj.weight                                C D       -      same
kda        -              self_attn.k_proj.weight                                C D       -      same
kda        -              self_attn.v_proj.weight                                C D       -      same
kda        -              self_attn.q_conv1d.weight                              C 1 W     fp32   same
kda        -              self_attn.k_conv1d.weight                              C 1 W     fp32   same
kda        -              self_attn.v_conv1d.weight                              C 1 W     fp32   same
kda        -              self_attn.f_a_proj.weight                              K D       -      same
kda        -              self_attn.f_b_proj.weight                              C K       -      same
kda        -              self_attn.b_proj.weight                                H D       -      same
kda        -              self_attn.A_log                                        H         fp32   heads
kda        -              self_attn.dt_bias                                      C         fp32   same
kda        full_gate      self_attn.g_proj.weight                                C D       -      same
kda        lowrank_gate   self_attn.g_a_proj.weight                              K D       -      same
kda        lowrank_gate   self_attn.g_b_proj.weight                              C K       -      same
kda        -              self_attn.o_norm.weight                                K         fp32   same
kda        -              self_attn.o_proj.weight                                D C       -      same
mla        direct_q       self_attn.q_proj.weight                                MQ D      -      same
mla        lora_q         self_attn.q_a_proj.weight                              ML D      -      same
mla        lora_q         self_attn.q_a_layernorm.weight                         ML        -      same
mla        lora_q         self_attn.q_b_proj.weight                              MQ ML     -      same
mla        -              self_attn.kv_a_proj_with_mqa.weight                    MA D      -      same
mla        -              self_attn.kv_a_layernorm.weight                        MK        -      same
mla        -              self_attn.kv_b_proj.weight                             MB MK     -      same
mla        mla_gate       self_attn.g_proj.weight                                MO D      -      same
mla        -              self_attn.o_proj.weight                                D MO      -      same
dense      -              mlp.gate_proj.weight                                   F D       -      same
dense      -              mlp.up_proj.weight                                     F D       -      same
dense      -              mlp.down_proj.weight                                   D F       -      same
moe        -              block_sparse_moe.gate.weight                           E D       -      same
moe        -              block_sparse_moe.gate.e_score_correction_bias          E         fp32   same
moe        latent         block_sparse_moe.routed_expert_down_proj.weight        Z D       -      same
moe        latent_norm    block_sparse_moe.routed_expert_norm.weight             Z         -      same
moe        latent         block_sparse_moe.routed_expert_up_proj.weight          D Z       -      same
moe        shared         block_sparse_moe.shared_experts.gate_proj.weight       S D       -      same
moe        shared         block_sparse_moe.shared_experts.up_proj.weight         S D       -      same
moe        shared         block_sparse_moe.shared_experts.down_proj.weight       D S       -      same
moe        -              block_sparse_moe.experts.w1                            E X Z     -      experts
moe        -              block_sparse_moe.experts.w2                            E Z X     -      experts
moe        -              block_sparse_moe.experts.w3                            E X Z     -      experts
end        attn_res       model.output_attn_res_norm.weight                      D         -      same
end        attn_res       model.output_attn_res_proj.weight                      1 D       -      same
end        -              model.norm.weight                                      D         -      same
end        untied         lm_head.weight                                         V D       -      same
tower      -              vision_tower.patch_embed.proj.weight                   VD 3 P P  -      passed
tower      -              vision_tower.patch_embed.pos_emb.weight                VH VW VD  -      passed
vit        -              vision_tower.encoder.blocks.{n}.norm0.weight           VD        -      passed
vit        -              vision_tower.encoder.blocks.{n}.norm1.weight           VD        -      passed
vit        -              vision_tower.encoder.blocks.{n}.wqkv.weight            V3 VD     -      passed
vit        -              vision_tower.encoder.blocks.{n}.wo.weight              VD VQ     -      passed
vit        -              vision_tower.encoder.blocks.{n}.mlp.fc0.weight         VF VD     -      passed
vit        -              vision_tower.encoder.blocks.{n}.mlp.fc1.weight         VD VF     -      passed
merger     -              vision_tower.encoder.final_layernorm.weight            VD        -      passed
merger     -              mm_projector.proj.0.weight                             VM VM     -      passed
merger     -              mm_projector.proj.2.weight                             D VM      -      passed
merger     -              mm_projector.post_norm.weight                          D         -      passed
"""


@dataclass(frozen=True)
class VisionShape:
    """Sizes of the vision tower and projector, the released ones by default. Keys of config.json's `vision_config`."""

    patch_size: int = 14
    init_pos_emb_height: int = 64
    init_pos_emb_width: int = 64
    vt_num_hidden_layers: int = 27
    vt_hidden_size: int = 1024
    vt_intermediate_size: int = 4096
    qkv_hidden_size: int = 1536
    merge_kernel_size: tuple[int, int] = (2, 2)


@dataclass(frozen=True)
class Release:
    """How a release writes the models of its family.

    Attributes:
        prefix: in front of every text tensor.
        mxfp4: routed experts as packed codes and scales; else one bf16 tensor a matrix.
        padded_heads: A_log zero-padded to the head width; else (1, 1, H, 1).
        vision: None has no vision tensors.
    """

    name: str
    prefix: str = ""
    mxfp4: bool = False
    padded_heads: bool = False
    vision: VisionShape | None = None


K3 = Release("kimi_k3", prefix="language_model.", mxfp4=True, padded_heads=True, vision=VisionShape())
KIMI_LINEAR = Release("kimi_linear")


def release_of(config: ModelConfig) -> Release:
    """The release whose form a configuration has: Kimi-Linear is the one without attention over depth."""
    return KIMI_LINEAR if config.attn_res is AttnResKind.off else K3


@dataclass(frozen=True)
class Stored:
    """One tensor of a release: name, safetensors dtype, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One tensor of ours and what the release has for it.

    Attributes:
        name: of ours without namespace; of the release for what is passed through.
        released: name in the release; for experts with `{e}` in place of the expert's number.
        shape, dtype: of ours. dtype is BF16 or F32.
        form: see the module.
        mxfp4: of an expert row.
        stored_shape: of the release's tensor, without the expert dim.
    """

    name: str
    released: str
    shape: tuple[int, ...]
    dtype: str
    form: str
    mxfp4: bool = False
    stored_shape: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """Name in our checkpoints."""
        return (HF if self.form == "passed" else MODEL) + self.name

    @property
    def carried(self) -> tuple[str, str]:
        """Names in our checkpoints of an MXFP4 stack's own codes and scales."""
        stack = HF + self.released.replace(".{e}.", ".")
        return stack + ".weight_packed", stack + ".weight_scale"

    def stored(self, expert: int = 0) -> tuple[Stored, ...]:
        """What the release has: one tensor, or for an MXFP4 expert its codes and its scales."""
        if self.form != "experts":
            return (Stored(self.released, self.dtype, self.stored_shape),)
        at = self.released.replace("{e}", str(expert))
        if not self.mxfp4:
            return (Stored(at + ".weight", self.dtype, self.stored_shape),)
        rows, columns = self.stored_shape
        return Stored(at + ".weight_packed", "U8", (rows, columns // 2)), Stored(at + ".weight_scale", "U8", (rows, columns // 32))


@dataclass(frozen=True)
class _Line:
    place: str
    needs: str
    name: str
    shape: tuple[str, ...]
    wide: bool
    form: str


def _parse(table: str) -> tuple[_Line, ...]:
    lines = []
    for text in table.strip().splitlines():
        place, needs, name, shape, wide, form = re.fullmatch(r"(\S+) +(\S+) +(\S+) +(\S+(?: \S+)*) +(-|fp32) +(\S+)", text).groups()
        lines.append(_Line(place, needs, name, tuple(shape.split()), wide == "fp32", form))
    return tuple(lines)


LINES = _parse(TABLE)


def sizes(config: ModelConfig, vision: VisionShape | None) -> dict[str, int]:
    """The letters of the table. C, K, H, W: KDA width, head width, heads, taps. M*: MLA. X, Z, S: expert, routed and shared widths."""
    c, kda, mla, moe = config, config.kda, config.mla, config.moe
    found = {
        "D": c.d_model, "V": c.vocab_size, "1": 1, "3": 3,
        "C": kda.width, "K": kda.head_dim, "H": kda.num_heads, "W": kda.conv_kernel,
        "MQ": mla.num_heads * mla.qk_head_dim, "ML": mla.q_lora_rank or 0, "MK": mla.kv_lora_rank, "MA": mla.kv_lora_rank + mla.qk_rope_head_dim,
        "MB": mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), "MO": mla.num_heads * mla.v_head_dim,
        "F": c.ffn.dense_size, "E": moe.num_experts, "X": moe.expert_size, "Z": moe.latent or c.d_model, "S": moe.shared_size,
    }  # fmt: skip
    if vision is not None:
        v = vision
        merged = v.vt_hidden_size * v.merge_kernel_size[0] * v.merge_kernel_size[1]
        found |= {"P": v.patch_size, "VH": v.init_pos_emb_height, "VW": v.init_pos_emb_width, "VD": v.vt_hidden_size, "VF": v.vt_intermediate_size, "VQ": v.qkv_hidden_size, "V3": 3 * v.qkv_hidden_size, "VM": merged}
    return found


def features(config: ModelConfig) -> set[str]:
    """What the `needs` column asks for."""
    latent = config.moe.latent is not None
    has = {
        "-": True,
        "attn_res": config.attn_res is not AttnResKind.off,
        "untied": not config.tie_embeddings,
        "full_gate": config.kda.output_gate is OutputGate.full,
        "lowrank_gate": config.kda.output_gate is OutputGate.lowrank,
        "lora_q": config.mla.q_lora_rank is not None,
        "direct_q": config.mla.q_lora_rank is None,
        "mla_gate": config.mla.output_gate,
        "latent": latent,
        "latent_norm": latent and config.moe.latent_norm,
        "shared": config.moe.num_shared_experts > 0,
    }
    return {name for name, here in has.items() if here}


@dataclass(frozen=True)
class Names:
    """All rows of one model in one release.

    Raises:
        ValueError: MXFP4 experts whose input width is no multiple of 32, the group of one scale.
    """

    config: ModelConfig
    release: Release
    rows: tuple[Row, ...] = field(init=False)

    def __post_init__(self) -> None:
        z, x = self.config.moe.latent or self.config.d_model, self.config.moe.expert_size
        if self.release.mxfp4 and (z % 32 or x % 32):
            raise ValueError(f"MXFP4 experts need widths that are multiples of 32, these have {z} and {x}; write them as bf16")
        object.__setattr__(self, "rows", tuple(self._rows()))

    def _rows(self) -> Iterator[Row]:
        c, vision = self.config, self.release.vision
        letters, has = sizes(c, vision), features(c)
        of = {place: [line for line in LINES if line.place == place and line.needs in has] for place in {line.place for line in LINES}}

        def rows(place: str, at: str = "", **numbers) -> Iterator[Row]:
            for line in of[place]:
                yield self._row(line, at + (line.name.format(**numbers) if numbers else line.name), tuple(letters[x] for x in line.shape))

        yield from rows("front")
        for n in range(c.num_layers):
            at = f"model.layers.{n}."
            yield from rows("layer", at)
            yield from rows("mla" if c.is_full_attn(n) else "kda", at)
            yield from rows("moe" if c.is_moe(n) else "dense", at)
        yield from rows("end")
        if vision is not None:
            yield from rows("tower")
            for n in range(vision.vt_num_hidden_layers):
                yield from rows("vit", n=n)
            yield from rows("merger")

    def _row(self, line: _Line, name: str, shape: tuple[int, ...]) -> Row:
        dtype = "F32" if line.wide else "BF16"
        if line.form == "passed":
            return Row(name, name, shape, dtype, "passed", stored_shape=shape)
        released = self.release.prefix + name
        if line.form == "experts":
            stack, _, matrix = released.rpartition(".")
            return Row(name, f"{stack}.{{e}}.{matrix}", shape, dtype, "experts", self.release.mxfp4, shape[1:])
        if line.form == "heads":
            stored = (max(self.config.kda.head_dim, *shape),) if self.release.padded_heads else (1, 1, *shape, 1)
            return Row(name, released, shape, dtype, "heads", stored_shape=stored)
        return Row(name, released, shape, dtype, "same", stored_shape=shape)

    def groups(self) -> Iterator[tuple[Row, ...]]:
        """Rows that stand together in files: the three matrices of a layer's experts, every other row by itself."""
        experts: list[Row] = []
        for row in self.rows:
            if row.form == "experts":
                experts.append(row)
                continue
            if experts:
                yield tuple(experts)
                experts = []
            yield (row,)
        if experts:
            yield tuple(experts)

    def stored(self) -> Iterator[Stored]:
        """Every tensor of the release, in file order."""
        for group in self.groups():
            for expert in range(group[0].shape[0] if group[0].form == "experts" else 1):
                for row in group:
                    yield from row.stored(expert)
