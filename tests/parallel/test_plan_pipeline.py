"""The pipeline planner's figures. Why it matters: people buy machines by them. Not covered: how well the cost model fits a GPU.

Stages are cut without torch, so the planner answers at once and refuses impossible layouts before any process starts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megamoe.parallel.config import ParallelConfig
from megamoe.parallel.stages import check_layout, check_tokens, layer_costs, plan_stages
from megamoe.testing.proof import small_model
from megamoe.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def _plan(*arguments: str) -> dict:
    out = subprocess.run([sys.executable, "tools/plan_pipeline.py", "--json", *arguments], cwd=ROOT, text=True, capture_output=True, timeout=60)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)


def test_planner_balances_uneven_layers_and_counts_cached_rows():
    plan = _plan("model=k3_2p8t", "parallel.pp=4", "parallel.vpp=2", "--micro-batches", "32")
    assert [c["layers"][0] for c in plan["chunks"]][0] == 0 and plan["chunks"][-1]["layers"][1] == 92
    shares = [c["share"] for c in plan["chunks"]]
    assert sum(shares) == pytest.approx(1) and max(shares) < 1.1 / 8
    # Rows known after 12 layers each, block size 12: boundary b carries the running sum and what the receiver lacks.
    rows = [c["rows_after"] for c in plan["chunks"]]
    for b in plan["boundaries"]:
        n = b["boundary"]
        known = rows[n - 3] if n >= 3 else 0
        assert b["cached_tensors"] == rows[n] - known + 1 and b["naive_tensors"] == rows[n] + 1


def test_planner_does_not_need_torch():
    code = "import sys; sys.argv=['x']; import megamoe.parallel.stages; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def test_given_stages_are_taken_and_checked():
    model = small_model()
    assert [len(r) for r in plan_stages(model, ParallelConfig(pp=2, stage_layers=[1, 4])).layers] == [1, 4]
    for stages, hint in (([1, 3], "sum to model.num_layers=5"), ([5], "pp·vpp = 2"), ([0, 5], "positive")):
        with pytest.raises(UserError, match=hint):
            plan_stages(model, ParallelConfig(pp=2, stage_layers=stages))


@pytest.mark.parametrize("layout, hint", [
    (dict(tp=3), "1, 2, 4"), (dict(ep=3), "1, 2, 4, 8"), (dict(pp=4, vpp=2), "at most 5"),
])  # fmt: skip
def test_impossible_layouts_name_what_would_work(layout, hint):
    with pytest.raises(UserError, match=hint):
        check_layout(small_model(), ParallelConfig(**layout))


def test_micro_batches_that_cannot_be_shared_name_what_would_work():
    with pytest.raises(UserError, match="4092 would work"):
        check_tokens(ParallelConfig(tp=2, cp=3), 4096, 4)
    with pytest.raises(UserError, match="multiple of 2"):
        check_tokens(ParallelConfig(pp=2, vpp=2), 4096, 3)


def test_costs_know_the_kinds_of_layers():
    layers, first, last = layer_costs(small_model(), seq_len=4096)
    short, _, _ = layer_costs(small_model(), seq_len=64)
    assert layers[1] > short[1] and layers[2] == short[2], "only MLA grows with the context"
    assert first == 0 and last == 16 * 48
