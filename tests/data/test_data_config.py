"""A mistake in `data.*` is named before anything is read, with key, value and way out in one line, and without torch.

Not covered: what Hydra says about unknown keys and wrong types (tests/configs).
"""

import subprocess
import sys

import pytest

from megamoe.data.config import DataConfig


@pytest.mark.parametrize(
    "values, words",
    [
        ({"source": "stdlb"}, ["data.source", "stdlb", "stdlib"]),
        ({"packing": "bestfit"}, ["data.packing", "bestfit", "best_fit"]),
        ({"source": "text"}, ["data.source=text", "data.paths"]),
        ({"paths": ["a"]}, ["data.paths", "data.source=text"]),
        ({"source": "text", "paths": ["a", "b"], "weights": [1.0]}, ["data.weights", "1 entries", "2 data.paths"]),
        ({"source": "text", "paths": ["a"], "weights": [0.0]}, ["data.weights", "above 0"]),
        ({"source": "text", "paths": ["a"], "weights": [float("nan")]}, ["data.weights", "nan"]),
        ({"holdout_fraction": 1.0}, ["data.holdout_fraction=1.0", "below 1"]),
        ({"holdout_fraction": float("nan")}, ["data.holdout_fraction=nan"]),
        ({"packing_window_documents": 0}, ["data.packing_window_documents=0"]),
        ({"vocab_size": 256}, ["data.vocab_size=256", "257"]),
        ({"num_workers": -1}, ["data.num_workers=-1"]),
        ({"prefetch_steps": 0}, ["data.prefetch_steps=0"]),
        ({"seed": -2}, ["data.seed=-2"]),
    ],
)
def test_a_bad_value_is_one_line_with_key_value_and_way_out(values, words):
    with pytest.raises(ValueError) as caught:
        DataConfig(**values)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_cache_variable_replaces_the_default_but_not_a_choice(monkeypatch, tmp_path):
    monkeypatch.setenv("MEGAMOE_CACHE", str(tmp_path))
    assert DataConfig().cache_path() == tmp_path
    assert DataConfig(cache_dir="/elsewhere").cache_path().as_posix() == "/elsewhere"
    monkeypatch.delenv("MEGAMOE_CACHE")
    assert "~" not in str(DataConfig().cache_path())


def test_importing_the_config_imports_neither_torch_nor_numpy():
    code = "import sys, megamoe.data.config; sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'tokenizers')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
