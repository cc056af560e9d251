"""llama.cpp's own sampler chain through ctypes: what native/ has to equal.

Owns the order in which common/sampling.cpp puts a chain together; knows nothing of our sampler.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from llmrun.engine.backend.llama import import_llama
from llmrun.params import SamplingParams

TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class LlamaChain:
    """A llama_sampler_chain put together as common_sampler_init does, behind _native.Sampler's interface."""

    def __init__(self, n_vocab: int, params: SamplingParams, seed: int) -> None:
        self._llama = llama = import_llama()
        self._row = np.zeros(n_vocab, TOKEN_DATA)
        self._ids = np.arange(n_vocab, dtype=np.int32)
        self._chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        for sampler in self._samplers(n_vocab, params, seed):
            llama.llama_sampler_chain_add(self._chain, sampler)

    def _samplers(self, n_vocab: int, params: SamplingParams, seed: int) -> list[Any]:
        llama = self._llama
        biases = (llama.llama_logit_bias * len(params.logit_bias))(*params.logit_bias)
        made = [llama.llama_sampler_init_logit_bias(n_vocab, len(biases), biases)]
        if params.mirostat:
            made.append(llama.llama_sampler_init_temp(params.temperature))
            tau, eta = params.mirostat_tau, params.mirostat_eta
            if params.mirostat == 1:
                return [*made, llama.llama_sampler_init_mirostat(n_vocab, seed, tau, eta, 100)]
            return [*made, llama.llama_sampler_init_mirostat_v2(seed, tau, eta)]
        return [
            *made,
            llama.llama_sampler_init_penalties(
                n_vocab,
                params.repeat_last_n,
                params.repeat_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            ),
            llama.llama_sampler_init_dry(
                None,
                params.dry_multiplier,
                params.dry_base,
                params.dry_allowed_length,
                params.dry_last_n,
                None,
                0,
            ),
            llama.llama_sampler_init_top_n_sigma(params.top_n_sigma),
            llama.llama_sampler_init_top_k(params.top_k),
            llama.llama_sampler_init_typical(params.typical_p, 0),
            llama.llama_sampler_init_top_p(params.top_p, 0),
            llama.llama_sampler_init_min_p(params.min_p, 0),
            llama.llama_sampler_init_xtc(params.xtc_probability, params.xtc_threshold, 0, seed),
            llama.llama_sampler_init_temp_ext(
                params.temperature, params.temperature_range, params.temperature_exponent
            ),
            llama.llama_sampler_init_dist(seed),
        ]

    def sample(self, logits: np.ndarray) -> int:
        return self.apply(self.fill(logits))

    def fill(self, logits: np.ndarray) -> Any:
        """Make the candidates that apply() takes, which changes them."""
        self._row["id"], self._row["logit"], self._row["p"] = self._ids, logits, 0
        array = self._llama.llama_token_data_array()
        array.data = self._row.ctypes.data_as(type(array.data))
        array.size, array.selected, array.sorted = len(logits), -1, False
        return array

    def apply(self, array: Any) -> int:
        self._llama.llama_sampler_apply(self._chain, ctypes.byref(array))
        return array.data[array.selected].id

    def accept(self, token: int) -> None:
        self._llama.llama_sampler_accept(self._chain, token)

    def close(self) -> None:
        self._llama.llama_sampler_free(self._chain)
