"""The layers of a model: the KV cache and recurrent state of each, and the weights that a GPU gets with it.

As llama.cpp allocates them (llama-cpp-python 0.3.36); pure functions of a header's numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from llmrun.gguf.metadata import ModelMetadata, of_layer

_STATE_BYTES = 4  # f32
MAX_LAYERS = 512  # LLAMA_MAX_LAYERS; a file that states more is refused elsewhere
# Every layer is recurrent: no keys and values at all.
_RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
# A layer without key heads is recurrent in these.
_HYBRID_BY_HEADS = frozenset(
    {"jamba", "plamo2", "granitehybrid", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "kimi-linear", "kimi-k3",
     "bailingmoe3", "glm5-next"}
)  # fmt: skip
# Every n-th layer has full attention, the others are recurrent: architecture -> n when the file does not say.
_HYBRID_BY_INTERVAL = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "qwen4exp": 4, "minimax-01": 8}
_HYBRID_THROUGHOUT = frozenset({"falcon-h1"})
# Layers with a sliding window: architecture -> (every n-th layer has none, it is the first of the n rather than the
# last). An array in the file says it layer by layer instead; those with 0 always have one.
_WINDOW_PATTERNS = {
    "afmoe": (4, False), "cohere2": (4, False), "cohere2moe": (4, True), "exaone-moe": (4, False),
    "exaone4": (4, False), "gemma-embedding": (6, False), "gemma2": (2, False), "gemma3": (6, False),
    "gemma3n": (5, False), "gemma4": (0, False), "gpt-oss": (2, False), "granite_swa": (0, False),
    "laguna": (4, True), "lfm2": (0, False), "llama4": (4, False), "maple": (0, False), "mellum": (4, False),
    "mimo2": (0, False), "muse-glimmer": (4, False), "olmo2": (4, False), "plamo3": (8, False),
    "smallthinker": (4, True), "spark2_5": (0, False), "step35": (0, False),
}  # fmt: skip
_DEFAULT_WINDOWS = {"gemma2": 4096, "llama4": 8192}
_FIXED_WINDOWS = {"smallthinker": 4096}  # whatever the file states, if it states one
# llama.cpp keeps snapshots of the states of these (llm_arch_supports_rs_rollback). qwen4exp is left out: with several
# sequences, they are wrong (ggml-org/llama.cpp issue 28019).
_ROLLS_BACK = frozenset(
    {"qwen35", "qwen35moe", "kimi-k3", "glm5-next", "nemotron_h", "nemotron_h_moe", "lfm2", "lfm2moe", "bailingmoe3"}
)
_INDEXED = frozenset({"deepseek32", "glm-dsa"})  # these cache a second, smaller key of every token
_BLOCK = re.compile(r"blk\.(\d+)\.")
# llama-arch.cpp: LLM_TENSOR_LAYER_INPUT. The input is always looked up by the processor.
_INPUT = ("token_embd.", "token_types.", "position_embd.", "per_layer_token_embd.", "masked_embd_")
INPUT_LAYER = -1
_EMBEDDINGS, _OUTPUT, _OUTPUT_NORM = "token_embd.weight", "output.weight", "output_norm.weight"


@dataclass(frozen=True, slots=True)
class KvLayer:
    """A layer with a KV cache."""

    elements: int  # of a token's keys and values
    window: int  # maximum cached tokens; 0 is all
    layer: int = field(default=0, compare=False)  # its index


def kv_layers(header: ModelMetadata) -> tuple[KvLayer, ...]:
    """Return the layers with a KV cache of their own; layers that share another one's are left out."""
    if header.architecture in _RECURRENT:
        return ()
    sliding = _sliding_layers(header)
    recurrent = _recurrent(header)
    layers = []
    for layer in range(_own_layers(header)):
        window = window_of(header) if sliding[layer] else 0
        elements = 0 if recurrent[layer] else _elements(header, layer, sliding=sliding[layer])
        if elements:
            layers.append(KvLayer(elements, window, layer))
    return tuple(layers)


