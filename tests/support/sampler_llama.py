"""llama.cpp's own sampler chain through ctypes: what native/ has to equal.

Owns how common/sampling.cpp puts a chain together, in any order, and how ours is held against it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from llmrun.engine.llama.library import import_llama
from llmrun.protocol.params import SamplingParams
from support.sampler_cases import may_draw_another, native_sampler

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
            *(self._step(step, n_vocab, params, seed) for step in params.order),
            llama.llama_sampler_init_dist(seed),
        ]

    def _step(self, step: str, n_vocab: int, params: SamplingParams, seed: int) -> Any:
        llama = self._llama
        if step == "penalties":
            strengths = (params.repeat_penalty, params.frequency_penalty, params.presence_penalty)
            return llama.llama_sampler_init_penalties(n_vocab, params.repeat_last_n, *strengths)
        if step == "dry":
            strength = (params.dry_multiplier, params.dry_base)
            lengths = (params.dry_allowed_length, params.dry_last_n)
            return llama.llama_sampler_init_dry(None, *strength, *lengths, None, 0)
        if step == "top_n_sigma":
            return llama.llama_sampler_init_top_n_sigma(params.top_n_sigma)
        if step == "top_k":
            return llama.llama_sampler_init_top_k(params.top_k)
        if step == "typical_p":
            return llama.llama_sampler_init_typical(params.typical_p, 0)
        if step == "top_p":
            return llama.llama_sampler_init_top_p(params.top_p, 0)
        if step == "min_p":
            return llama.llama_sampler_init_min_p(params.min_p, 0)
        if step == "xtc":
            return llama.llama_sampler_init_xtc(params.xtc_probability, params.xtc_threshold, 0, seed)
        assert step == "temperature"
        return llama.llama_sampler_init_temp_ext(
            params.temperature, params.temperature_range, params.temperature_exponent
        )

    def sample(self, logits: np.ndarray) -> int:
        return self.apply(self.fill(logits))

    def fill(self, logits: np.ndarray) -> Any:
        """Make the candidates that apply() takes, which changes them."""
        self._row["id"], self._row["logit"], self._row["p"] = self._ids, logits, 0
        array = self._llama.llama_token_data_array()
        array.data = self._row.ctypes.data_as(type(array.data))
        array.size, array.selected, array.sorted = len(logits), -1, False
        return array

    def kept(self, logits: np.ndarray) -> dict[int, float]:
        """The tokens that the last draw was made from, and their probabilities; this draws as well."""
        array = self.fill(logits)
        self.apply(array)
        return {array.data[i].id: array.data[i].p for i in range(array.size)}

    def apply(self, array: Any) -> int:
        self._llama.llama_sampler_apply(self._chain, ctypes.byref(array))
        return array.data[array.selected].id

    def accept(self, token: int) -> None:
        self._llama.llama_sampler_accept(self._chain, token)

    def close(self) -> None:
        self._llama.llama_sampler_free(self._chain)


def assert_same_as_llama(params: SamplingParams, seed: int, logits: np.ndarray) -> None:
    """Require that both draw the same tokens from these rows, one after another, and go on with llama.cpp's."""
    n_vocab = logits.shape[1]
    llama, native = LlamaChain(n_vocab, params, seed), native_sampler(n_vocab, params, seed)
    prompt = [(i * i) % n_vocab for i in range(100)]
    native.accept_many(prompt)
    for token in prompt:
        llama.accept(token)
    for index, row in enumerate(logits):
        token, expected = native.sample(row.ctypes.data), llama.sample(row)
        assert token == expected or may_draw_another(params, n_vocab), f"row {index} of {params.order}"
        native.accept(expected)
        llama.accept(expected)
    llama.close()
