"""Presets with names: `--preset`, their place among the other origins, and Ollama's Modelfiles made into one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import pytest
from support import commands
from support.gguf_writer import gguf, tiny_model, write
from support.model_disk import put_ollama
from typer.testing import CliRunner

from llmrun.cli import options, serve, settings_file
from llmrun.cli.config import app, as_preset
from llmrun.errors import UsageError
from llmrun.models.modelfile import as_jinja, as_modelfile, read_instructions

PIRATE = """
[presets.pirate]
model = "smollm2"
system = "Arr."
temp = 0.3
think = true
think-effort = "low"
tools = ["a.py", "b.py"]
docs = "~/notes"
stop = ["\\n\\n"]
ctx = 1024
lora = ["p.gguf"]
[models.smollm2]
temp = 0.9
top-k = 7
"""


@pytest.fixture
def config(home: Path, tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(PIRATE)
    return path


def filled(command: str, **values: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """commands.filled() with the preset."""
    return commands.filled(command, **{"preset": "pirate", "model": None, **values})


def test_a_preset_names_the_model_and_every_option(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_TEMP", "0.1")
    values, others, origins = filled("chat")
    assert values["model"] == "smollm2"
    assert (others["system"], others["temperature"], others["top_k"], others["n_ctx"]) == ("Arr.", 0.3, 7, 1024)
    assert (others["tools"], others["stop"], others["lora"]) == (["a.py", "b.py"], ["\n\n"], ["p.gguf"])
    assert others["docs"] == "~/notes"
    assert origins["temperature"] == "preset pirate"
    assert origins["top_k"] == "preset"
    assert origins["reasoning_effort"] == "preset pirate"


def test_what_is_typed_comes_first(config: Path) -> None:
    assert filled("chat", model="qwen3-4b")[0]["model"] == "qwen3-4b"
    _, others, _ = filled("chat", thinking=False)
    assert "reasoning_effort" not in others
    assert "temperature" not in filled("run", beams=2)[1]
    assert not {"thinking", "reasoning_effort"} & set(filled("run", beams=2)[1])
    assert not {"n_ctx", "lora"} & set(filled("chat", at="http://127.0.0.1:1")[1])


@pytest.mark.parametrize(
    ("values", "model", "prompt"),
    [
        ({"model": "Hello"}, "smollm2", ("Hello",)),
        ({"model": "two words", "prompt": None}, "smollm2", ("two words",)),
        ({"model": "qwen3-4b", "prompt": ("Hello",)}, "qwen3-4b", ("Hello",)),
    ],
)
def test_the_only_argument_of_run_is_the_prompt(
    config: Path, values: dict[str, Any], model: str, prompt: tuple[str, ...]
) -> None:
    typed, _, _ = filled("run", **values)
    assert (typed["model"], typed["prompt"]) == (model, prompt)


def test_presets_that_can_not_be(config: Path) -> None:
    with pytest.raises(UsageError, match="there is no preset 'pirat'") as raised:
        filled("chat", preset="pirat")
    assert "did you mean pirate?" in raised.value.hint
    config.write_text('[presets.p]\nthink = false\nthink-effort = "low"\n')
    with pytest.raises(UsageError, match="of the preset p can't be used together"):
        filled("chat", preset="p")
    for text, words in (("tools = [1]", "must be texts"), ("typo = 1", "no setting 'presets.p.typo'")):
        config.write_text(f"[presets.p]\n{text}\n")
        with pytest.raises(UsageError) as raised:
            settings_file.read_file()
        assert words in str(raised.value)


def test_a_preset_is_written_key_by_key(config: Path) -> None:
    config.unlink()
    for key, text in (("system", "Arr."), ("stop", '["a", "b"]'), ("tools", "x.py"), ("temp", "0.5"), ("think", "on")):
        settings_file.change(f"presets.pirate.{key}", settings_file.parse(f"presets.pirate.{key}", text, key))
    values = settings_file.read_file()
    assert settings_file.preset_names(values) == ["pirate"]
    assert settings_file.read_preset("pirate", values) == {
        "system": "Arr.", "stop": ["a", "b"], "tools": ["x.py"], "temp": 0.5, "think": True,
    }  # fmt: skip
    settings_file.change("presets.pirate.stop", None)
    assert "stop" not in settings_file.read_preset("pirate", settings_file.read_file())


MODELFILE = '''
# a comment
from ./tiny.gguf
SYSTEM """You are a pirate.
Say "arr"."""
PARAMETER temperature 0.7
PARAMETER num_ctx 2048
PARAMETER num_predict -1
PARAMETER stop "<|im_end|>"
PARAMETER stop User:
PARAMETER num_gpu 3
TEMPLATE """{{ if .System }}<|im_start|>system
{{ .System }}<|im_end|>
{{ end }}{{ if .Prompt }}<|im_start|>user
{{ .Prompt }}<|im_end|>
{{ end }}<|im_start|>assistant
{{ .Response }}<|im_end|>
"""
ADAPTER ./pirate.gguf
LICENSE "MIT"
'''
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_modelfile_is_a_preset(config: Path, tmp_path: Path) -> None:
    (tmp_path / "Modelfile").write_text(MODELFILE)
    done = CliRunner().invoke(app, ["import", str(tmp_path / "Modelfile"), "sailor"])
    assert done.exception is None, done.stderr
    assert "PARAMETER num_gpu is left out" in done.stderr
    assert "PARAMETER num_predict -1 is left out" in done.stderr
    values = settings_file.read_preset("sailor", settings_file.read_file())
    template = Path(values.pop("template"))
    assert values == {
        "model": str(tmp_path / "tiny.gguf"), "system": 'You are a pirate.\nSay "arr".', "temp": 0.7, "ctx": 2048,
        "stop": ["<|im_end|>", "User:"], "lora": [str(tmp_path / "pirate.gguf")],
    }  # fmt: skip
    texts = [("system", "S"), ("user", "a {{ b }} 'c'"), ("assistant", "d"), ("user", "é😀")]
    messages = [{"role": role, "content": content} for role, content in texts]
    hugging_face = {"trim_blocks": True, "lstrip_blocks": True}
    ours, theirs = (jinja2.Template(text, **hugging_face) for text in (template.read_text(), CHATML))
    assert ours.render(messages=messages) == theirs.render(messages=messages, add_generation_prompt=True)
    again = CliRunner().invoke(app, ["import", str(tmp_path / "Modelfile"), "sailor"])
    assert "already a preset sailor" in str(again.exception)
    assert CliRunner().invoke(app, ["import", str(tmp_path / "Modelfile"), "sailor", "--yes"]).exception is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('SYSTEM "Be a pirate.\nSay Arr."\n', {"system": "Be a pirate.\nSay Arr."}),
        ('SYSTEM "Say "arr"."\n', {"system": 'Say "arr".'}),
        ('SYSTEM """Be a pirate.\n\n  "Arr"\n"""\n', {"system": 'Be a pirate.\n\n  "Arr"\n'}),
        ("SYSTEM\tBe a pirate.\n", {"system": "Be a pirate."}),
        ("PARAMETER\tseed\t5\n", {"seed": 5}),
        ("  PARAMETER   seed   5\r\n\r\n", {"seed": 5}),
        ('PARAMETER stop "<|im_end|>\n"\nPARAMETER stop """a"b"""', {"stop": ["<|im_end|>\n", 'a"b']}),
        ("PARAMETER top_k -1\nPARAMETER repeat_last_n -1\n", {"top-k": 0, "repeat-last-n": 65536}),
        ("MESSAGE system Be a pirate.\nMESSAGE system Say Arr.", {"system": "Be a pirate.\n\nSay Arr."}),
        ("RENDERER gemma4\nPARSER gemma4\nTEMPLATE {{ .Prompt }}\nPARAMETER top_p 0.9\n", {"top-p": 0.9}),
        ('REQUIRES 0.14.0\nLICENSE """MIT\nSYSTEM no"""\n', {}),
    ],
)
def test_modelfiles_as_ollama_writes_and_reads_them(text: str, expected: dict[str, Any]) -> None:
    found = as_modelfile(read_instructions(f"\ufeffFROM smollm2\n{text}"), Path())
    assert as_preset(found)[0] == {"model": "smollm2", **expected}
    assert not found.template


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("RENDERER gemma4\nPARSER gemma4", "RENDERER gemma4 and PARSER gemma4: not used, the chat template of"),
        ("DRAFT ./small.gguf", "--draft /place/small.gguf drafts with it"),
        ("MESSAGE user Ahoy?", "MESSAGE is left out: user Ahoy?"),
        ("PARAMETER num_gpu 3\nPARAMETER\tnum_keep\t4", "PARAMETER num_gpu, num_keep are left out"),
    ],
)
def test_instructions_without_a_meaning_here_are_named(text: str, note: str) -> None:
    _, (found,) = as_preset(as_modelfile(read_instructions(f"FROM smollm2\n{text}"), Path("/place")))
    assert note in found