def recurrent_layers(header: ModelMetadata) -> tuple[int, ...]:
    """Return the layers with a recurrent state; some have keys and values too."""
    n_layers = max(_n_layers(header) - header.model_count("nextn_predict_layers"), 0)
    if header.architecture in _RECURRENT or header.architecture in _HYBRID_THROUGHOUT:
        return tuple(range(n_layers))
    return tuple(layer for layer, is_recurrent in enumerate(_recurrent(header)[:n_layers]) if is_recurrent)


def recurrent_bytes(header: ModelMetadata) -> int:
    """Return the bytes of recurrent state of a sequence, whatever its length."""
    return len(recurrent_layers(header)) * _state_elements(header) * _STATE_BYTES


def can_roll_back(header: ModelMetadata) -> bool:
    """Return whether llama.cpp can take back a recurrent state's last tokens."""
    return header.architecture in _ROLLS_BACK and recurrent_bytes(header) > 0 and not window_of(header)


def n_heads(header: ModelMetadata) -> int:
    """Return the number of layers that the file states to predict further tokens (NextN), the last of all layers."""
    predicting = header.model_count("nextn_predict_layers")
    return predicting if predicting < _n_layers(header) else 0


def head_elements(header: ModelMetadata) -> int:
    """Return the elements of a token's keys and values in those layers."""
    layers = range(_n_layers(header) - n_heads(header), _n_layers(header))
    return sum(_elements(header, layer, sliding=False) for layer in layers)


def window_of(header: ModelMetadata) -> int:
    """Return the tokens of a sliding window; 0 if llama.cpp uses none."""
    if header.architecture not in _WINDOW_PATTERNS:
        return 0
    if header.architecture == "exaone4" and header.n_layers != 64:
        return 0
    stated = header.model_count("attention.sliding_window")
    if header.architecture == "llama4":
        says_none = header.model_key("attention.sliding_window") in header.metadata and not stated
        return 0 if says_none else _DEFAULT_WINDOWS["llama4"]
    if stated:
        return _FIXED_WINDOWS.get(header.architecture, stated)
    return _DEFAULT_WINDOWS.get(header.architecture, 0)


def _n_layers(header: ModelMetadata) -> int:
    return min(header.n_layers, MAX_LAYERS)


def _own_layers(header: ModelMetadata) -> int:
    """Return the number of layers with own keys: without shared and unused multi-token prediction layers."""
    n_layers = _n_layers(header)
    if header.architecture == "gemma3n":
        return min(20, n_layers)
    if header.architecture == "gemma4":
        return max(n_layers - header.model_count("attention.shared_kv_layers"), 0)
    predicting = header.model_count("nextn_predict_layers")
    return n_layers - predicting if predicting < n_layers else n_layers


def _sliding_layers(header: ModelMetadata) -> list[bool]:
    """Return for each layer whether it has a sliding window."""
    n_layers = _n_layers(header)
    if not window_of(header):
        return [False] * n_layers
    period, dense_first = _WINDOW_PATTERNS[header.architecture]
    stated = header.metadata.get(header.model_key("attention.sliding_window_pattern"))
    if isinstance(stated, tuple):
        return [bool(of_layer(stated, layer)) for layer in range(n_layers)]
    if isinstance(stated, int) and period:
        period = max(stated, 0)
    if not period:
        return [True] * n_layers
    dense = 0 if dense_first else period - 1
    return [layer % period != dense for layer in range(n_layers)]


def _recurrent(header: ModelMetadata) -> list[bool]:
    """Return for each layer whether it has a recurrent state instead of keys and values."""
    layers = range(_n_layers(header))
    if header.architecture in _HYBRID_BY_HEADS:
        return [not header.kv_heads_of(layer) and not _only_feeds_forward(header, layer) for layer in layers]
    interval = _HYBRID_BY_INTERVAL.get(header.architecture)
    if interval is None:
        return [False] * len(layers)
    stated = header.metadata.get(header.model_key("attention.recurrent_layers"))
    if isinstance(stated, tuple):
        return [bool(of_layer(stated, layer)) for layer in layers]
    interval = header.model_count("full_attention_interval") or interval
    return [(layer + 1) % interval != 0 for layer in layers]


