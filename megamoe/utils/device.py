"""Facts about devices that have no place in torch."""

from __future__ import annotations

import torch

# Dense bf16 tensor-core rates in FLOP/s, from the vendor's data sheets.
_PEAK_BF16 = {"H100": 989e12, "H200": 989e12, "H800": 989e12, "A100": 312e12, "B200": 2250e12}


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of one device by its data sheet, or None where it is not known (then no MFU is shown)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for key, rate in _PEAK_BF16.items() if key in name), None)
