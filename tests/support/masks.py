"""Token masks as the native sampler takes them."""

from __future__ import annotations

import numpy as np


def mask_of(n_vocab: int, tokens: np.ndarray | list[int]) -> np.ndarray:
    """Words in which the bits of these tokens are set."""
    bits = np.zeros((n_vocab + 31) // 32 * 32, bool)
    bits[tokens] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


def only(row: np.ndarray, tokens: np.ndarray | list[int], banned: tuple[int, ...] = ()) -> np.ndarray:
    left = np.full_like(row, -np.inf)
    left[tokens] = row[tokens]
    left[list(banned)] = -np.inf
    return left
