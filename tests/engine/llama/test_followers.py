"""What a context tells its followers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing

import pytest
from support.random_model import write_random_model

from llmrun import _native
from llmrun.engine.llama.base import Aborted, CacheFull, Entry
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.followers import Follower, SavedHeads
from llmrun.engine.llama.model import LlamaModel
from llmrun.protocol.loading import Load


class Recorder(Follower):
    """A follower that remembers what it was told, and saves a note."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []
        self.is_willing = True

    def can_cut(self, sequence_id: int, n_dropped: int) -> bool:
        return self.is_willing

    def can_save(self, sequence_id: int) -> bool:
        return self.is_willing

    def decoded(self, entries: Sequence[Entry], *, is_batch: bool) -> None:
        self.told.append(("decoded", len(entries), is_batch))

    def lost(self, sequence_ids: Iterable[int]) -> None:
        self.told.append(("lost", *sequence_ids))

    def cut(self, sequence_id: int, start: int, position: int, n_dropped: int) -> None:
        self.told.append(("cut", sequence_id, start, n_dropped))

    def copied(self, source: int, target: int) -> None:
        self.told.append(("copied", source, target))

    def saved(self, sequence_id: int, *, is_whole: bool) -> Sequence[bytes | bytearray | memoryview]:
        return SavedHeads(before=b"note", n_positions=7).parts

    def saved_bytes(self, sequence_id: int) -> int:
        return 1000

    def restored(self, sequence_id: int, saved: SavedHeads, *, is_whole: bool) -> None:
        self.told.append(("restored", sequence_id, saved.before, is_whole))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    path = write_random_model(tmp_path_factory.mktemp("model") / "random.gguf", layers=1, n_ctx=256)
    loaded = LlamaModel(str(path), 0, _native.CancelFlag())
    yield loaded
    loaded.close()


@pytest.mark.parametrize("n_cells", [256, 0], ids=["shared cells", "cells of its own for each"])
def test_each_change_is_told_and_what_is_saved_comes_back(model: LlamaModel, n_cells: int) -> None:
    recorder = Recorder()
    load = Load(model.path, 256, n_batch=64, n_seq_max=2, n_cells=n_cells, threads=1)
    with closing(LlamaContext(model, load)) as context:
        bytes_before = context.state_bytes(0)
        context._followers.append(recorder)
        assert context.state_bytes(0) == bytes_before + 1000
        context.decode([Entry(5 + place, place, 0, place == 9) for place in range(10)])
        assert context.forget(0, 8)
        assert context.copy(0, 1, 6)
        state = context.state(0)
        assert context.set_state(1, state, 8)
        context.clear()
        assert recorder.told == [
            ("decoded", 10, True),
            ("cut", 0, 8, 2),
            ("copied", 0, 1),
            ("cut", 1, 6, 2),
            ("cut", 1, 0, 6),
            ("restored", 1, b"note", True),
            ("cut", 0, 0, 0),
            ("cut", 1, 0, 0),
        ]


def test_a_failure_is_told_but_not_a_full_cache(model: LlamaModel) -> None:
    recorder = Recorder()
    with closing(LlamaContext(model, Load(model.path, 256, n_batch=256, threads=1))) as context:
        context._followers.append(recorder)
        model.flag.set()
        with pytest.raises(Aborted):
            context.decode([Entry(5, 0, 0, True)])
        model.flag.clear()
        context.forget(0, 0)
        context.decode([Entry(5, place, 0, False) for place in range(256)])
        with pytest.raises(CacheFull):
            context.decode([Entry(5, 256, 0, True)])
        assert [what for what, *_ in recorder.told] == ["lost", "cut", "decoded"]


def test_a_follower_can_refuse(model: LlamaModel) -> None:
    recorder = Recorder()
    with closing(LlamaContext(model, Load(model.path, 256, threads=1))) as context:
        context._followers.append(recorder)
        context.decode([Entry(5, 0, 0, False), Entry(6, 1, 0, True)])
        recorder.is_willing = False
        assert not context.can_forget(0, 1)
        assert not context.forget(0, 1)
        assert not context.state(0)
        assert context.forget(0, 0), "to empty a sequence is always possible"
