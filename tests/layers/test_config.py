"""Impossible models are refused in one line that names the key, the value and the way out, before torch is imported.

Not covered: how the message reaches a user (tests/configs, tests/launch).
"""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from megamoe.model.config import AttnResKind, Balancing, GateKind, KDAConfig, MLAConfig, ModelConfig, MoEConfig, MTPConfig, RopeKind

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "build,key",
    [
        (lambda: KDAConfig(lower_bound=-5.1), "model.kda.lower_bound=-5.1"),
        (lambda: KDAConfig(lower_bound=0.0), "model.kda.lower_bound=0.0"),
        (lambda: KDAConfig(lower_bound=math.nan), "model.kda.lower_bound=nan"),
        (lambda: KDAConfig(num_heads=0), "model.kda.num_heads=0"),
        (lambda: MoEConfig(num_experts=8, top_k=9), "model.moe.top_k=9"),
        (lambda: MoEConfig(num_experts=8, top_k=8), "model.moe.top_k=8"),
        (lambda: MoEConfig(sign_rate=-1.0), "model.moe.sign_rate=-1.0"),
        (lambda: MLAConfig(rope=RopeKind.rotary, qk_rope_head_dim=7), "model.mla.qk_rope_head_dim=7"),
        (lambda: MTPConfig(num_layers=2), "model.mtp.num_layers=2"),
        (lambda: ModelConfig(num_layers=4, full_attn_layers=[4, 5]), "model.full_attn_layers=[4, 5]"),
        (lambda: ModelConfig(num_layers=4, full_attn_layers=[0, 4]), "model.full_attn_layers=[0, 4]"),
        (lambda: ModelConfig(full_attn_layers=[4, 4]), "model.full_attn_layers=[4, 4]"),
        (lambda: ModelConfig(init_std=math.inf), "model.init_std=inf"),
    ],
)
def test_impossible_values_are_refused_in_one_line(build, key):
    with pytest.raises(ValueError) as error:
        build()
    message = str(error.value)
    assert message.startswith(key + ": ") and "\n" not in message and len(message) > len(key) + 10


def test_what_the_refusals_point_to_is_accepted():
    KDAConfig(gate=GateKind.softplus, lower_bound=-5.1)
    MoEConfig(num_experts=8, top_k=8, balancing=Balancing.none)
    ModelConfig(num_layers=2, full_attn_layers=[])


def test_layer_lists_are_one_based():
    config = ModelConfig(num_layers=9, full_attn_layers=[4, 8, 9], attn_res_block_size=4)
    assert [n for n in range(9) if config.is_full_attn(n)] == [3, 7, 8]
    assert [n for n in range(9) if config.is_moe(n)] == list(range(1, 9))
    assert [n for n in range(9) if config.opens_block(n)] == [0, 4, 8]
    assert [config.bank_rows_before(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]
    config.attn_res = AttnResKind.full
    assert [config.bank_rows_before(n) for n in (0, 1, 9)] == [0, 2, 18]


@pytest.mark.parametrize("path", sorted((ROOT / "hydra_conf" / "model").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_model_file_fits_the_schema(path):
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), OmegaConf.load(path)))
    assert config.name == path.stem


def test_tiny_is_the_default():
    """Sections built alone in scripts and tests are the tiny model's; the file and the defaults may not drift apart."""
    tiny = OmegaConf.merge(OmegaConf.structured(ModelConfig), OmegaConf.load(ROOT / "hydra_conf" / "model" / "tiny.yaml"))
    assert OmegaConf.to_object(tiny) == ModelConfig()


def test_configuration_does_not_import_torch():
    code = "import sys, megamoe.model.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
