"""The engine of this machine as a RowAnswerer. Must not know terminals or the file of answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from llmrun.batch.ledger import RowSink
from llmrun.batch.plan import BatchPlan, EngineDescription, RowRequirements, model_for
from llmrun.batch.rows import PendingRow
from llmrun.batch.run import BatchRun
from llmrun.config import load_settings
from llmrun.errors import LlmrunError
from llmrun.gguf.pooling import refuse_answers
from llmrun.model import Model
from llmrun.planning.hardware import probe_details, this_machine
from llmrun.planning.plan import LoadPreferences
from llmrun.planning.predict import predict, step_seconds, tensor_types, work_of
from llmrun.planning.speed import speed_of
from llmrun.protocol.adapters import Adapter


class LocalEngine:
    """A RowAnswerer with a local model.

    Args:
        prepared: plans the load of the model, as model.prepare().
        parallel: number of parallel rows; None: as many as fit.
    """

    def __init__(
        self,
        prepared: Callable[[LoadPreferences], Model],
        preferences: LoadPreferences,
        parallel: int | None,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        self._prepared, self._preferences, self._parallel, self._adapters = prepared, preferences, parallel, adapters
        self.model: Model

    def find(self, need: RowRequirements) -> EngineDescription:
        self.model = model = model_for(self._prepared, self._preferences, need, self._parallel)
        refuse_answers(model.header)
        adapters = [(each.name, each.scale) for each in self._adapters]
        return EngineDescription(
            model.spec.name,
            f"{model.path.name} {model.path.stat().st_size} {adapters}",
            model.header.chat_template is not None,
            model.load.n_seq_max,
            model.plan.notes,
        )

    def seconds(self, plan: BatchPlan) -> float | None:
        """Estimate from the speed of ggml's kernels on this machine, which is measured if unknown."""
        model, answers, settings = self.model, plan.most_answer_tokens, load_settings()
        if answers is None or not plan.todo or model.plan.vram_bytes:
            return None  # the speed of GPU kernels is unknown
        with suppress(LlmrunError):
            types = tensor_types(model.header.tensors)
            speed = speed_of(this_machine(), types, settings.state_dir, cache=probe_details().last_cache)
            work, n_rows = work_of(model.header), len(plan.todo)
            rows = min(plan.parallel, n_rows)
            usual = predict(work, speed, prompt=plan.prompt_tokens // n_rows)
            depth = (plan.prompt_tokens + answers // 2) // n_rows
            prefill = (plan.prompt_tokens - plan.shared_tokens) / usual.prefill_rate
            return prefill + answers / rows * step_seconds(work, speed, rows, depth=depth)
        return None

    def run(self, todo: Iterable[PendingRow], sink: RowSink) -> None:
        BatchRun(self.model, sink).run(todo)
