"""What a llama-like model computes, written plainly in numpy after transformers: the slow twin of a converted file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def _norm(x: Array, weight: Array, epsilon: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight


def _rotate(x: Array, base: float) -> Array:
    """Each head's halves are turned against each other. x: (tokens, heads, head)."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] / base ** (np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@dataclass
class Forward:
    """All that a forward pass computes on its way.

    Attributes:
        embedded: (tokens, width).
        between: of each layer, the residual stream behind attention: (tokens, width).
        behind: the same behind the layer.
        shares: of each layer, attention weights: (heads, tokens, tokens).
        read: what the model's end makes of any (tokens, width): (tokens, vocabulary).
    """

    embedded: Array
    between: list[Array]
    behind: list[Array]
    shares: list[Array]
    read: Callable[[Array], Array]


def logits(config: Mapping[str, Any], tensors: Mapping[str, Array], ids: list[int]) -> Array:
    """(tokens, vocabulary), of a sequence of tokens."""
    found = forward(config, tensors, ids)
    return found.read(found.behind[-1])


def forward(config: Mapping[str, Any], tensors: Mapping[str, Array], ids: list[int]) -> Forward:
    """A forward pass over a sequence of tokens."""
    heads, kv_heads, epsilon = config["num_attention_heads"], config["num_key_value_heads"], config["rms_norm_eps"]
    weights = {name: values.astype(np.float64) for name, values in tensors.items()}
    x = weights["model.embed_tokens.weight"][ids]
    found = Forward(x, [], [], [], lambda x: _norm(x, weights["model.norm.weight"], epsilon) @ head.T)
    mask = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
    for layer in range(config["num_hidden_layers"]):
        own = {n.removeprefix(f"model.layers.{layer}."): w for n, w in weights.items() if f".layers.{layer}." in n}

        def project(part: str, x: Array, count: int, own: Mapping[str, Array] = own) -> Array:
            y = x @ own[f"self_attn.{part}_proj.weight"].T + own.get(f"self_attn.{part}_proj.bias", 0.0)
            y = y.reshape(len(x), count, -1)
            norm = own.get(f"self_attn.{part}_norm.weight")
            return y if norm is None else _norm(y, norm, epsilon)

        y = _norm(x, own["input_layernorm.weight"], epsilon)
        queries = _rotate(project("q", y, heads), config["rope_theta"])
        keys = np.repeat(_rotate(project("k", y, kv_heads), config["rope_theta"]), heads // kv_heads, axis=1)
        values = np.repeat(project("v", y, kv_heads), heads // kv_heads, axis=1)
        scores = np.einsum("qhd,khd->hqk", queries, keys) / np.sqrt(queries.shape[-1]) + mask
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        found.shares.append(shares)
        x = x + np.einsum("hqk,khd->qhd", shares, values).reshape(len(x), -1) @ own["self_attn.o_proj.weight"].T
        found.between.append(x)
        y = _norm(x, own["post_attention_layernorm.weight"], epsilon)
        gate = y @ own["mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T
        found.behind.append(x)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return found
