"""Conversion by llama.cpp's own converter, with scripts that fail, write invalid or partial files, or are stopped."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import typer
from support.hf_writer import files_of, write
from typer.testing import CliRunner

from llmrun.errors import BadModelError, DiskFullError, LlmrunError, ModelNotFoundError, UsageError
from llmrun.gguf.reader import read_header
from llmrun.lab.cli.convert import convert
from llmrun.lab.convert.job import convert_folder
from llmrun.lab.convert.llama_cpp_converter import convert_with

START = """
import pathlib, sys
print("INFO:hf-to-gguf:Loading model")
target = pathlib.Path(sys.argv[sys.argv.index("--outfile") + 1])
good = pathlib.Path(__file__).with_name("good.gguf").read_bytes()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a model; its conversion is good.gguf beside the script."""
    convert_folder(write(tmp_path / "Known", files_of("Qwen2ForCausalLM")), tmp_path / "good.gguf")
    return write(tmp_path / "Tiny", files_of("Qwen2ForCausalLM", architectures=["NewForCausalLM"]))


def script(folder: Path, body: str) -> Path:
    path = folder.with_name("convert_hf_to_gguf.py")
    path.write_text(START + body)
    return path


def run(folder: Path, body: str, **options: str) -> list[str]:
    """Convert to out/x.gguf; return the script's output."""
    said: list[str] = []
    (folder.parent / "out").mkdir(exist_ok=True)
    target = folder.parent / "out" / "x.gguf"
    convert_with(script(folder, body), folder, target, python=sys.executable, on_line=said.append, **options)
    return said


def test_what_is_good_gets_its_name(folder: Path) -> None:
    said = run(folder, "target.write_bytes(good); print(sys.argv[-1])", type="bf16")
    assert said == ["INFO:hf-to-gguf:Loading model", "bf16"]
    out = folder.parent / "out"
    assert [path.name for path in out.iterdir()] == ["x.gguf"]
    assert read_header(out / "x.gguf").architecture == "qwen2"


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        ("sys.exit('ERROR:hf-to-gguf:Model NewForCausalLM is not supported')", UsageError, "is not supported"),
        ("import torch_that_is_not_there", UsageError, "--python PATH"),
        ("raise OSError(28, 'No space left on device')", DiskFullError, "no room"),
        ("import os; os._exit(3)", UsageError, "convert_hf_to_gguf.py failed"),
        ("", BadModelError, ""),
        ("target.write_bytes(b'GGUF' + bytes(100))", BadModelError, ""),
        ("target.write_bytes(good[:-1000])", BadModelError, ""),
        ("target.write_bytes(good[:200])", BadModelError, ""),
        ("target.write_bytes(good[:-4] + b'\\xff' * 4)", BadModelError, "not finite"),
        ("target.write_bytes(good.replace(b'qwen2.block_count', b'qwen2.blockXcount'))", BadModelError, ""),
        ("target.write_bytes(good.replace(b'blk.1.ffn_up.weight', b'blk.1.ffn_uq.weight'))", BadModelError, "ffn_up"),
    ],
)
def test_what_is_not_good_is_not_kept(body: str, kind: type[LlmrunError], said: str, folder: Path) -> None:
    (folder.parent / "out").mkdir()
    (folder.parent / "out" / "x.gguf").write_bytes(b"old")
    with pytest.raises(kind) as caught:
        run(folder, body)
    assert said in f"{caught.value.what} {caught.value.why} {caught.value.hint}"
    assert [path.read_bytes() for path in (folder.parent / "out").iterdir()] == [b"old"]


DENSE = [{"type": "a.Pooling", "path": "1_Pooling"}, {"type": "a.Dense", "path": "2_Dense"}]


@pytest.mark.parametrize(
    ("modules", "settings", "said"),
    [
        (DENSE, {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}, "Dense (2_Dense)"),
        (DENSE, {"bias": True, "activation_function": "torch.nn.modules.linear.Identity"}, "it has a bias"),
        (DENSE, {"bias": False, "activation_function": "torch.nn.modules.activation.Tanh"}, "the activation Tanh"),
        ([*DENSE[:1], {"type": "a.LayerNorm", "path": "2_LayerNorm"}], {}, "LayerNorm (2_LayerNorm)"),
    ],
)
def test_a_script_that_drops_a_module_makes_no_model(
    modules: list[dict[str, str]], settings: dict[str, object], said: str, folder: Path
) -> None:
    (folder / "modules.json").write_text(json.dumps(modules))
    for path, values in (("1_Pooling", {"pooling_mode": "mean"}), ("2_Dense", settings)):
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UsageError) as caught:
        run(folder, 'assert "--sentence-transformers-dense-modules" in sys.argv\ntarget.write_bytes(good)')
    assert said in str(caught.value)
    assert not list((folder.parent / "out").glob("*.gguf"))


def test_ctrl_c_ends_the_script_and_leaves_nothing(folder: Path) -> None:
    def press(line: str) -> None:
        if line == "half":
            raise KeyboardInterrupt

    (folder.parent / "out").mkdir()
    body = "target.write_bytes(good[:500]); print('half', flush=True); sys.stdin.close(); import time; time.sleep(600)"
    with pytest.raises(KeyboardInterrupt):
        convert_with(
            script(folder, body), folder, folder.parent / "out" / "x.gguf", python=sys.executable, on_line=press
        )
    assert list((folder.parent / "out").iterdir()) == []


def test_what_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no script"):
        convert_with(folder / "none.py", folder, folder / "x.gguf")
    with pytest.raises(ModelNotFoundError, match="can't run '/no/python'"):
        convert_with(script(folder, ""), folder, folder / "x.gguf", python="/no/python")


def test_the_environment_beside_the_script_is_taken(folder: Path) -> None:
    python = folder.parent / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho mine\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    said: list[str] = []
    target = folder.parent / "x.gguf"
    convert_with(script(folder, "target.write_bytes(good)"), folder, target, on_line=said.append)
    assert said[0] == "mine"


def test_the_command_names_the_way_out_and_takes_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()
    app.command()(convert)
    monkeypatch.chdir(folder.parent)
    refused = CliRunner().invoke(app, ["Tiny"])
    assert isinstance(refused.exception, UsageError)
    assert "--with PATH/convert_hf_to_gguf.py" in refused.exception.hint
    path = script(folder, "target.write_bytes(good)")
    done = CliRunner().invoke(app, ["Tiny", "--with", str(path), "--python", sys.executable, "--json"])
    assert '"architecture":"NewForCausalLM"' in done.stdout.replace(" ", "")
    assert (folder.parent / "Tiny.gguf").is_file()
    lone = CliRunner().invoke(app, ["Tiny", "--python", sys.executable])
    assert isinstance(lone.exception, UsageError)
