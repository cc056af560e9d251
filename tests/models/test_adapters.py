"""Adapters as users name them."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.gguf_writer import lora_tensors, tiny_adapter, tiny_model, write

from llmrun.chat.store.turns import Answer
from llmrun.cli import chat
from llmrun.engine.prompt.writer import PromptWriter
from llmrun.errors import ModelNotFoundError, UsageError
from llmrun.gguf.reader import read_header
from llmrun.models.adapters import adapter_bytes, read_adapters
from llmrun.models.fingerprint import ModelFingerprint
from llmrun.protocol.adapters import Adapter, AdapterScale, applied, by_default
from llmrun.ui.terminal.output import Output


@pytest.mark.parametrize(
    ("scale", "wanted"), [("", 1.0), (":0.5", 0.5), (":0", 0.0), (":-1", -1.0), (":1e2", 100.0), (":1000", 1000.0)]
)
def test_a_file_and_its_scale(scale: str, wanted: float, tmp_path: Path) -> None:
    path = write(tmp_path / "pirate.v2.gguf", tiny_adapter())
    assert read_adapters([f"{path}{scale}"]) == (Adapter("pirate.v2", str(path), wanted),)


def test_a_name_with_a_colon_is_a_name(tmp_path: Path) -> None:
    path = write(tmp_path / "pirate:2", tiny_adapter())
    assert read_adapters([str(path)])[0].scale == 1.0
    assert read_adapters([f"{path}:3"])[0].scale == 3.0


@pytest.mark.parametrize("scale", ["much", "nan", "inf", "1001", "-1001", ""])
def test_a_scale_that_is_not_a_number_is_named(scale: str, tmp_path: Path) -> None:
    path = write(tmp_path / "pirate.gguf", tiny_adapter())
    with pytest.raises(UsageError, match="invalid --lora") as caught:
        read_adapters([f"{path}:{scale}"])
    assert caught.value.hint == f"--lora {path}:0.5"


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no adapter 'nowhere'"):
        read_adapters(["nowhere"])
    with pytest.raises(UsageError, match="is a folder") as caught:
        read_adapters([str(tmp_path)])
    assert "llmrun convert" in caught.value.hint


def test_two_with_the_same_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    paths = [write(folder / "pirate.gguf", tiny_adapter()) for folder in (tmp_path, tmp_path / "other")]
    with pytest.raises(UsageError, match="two adapters are called pirate"):
        read_adapters(list(map(str, paths)))


def test_they_count_beside_a_model(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, tiny_adapter()) for name in ("one.gguf", "two.gguf")]
    header = read_header(write(tmp_path / "tiny.gguf", tiny_model()))
    assert adapter_bytes(read_adapters(list(map(str, paths))), header) == 2 * sum(
        each.n_bytes for each in lora_tensors()
    )


def test_zero_is_none_and_order_does_not_matter() -> None:
    scales = (AdapterScale(2, 1.0), AdapterScale(0, 0.0), AdapterScale(1, 0.5))
    assert applied(scales) == applied(reversed(scales)) == (AdapterScale(1, 0.5), AdapterScale(2, 1.0))
    assert by_default((Adapter("a", "a", 0.0), Adapter("b", "b", 0.5))) == (AdapterScale(1, 0.5),)


def test_a_part_of_the_model_is_applied_whatever_a_request_names() -> None:
    writer = PromptWriter.__new__(PromptWriter)
    writer._adapters = (Adapter("mine", "a.gguf", 0.5), Adapter("stored-1", "b.gguf", is_stored=True))
    assert writer.adapters_for(None) == (AdapterScale(0, 0.5), AdapterScale(1, 1.0))
    assert writer.adapters_for(()) == (AdapterScale(1, 1.0),)
    assert writer.adapters_for((AdapterScale(0, 2.0),)) == (AdapterScale(0, 2.0), AdapterScale(1, 1.0))
    assert writer.adapters_for((AdapterScale(1, 0.0),)) == (), "named, and switched off"


def test_a_chat_goes_on_with_the_adapters_of_the_user_alone(tmp_path: Path) -> None:
    """Ollama's store may have another one by now."""
    mine = Adapter("mine", str(write(tmp_path / "mine.gguf", tiny_adapter())))
    stored = Adapter("stored-1", str(write(tmp_path / "stored.gguf", tiny_adapter())), is_stored=True)
    output = Output(stdout=io.StringIO(), stderr=io.StringIO(), environment={})
    for adapters, kept in (((mine, stored), (mine,)), ((stored,), ())):
        saved: Any = SimpleNamespace(last_answer=Answer("Hi", model=ModelFingerprint("ollama/t"), adapters=adapters))
        assert chat._last_adapters(output, saved, "ollama/t") == kept
