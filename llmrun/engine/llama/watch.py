"""The evaluation callback of a context. Must not know what is observed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmrun.engine.llama.tensors import GgmlTensor

Watch = Callable[["GgmlTensor", bool], bool]
"""Evaluation callback, called for each tensor: with True to ask whether to observe it; if so, again with False when its
numbers are available. Returning False then ends the computation. LlamaContext.decode() raises its exceptions."""


def guarded(watch: Watch, keep: Callable[[BaseException], None]) -> Callable[[int, bool, Any], bool]:
    """Return llama_context_params.cb_eval, which passes exceptions to keep(): none may pass through C++."""
    from llmrun.engine.llama.tensors import GgmlTensor, check_layout

    check_layout()

    def callback(address: int, ask: bool, data: Any) -> bool:
        try:
            return watch(GgmlTensor.from_address(address), ask)
        except BaseException as failure:
            keep(failure)
            return False

    return callback