def test_of_two_files_the_projector_is_none_to_answer_with(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", tiny_model())
    write(tmp_path / "eyes.gguf", gguf(metadata={"general.architecture": "clip"}))
    for text in ("FROM ./model.gguf\nFROM ./eyes.gguf", "FROM ./eyes.gguf\nFROM ./model.gguf"):
        found, _ = as_preset(as_modelfile(read_instructions(text), tmp_path))
        assert found == {"model": str(tmp_path / "model.gguf"), "mmproj": str(tmp_path / "eyes.gguf")}


def test_ollamas_store_comes_after_the_presets_of_the_model(config: Path, home: Path) -> None:
    put_ollama(
        home / ".ollama/models", "library/tuned:latest",
        system=b"Be a pirate.", params=b'{"stop": ["x"], "num_predict": 9}', template=b"{{ .Prompt }}:",
    )  # fmt: skip
    _, found, origins = filled("run", model="ollama/tuned", prompt=("hi",), preset=None)
    assert (found["system"], found["stop"], found["max_tokens"]) == ("Be a pirate.", ("x",), 9)
    assert options.template_text(found["template"]) == found["template"]
    assert origins["stop"] == "Ollama"
    config.write_text('[models."ollama/tuned"]\nsystem = "Be brief."\n')
    assert filled("run", model="ollama/tuned", prompt=("hi",), preset=None)[1]["system"] == "Be brief."
    config.write_text("")
    assert filled("run", model="ollama/tuned", prompt=("hi",), preset=None, at="http://127.0.0.1:9")[1] == {}


@pytest.mark.parametrize(
    "template", ["{{ range .Messages }}x{{ end }}", "{{ .Prompt }}{{ if .Prompt }}{{ .Response }}{{ end }}", "plain"]
)
def test_other_templates_are_left_out_by_name(template: str) -> None:
    assert as_jinja(template) == ""
    values, notes = as_preset(as_modelfile(read_instructions(f"FROM smollm2\nTEMPLATE {template}"), Path()))
    assert values == {"model": "smollm2"}
    assert "TEMPLATE is left out" in notes[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("SYSTEM hi", "has no FROM"),
        ("Hello there", "not a Modelfile: line 1"),
        ('FROM a\nSYSTEM """x', "the text of line 2 has no end"),
        ("FROM a\nPARAMETER temperature hot", "invalid PARAMETER temperature hot"),
        ('FROM a\nSYSTEM "x\ny', "the text of line 2 has no end"),
        ("FROM a\nMESSAGE tool x", "invalid MESSAGE tool"),
        ("FROM a\nPARAMETER seed", "not a Modelfile: line 2"),
    ],
)
def test_modelfiles_that_can_not_be_read(text: str, words: str) -> None:
    with pytest.raises(UsageError) as raised:
        as_preset(as_modelfile(read_instructions(text), Path()))
    assert words in str(raised.value)


def test_the_page_reads_presets_as_its_fields_are_called(config: Path) -> None:
    (found,) = serve.page_presets()
    assert (found["name"], found["model"], found["system"], found["thinking"]) == ("pirate", "smollm2", "Arr.", True)
    assert found["values"]["temperature"] == 0.3
    config.unlink()
    assert serve.page_presets() == []
