"""Ollama's and LM Studio's models: found, named, used in place; whatever their files say is checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.model_disk import put_lm_studio, put_ollama, settings, tree

from llmrun.errors import ModelNotFoundError
from llmrun.models.location import find_projector, locate
from llmrun.models.modelfile import NO_MODELFILE, Modelfile
from llmrun.models.registry import resolve
from llmrun.models.store import other_programs
from llmrun.protocol.messages import Message


@pytest.fixture
def ollama(home: Path) -> Path:
    return home / ".ollama/models"


@pytest.fixture
def studio(home: Path) -> Path:
    return home / ".lmstudio/models"


def names() -> list[str]:
    return [model.name for model in other_programs.models()]


def test_nothing_there(home: Path) -> None:
    assert other_programs.models() == []
    assert tree(home) == set()  # and nothing made


def test_ollama(ollama: Path) -> None:
    blob = put_ollama(ollama, "library/llama3.2:1b", b"GGUF weights", file_type="Q8_0")
    put_ollama(ollama, "someone/tiny:latest", b"GGUF 2")
    put_ollama(ollama, "maker/tiny-GGUF:Q4_K_M", b"GGUF 3", host="hf.co")
    first, second, third = other_programs.models()
    assert [first.name, second.name, third.name] == [
        "ollama/hf.co/maker/tiny-GGUF:Q4_K_M",
        "ollama/llama3.2:1b",
        "ollama/someone/tiny:latest",
    ]
    assert (second.path, second.size, second.quant, second.place) == (blob, 12, "Q8_0", "Ollama")
    assert (first.repository, second.repository) == ("maker/tiny-GGUF", "")
    assert not any(model.is_ours for model in (first, second, third))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("ollama/llama3.2:1b", "ollama/llama3.2:1b"),
        ("Ollama/Llama3.2:1B", "ollama/llama3.2:1b"),
        ("ollama/llama3.2", "ollama/llama3.2:latest"),
        ("ollama/lonely", "ollama/lonely:8b"),
        ("ollama/hf.co/maker/tiny-GGUF:Q4_K_M", "ollama/hf.co/maker/tiny-GGUF:Q4_K_M"),
    ],
)
def test_names_of_ollama(ollama: Path, typed: str, meant: str) -> None:
    for number, name in enumerate(("llama3.2:1b", "llama3.2:latest", "lonely:8b")):
        put_ollama(ollama, f"library/{name}", b"GGUF%d" % number)
    put_ollama(ollama, "maker/tiny-GGUF:Q4_K_M", b"GGUF 9", host="hf.co")
    assert other_programs.find(typed).name == meant
    assert resolve(typed).path == other_programs.find(typed).path


def test_what_ollama_has_besides_the_weights(ollama: Path) -> None:
    put_ollama(ollama, "library/plain:latest")
    weights = put_ollama(
        ollama, "library/tuned:latest",
        adapter=b"GGUF adapter", projector=b"GGUF projector", system=b"Be a pirate.", template=b"U: {{ .Prompt }}\nA: ",
        params=b'{"stop": ["U:"], "temperature": 0.5, "top_k": "7", "num_ctx": 2048, "num_gpu": 3, "top_p": 9}',
        messages=b'[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Arr"}]',
    )  # fmt: skip
    assert resolve("ollama/plain").modelfile == NO_MODELFILE
    spec = resolve("ollama/tuned")
    found = spec.modelfile
    assert spec.path == weights
    assert [path.read_bytes() for path in found.adapters] == [b"GGUF adapter"]
    assert found.projector is not None
    assert found.projector.read_bytes() == b"GGUF projector"
    assert find_projector(weights, stored=found.projector) == found.projector
    assert (found.system, found.stop, found.n_ctx) == ("Be a pirate.", ("U:",), 2048)
    assert found.sampling == {"temperature": 0.5, "top_k": 7}
    assert found.messages == (Message("user", "Hi"), Message("assistant", "Arr"))
    assert "U: " in found.template
    invalid, unknown = found.notes
    assert "PARAMETER top_p is left out: invalid PARAMETER top_p 9" in invalid
    assert unknown == "PARAMETER num_gpu is left out: llmrun has no such setting"


def test_where_ollama_writes_prompts_in_code_its_template_means_nothing(ollama: Path) -> None:
    for name, config in (("rendered", {"renderer": "gemma4"}), ("parsed", {"parser": "gemma4"}), ("own", {})):
        put_ollama(ollama, f"library/{name}:latest", config=config, template=b"{{ .Prompt }}")
    assert [bool(resolve(f"ollama/{name}").modelfile.template) for name in ("rendered", "parsed", "own")] == [0, 0, 1]


def test_a_projector_that_ollama_fetched_from_the_hub_belongs_to_the_repository(ollama: Path, tmp_path: Path) -> None:
    put_ollama(ollama, "maker/tiny-GGUF:Q4_K_M", host="hf.co", projector=b"GGUF projector", system=b"Be a pirate.")
    found = locate("maker/tiny-GGUF:Q4_K_M", settings(tmp_path / "hub")).spec.modelfile
    assert found.projector is not None
    assert found == Modelfile(projector=found.projector), "the system prompt is that of Ollama's name"


@pytest.mark.parametrize(
    ("layers", "note"),
    [
        ({"template": b"{{ range .Messages }}{{ .Content }}{{ end }}"}, "TEMPLATE is left out: the chat template of"),
        ({"system": b"\xff"}, "the system of Ollama's store can't be read"),
        ({"embed": b"x"}, "Ollama's layer 'embed' is not used"),
        ({"draft": b"GGUF"}, "Ollama's draft model is not used: --draft "),
        ({"params": b'{"temperature": true}'}, "PARAMETER temperature is left out"),
        ({"params": b'{"stop": [""]}'}, "PARAMETER stop is left out"),
        ({"params": b'{"num_ctx": 1e99}'}, "PARAMETER num_ctx is left out"),
    ],
)
def test_what_is_not_used_is_named(ollama: Path, layers: dict[str, bytes], note: str) -> None:
    put_ollama(ollama, "library/odd:latest", **layers)
    (found,) = resolve("ollama/odd").modelfile.notes
    assert note in found


@pytest.mark.parametrize("data", [b"", b"[", b"7", b"{}", b"[7]", b'[{"role": 7, "content": "x"}]', b"[" * 100_000])
def test_broken_layers_are_no_settings(ollama: Path, data: bytes) -> None:
    put_ollama(ollama, "library/odd:latest", params=data, messages=data)
    assert resolve("ollama/odd").modelfile == NO_MODELFILE


def test_a_model_that_is_not_there_is_explained(ollama: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no models of Ollama"):
        other_programs.find("ollama/llama3.2")
    put_ollama(ollama, "library/llama3.2:1b")
    with pytest.raises(ModelNotFoundError) as caught:
        other_programs.find("ollama/lama3.2:1b")
    assert caught.value.why == "it has ollama/llama3.2:1b"
    assert "did you mean ollama/llama3.2:1b?" in caught.value.hint
    assert "hf.co/ollama/lama3.2:1b" in caught.value.hint


@pytest.mark.parametrize(
    "manifest",
    [
        b"", b"[]", b"7", b"{}", b"\xff", b'{"layers": 7}', b'{"layers": [7, {"mediaType": 1}]}', b"[" * 100_000,
        b'{"layers": [{"mediaType": "application/vnd.ollama.image.model"}]}',
        b'{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../../../etc/passwd"}]}',
        b'{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:%s"}]}' % (b"0" * 64),
        b" " * (2 << 20),
    ],
    ids=lambda data: repr(data[:40]),
)  # fmt: skip
def test_broken_manifests_are_no_models(ollama: Path, manifest: bytes) -> None:
    path = ollama / "manifests/registry.ollama.ai/library/bad/latest"
    path.parent.mkdir(parents=True)
    path.write_bytes(manifest)
    (ollama / "manifests/stray").write_text("x")
    assert names() == []


def test_lm_studio(studio: Path) -> None:
    path = put_lm_studio(studio, "pub/repo-GGUF", "tiny-Q4_K_M.gguf", b"GGUF weights")
    put_lm_studio(studio, "pub/repo-GGUF", "mmproj-tiny-F16.gguf")
    put_lm_studio(studio, "pub/repo-GGUF", "strange.gguf")
    put_lm_studio(studio, "pub/split", "s-Q8_0-00001-of-00002.gguf")
    put_lm_studio(studio, "pub/half", "s-Q8_0-00001-of-00002.gguf")
    put_lm_studio(studio, "pub/split", "s-Q8_0-00002-of-00002.gguf")
    put_lm_studio(studio, ".", "too-high.gguf")
    assert sorted(names()) == [
        "lmstudio/pub/repo-GGUF/strange.gguf",
        "lmstudio/pub/repo-GGUF:Q4_K_M",
        "lmstudio/pub/split:Q8_0",
    ]
    for typed in (
        "lmstudio/pub/repo-GGUF:q4_k_m",
        "lmstudio/pub/repo-GGUF/tiny-Q4_K_M.gguf",
        "LMStudio/Pub/repo-gguf",
    ):
        assert other_programs.find(typed).path == path
    with pytest.raises(ModelNotFoundError, match="LM Studio has no model"):
        other_programs.find("lmstudio/pub/repo-GGUF:Q8_0")


def test_where_lm_studio_may_keep_them(home: Path, tmp_path: Path) -> None:
    put_lm_studio(home / ".cache/lm-studio/models", "a/old", "m-Q4_0.gguf")
    put_lm_studio(tmp_path / "elsewhere/models", "a/pointed", "m-Q4_0.gguf")
    put_lm_studio(tmp_path / "disk", "a/chosen", "m-Q4_0.gguf")
    (home / ".lmstudio-home-pointer").write_text(f"{tmp_path}/elsewhere\n")
    (tmp_path / "elsewhere/settings.json").write_text(json.dumps({"downloadsFolder": str(tmp_path / "disk")}))
    (home / ".lmstudio").symlink_to(tmp_path / "elsewhere")  # one folder is looked at once
    assert sorted(names()) == ["lmstudio/a/chosen:Q4_0", "lmstudio/a/old:Q4_0", "lmstudio/a/pointed:Q4_0"]


@pytest.mark.parametrize("text", ["", "{", '{"downloadsFolder": 7}', '{"downloadsFolder": "relative"}'])
def test_broken_settings(home: Path, text: str) -> None:
    (home / ".lmstudio").mkdir()
    (home / ".lmstudio/settings.json").write_text(text)
    assert names() == []


def test_a_pipe_in_place_of_a_file_does_not_hang(home: Path) -> None:
    import os

    os.mkfifo(home / ".lmstudio-home-pointer")
    assert names() == []


def test_a_setting_that_points_at_a_whole_disk(studio: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_programs, "_MAX_ENTRIES", 10)
    for number in range(30):
        put_lm_studio(studio, f"pub/{number:02}", "m-Q4_0.gguf")
    assert len(names()) < 10


def test_nothing_is_written_there(ollama: Path, studio: Path, home: Path) -> None:
    put_ollama(ollama, "library/llama3.2:1b")
    put_lm_studio(studio, "pub/repo", "tiny-Q4_K_M.gguf")
    before = tree(home)
    other_programs.models()
    other_programs.find("ollama/llama3.2:1b")
    other_programs.find("lmstudio/pub/repo")
    assert tree(home) == before
