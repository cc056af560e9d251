"""models.toml: every entry has the shape that its header promises."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

import pytest

from llmrun.models.registry import CatalogueEntry, load_catalogue, resolve
from llmrun.protocol.params import resolve_sampling

CATALOGUE = load_catalogue()
ENTRIES = [pytest.param(entry, id=alias) for alias, entry in CATALOGUE.entries.items()]


def test_default_is_the_small_model_with_a_mirror() -> None:
    assert CATALOGUE.default == "smollm2"
    spec = resolve(CATALOGUE.default)
    assert spec.filename == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert spec.mirror is not None
    assert spec.mirror.size == 98_362_432


def test_models_that_ollama_warns_against_for_agents_are_marked() -> None:
    families = re.compile(r"(qwen2\.5|llama3\.[123]|mistral|deepseek-r1)(-coder)?-[0-9.]+b")
    weak = {alias for alias, entry in CATALOGUE.entries.items() if not entry.agents}
    assert weak == {alias for alias in CATALOGUE.entries if families.fullmatch(alias)}


def test_repositories_are_unique() -> None:
    repositories = [entry.repository.lower() for entry in CATALOGUE.entries.values()]
    assert len(set(repositories)) == len(repositories)


@pytest.mark.parametrize("entry", ENTRIES)
def test_names(entry: CatalogueEntry) -> None:
    assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*", entry.alias)
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*", entry.repository)
    assert entry.title
    assert re.match(r"[0-9.]+[MB]\b", entry.parameters)
    assert entry.license
    assert entry.source
    assert re.fullmatch(r"20\d\d-(0\d|1[0-2])(-[0-3]\d)?", entry.released)
    assert entry.released[:7] <= entry.checked[:7]
    assert re.fullmatch(r"20\d\d-(0\d|1[0-2])(-[0-3]\d)?", entry.checked)
    assert entry.kind in {"chat", "embedding"}
    assert 512 <= entry.context <= 1 << 20


@pytest.mark.parametrize("entry", ENTRIES)
def test_quants_and_files(entry: CatalogueEntry) -> None:
    assert entry.quant in entry.quants
    assert len({quant.upper() for quant in entry.quants}) == len(entry.quants)
    assert entry.file.count("{quant}") == 1
    assert entry.file.endswith(".gguf")
    for quant in entry.quants:
        assert re.fullmatch(r"[A-Za-z0-9_]+", quant)
        spec = resolve(f"{entry.alias}:{quant}")
        assert spec.filename == entry.file.replace("{quant}", quant)
        assert resolve(f"{entry.repository}:{quant}").filename == spec.filename


@pytest.mark.parametrize("entry", ENTRIES)
def test_size_fits_the_parameters(entry: CatalogueEntry) -> None:
    number, unit = re.match(r"([0-9.]+)([MB])", entry.parameters).groups()  # type: ignore[union-attr]
    millions = float(number) * (1000 if unit == "B" else 1)
    assert 3 / 8 < entry.size_mb / millions < 10 / 8  # every default quant has 3 to 10 bits per weight


@pytest.mark.parametrize("entry", ENTRIES)
def test_sampling_advice_is_understood(entry: CatalogueEntry) -> None:
    params, origins = resolve_sampling(("model", entry.sampling))
    for name, value in entry.sampling.items():
        assert getattr(params, name) == value
        assert origins[name] == "model"
    assert not (entry.kind == "embedding" and entry.sampling)


@pytest.mark.parametrize("entry", ENTRIES)
def test_mirror(entry: CatalogueEntry) -> None:
    if entry.mirror is None:
        return
    assert PurePosixPath(entry.mirror.member).name == entry.file.replace("{quant}", entry.quant)
    assert re.fullmatch(r"[0-9a-f]{64}", entry.mirror.sha256)
    assert re.fullmatch(r"[0-9a-f]{40}", entry.mirror.revision)
    assert 0 < entry.mirror.wheel_size <= 1.01 * entry.mirror.size
    assert abs(entry.mirror.size / 1e6 - entry.size_mb) < 1
    assert resolve(entry.alias).mirror == entry.mirror
