"""What planning needs of a model's header, without a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from llmrun.gguf.layers import LayerShares


@dataclass(frozen=True)
class Facts:
    """A header: that of SmolLM2-135M unless said otherwise."""

    path: Path = Path("model.gguf")
    weight_bytes: int = 96_576_768
    n_ctx_train: int = 8192
    n_embd: int = 576
    n_vocab: int = 49_152
    n_merges: int = 0
    kv_bytes: float = 11_520.0  # per element of one byte
    n_layers: int = 30
    n_parameters: int = 134_515_008
    recurrent_bytes: int = 0
    window_bytes: int = 0
    can_roll_back: bool = False
    n_draft_heads: int = 0
    can_use_heads: bool = False
    has_proven_heads: bool = False
    head_bytes: int = 0
    head_cache: float = 0.0  # per token and element of one byte
    rope_depends_on_window: bool = False
    key_length: int = 64
    most_heads: int = 9
    most_feed_forward: int = 1536
    expert_bytes: dict[int, int] = field(default_factory=dict)
    shares: LayerShares | None = None

    @property
    def layer_shares(self) -> LayerShares:
        """Every layer's the same, but for experts, unless said otherwise."""
        if self.shares is not None:
            return self.shares
        rest = (self.weight_bytes - sum(self.expert_bytes.values())) / (self.n_layers + 1)
        weights = tuple((rest + self.expert_bytes.get(layer, 0)) / self.weight_bytes for layer in range(self.n_layers))
        return LayerShares((*weights, rest / self.weight_bytes))

    def n_caches(self, sequences: int) -> int:
        return sequences if self.rope_depends_on_window else 1

    def cache_shares(self, n_tokens: int, bytes_per_element: float = 2.0, **sizes: int) -> tuple[float, ...]:
        return (1 / self.n_layers,) * self.n_layers

    def cache_bytes(self, n_tokens: int, bytes_per_element: float = 2.0, **sizes: int) -> float:
        return n_tokens * self.kv_bytes_per_token(bytes_per_element)

    def head_cache_bytes(self, n_tokens: int, bytes_per_element: float = 2.0) -> int:
        return int(self.head_cache * n_tokens * bytes_per_element)

    def kv_bytes_per_token(self, bytes_per_element: float = 2.0) -> float:
        return self.kv_bytes * bytes_per_element
