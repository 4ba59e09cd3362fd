"""How the values that a sparse codec keeps are written: k numbers, float32 before and after.

fp32: as they are. fp16: half precision of the values divided by the largest magnitude, so that none over- or underflows
to nothing. bf16: the nearest of 16 bits with float32's range.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from ashl.compression import Turn
from ashl.compression.body import EMPTY, typed

ValueCode = Literal["fp32", "fp16", "bf16"]


def value_bytes(code: ValueCode, k: int) -> int:
    """The size of k values and of their scales."""
    return {"fp32": 4 * k, "fp16": 4 + 2 * k, "bf16": 2 * k}[code]


def value_bound(code: ValueCode, k: int) -> float:
    """E‖C(v) − v‖² ≤ this · ‖v‖² of k values."""
    return {"fp32": 0.0, "fp16": 2.0**-20, "bf16": 2.0**-16}[code]


def write_values(code: ValueCode, values: np.ndarray, turn: Turn) -> tuple[np.ndarray, np.ndarray]:
    """(values, scales) as they go into a body."""
    if code == "fp32":
        return values, EMPTY
    if code == "bf16":
        return torch.from_numpy(values).to(torch.bfloat16).view(torch.uint8).numpy(), EMPTY
    scale = np.abs(values).max(keepdims=True)
    return (values / np.where(scale == 0, np.float32(1), scale)).astype("<f2"), scale


def read_values(code: ValueCode, values: np.ndarray, scales: np.ndarray, k: int) -> np.ndarray:
    """float32 [k]. Raises BodyError where they are of another size."""
    typed(scales, "<f4", 1 if code == "fp16" else 0, "scales")
    if code == "fp32":
        return typed(values, "<f4", k, "values")
    if code == "bf16":
        return torch.from_numpy(typed(values, "<i2", k, "values").copy()).view(torch.bfloat16).float().numpy()
    return typed(values, "<f2", k, "values").astype(np.float32) * scales.view("<f4")