def _only_feeds_forward(header: ModelMetadata, layer: int) -> bool:
    """Return whether a layer has neither attention nor state, as some of Nemotron-H."""
    widths = header.metadata.get(header.model_key("feed_forward_length"))
    nemotron = header.architecture.startswith("nemotron_h")
    return nemotron and isinstance(widths, tuple) and bool(of_layer(widths, layer))


def _elements(header: ModelMetadata, layer: int, *, sliding: bool) -> int:
    heads = header.kv_heads_of(layer)
    ending = "_swa" if sliding else ""
    key = header.model_count(f"attention.key_length{ending}") or header.key_length
    value = header.model_count(f"attention.value_length{ending}") or header.value_length
    if header.is_latent:  # the values are a part of the keys
        value = 0
    indexer = header.model_count("attention.indexer.key_length") if header.architecture in _INDEXED else 0
    return heads * (key + value) + indexer


def _state_elements(header: ModelMetadata) -> int:
    """Return the elements of a recurrent layer's two states: llama_hparams::n_embd_r and n_embd_s."""
    count = header.model_count
    width = header.n_embd
    if count("wkv.head_size"):
        shifts = count("token_shift_count") or (1 if header.architecture in {"rwkv6qwen2", "arwkv7"} else 2)
        return shifts * width + width * count("wkv.head_size")
    if count("shortconv.l_cache"):
        return width * (count("shortconv.l_cache") - 1)
    heads = header.heads_of(0)
    if count("kda.head_dim"):
        head = count("kda.head_dim")
        return 3 * max(count("ssm.conv_kernel") - 1, 0) * heads * head + head * head * heads
    if header.architecture == "minimax-01":
        return header.key_length**2 * heads
    inner, state = count("ssm.inner_size"), count("ssm.state_size")
    conv = max(count("ssm.conv_kernel") - 1, 0) * (inner + 2 * count("ssm.group_count") * state)
    return conv + state * inner


@dataclass(frozen=True, slots=True)
class LayerShares:
    """Fractions of all weights.

    Attributes:
        weights: of each layer, the output last.
        copied: of the output's weights, the part that is in RAM too: token embeddings that are also its matrix.
        largest: the largest matrix of a layer.
        tensors: name -> layer, INPUT_LAYER for those always in RAM, and share of all weights.
    """

    weights: tuple[float, ...]
    copied: float = 0.0
    largest: float = 0.0
    tensors: Mapping[str, tuple[int, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, layers: int, tensors: Mapping[str, int]) -> LayerShares:
        """Return the shares of a model file.

        Args:
            layers: number of blocks.
            tensors: name -> bytes.
        """
        layers, total = min(layers, MAX_LAYERS), max(sum(tensors.values()), 1)
        sizes, largest = [0] * (layers + 1), 0
        places: dict[str, tuple[int, float]] = {}
        for name, size in tensors.items():
            block = _BLOCK.match(name)
            layer = layers if block is None else min(int(block[1]), layers)
            if block is not None:
                largest = max(largest, size)
            elif name.startswith(_INPUT):
                layer = INPUT_LAYER
            if layer != INPUT_LAYER:
                sizes[layer] += size
            places[name] = layer, size / total
        is_tied = _OUTPUT_NORM in tensors and _OUTPUT not in tensors
        copied = tensors.get(_EMBEDDINGS, 0) if is_tied else 0
        sizes[layers] += copied
        weights = tuple(size / total for size in sizes)
        return cls(weights, copied / total, largest / total, places)


def most_feed_forward(header: ModelMetadata, experts_used: int | tuple[int, ...]) -> int:
    """Return the width of the widest feed-forward part that one token goes through; 0 if the file does not state it."""
    width = 0
    for name, times in (("feed_forward_length", 1), ("expert_feed_forward_length", experts_used)):
        widths = header.metadata.get(header.model_key(name))
        factor = times if isinstance(times, int) else max(times, default=0)
        of_layers = widths if isinstance(widths, tuple) else (widths,)
        width = max([width, *(of_one * factor for of_one in of_layers if isinstance(of_one, int))])
    return width
