"""Tuned settings: their file, keys and choice, the axes tried, and the display."""

from __future__ import annotations

import io
import json
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.gguf_writer import runnable_model, tiny_model, write
from support.simulated_machines import SimulatedMachine, all_settings

from llmrun.config import MEASURED_FILE, load_settings
from llmrun.errors import EngineCrashedError, LlmrunError, UsageError
from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.lab.bench.results import BenchWarning
from llmrun.lab.bench.tune import (
    DECODE,
    PREFILL,
    Axis,
    EngineBackend,
    Improvement,
    SearchResult,
    Step,
    Trial,
    TuneProgress,
    _memory_axes,
    axes_for,
    count_engines,
    keep,
    most_ubatch,
    search,
    thread_counts,
)
from llmrun.lab.quantize.types import FastCopy
from llmrun.lab.views.tune import TuneView, as_json, line_of, show_fast_copy, show_outcome
from llmrun.model.loading import A_CHAT, first_that_fits, prepare
from llmrun.models.registry import ModelSpec
from llmrun.planning.hardware import Hardware
from llmrun.planning.plan import Plan, make_plan, margin
from llmrun.planning.preferences import LoadPreferences
from llmrun.planning.tuned import (
    Profile,
    TunableSettings,
    TunedSettings,
    choose,
    forget,
    remember,
    remembered,
    summaries,
)
from llmrun.protocol.devices import Gpu
from llmrun.protocol.jobs.bench import Bench, BenchModel, BenchResult, BenchTest, Repetition
from llmrun.protocol.loading import Load
from llmrun.statistics import Verdict
from llmrun.ui.terminal.output import Output

GIB = 1 << 30
MACHINE = Hardware("Some CPU", ("avx2", "avx512f"), 4, 8, None, 16 * GIB, 12 * GIB)
DEFAULT = TunableSettings(threads=4, threads_batch=4)
FAST_START = Profile(replace(DEFAULT, repack=False), 0.2, 200.0, 36.0)
TUNED = TunedSettings(
    Profile(DEFAULT, 1.0, 120.0, 40.0),
    (FAST_START, Profile(replace(DEFAULT, threads=3, huge_pages=True), 1.0, 120.0, 44.0)),
    512,
    1_800_000_000.0,
)


@pytest.fixture
def header(tmp_path: Path) -> Header:
    return read_header(write(tmp_path / "model.gguf", tiny_model()))


def test_round_trip(header: Header, tmp_path: Path) -> None:
    assert remembered(header, MACHINE, tmp_path) is None
    remember(TUNED, header, MACHINE, tmp_path / "state")
    assert remembered(header, MACHINE, tmp_path / "state") == TUNED
    again = replace(TUNED, others=())
    remember(again, header, MACHINE, tmp_path / "state")
    assert remembered(header, MACHINE, tmp_path / "state") == again
    assert [file.name for file in (tmp_path / "state").iterdir()] == [MEASURED_FILE]


def test_all_that_was_found_here_is_listed(header: Header, tmp_path: Path) -> None:
    assert summaries(MACHINE, tmp_path) == []
    remember(TUNED, header, MACHINE, tmp_path, "tiny")
    deeper = read_header(write(tmp_path / "c.gguf", tiny_model({"llama.block_count": 3})))
    remember(replace(TUNED, others=()), deeper, MACHINE, tmp_path)
    latest, first = summaries(MACHINE, tmp_path)
    assert latest.startswith("a model without a name, tuned on ")
    assert first == f"tiny, {TUNED.summary}"
    assert summaries(replace(MACHINE, physical_cores=2), tmp_path) == []


def test_other_machines_and_shapes_have_their_own(header: Header, tmp_path: Path) -> None:
    remember(TUNED, header, MACHINE, tmp_path)
    assert remembered(header, replace(MACHINE, memory_available=GIB), tmp_path) == TUNED
    assert remembered(header, replace(MACHINE, physical_cores=2), tmp_path) is None
    assert remembered(header, replace(MACHINE, cpu_flags=()), tmp_path) is None
    renamed = read_header(write(tmp_path / "b.gguf", tiny_model({"general.name": "Another"})))
    assert remembered(renamed, MACHINE, tmp_path) == TUNED
    deeper = read_header(write(tmp_path / "c.gguf", tiny_model({"llama.block_count": 3})))
    assert remembered(deeper, MACHINE, tmp_path) is None
    remember(replace(TUNED, depth=7), deeper, MACHINE, tmp_path)
    assert remembered(header, MACHINE, tmp_path) == TUNED


def test_another_build_of_llama_cpp_has_its_own(
    header: Header, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(TUNED, header, MACHINE, tmp_path)
    monkeypatch.setattr("llmrun.planning.measurements._build", lambda: [["libllama.so", 1, 2]])
    assert remembered(header, MACHINE, tmp_path) is None


def test_noise_does_not_undo_what_was_found_in_quiet(header: Header, tmp_path: Path) -> None:
    assert keep(outcome(), header, MACHINE, tmp_path) == TUNED
    nothing = outcome(tuned=replace(TUNED, others=()), compared=())
    assert keep(nothing, header, MACHINE, tmp_path) == TUNED
    assert remembered(header, MACHINE, tmp_path) == TUNED
    quiet = replace(nothing, warnings=())
    assert keep(quiet, header, MACHINE, tmp_path) == quiet.tuned == remembered(header, MACHINE, tmp_path)


def test_a_tuned_split_mode_is_used_where_as_much_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: Header
) -> None:
    gpus = tuple(Gpu(name, "Card", GIB, GIB) for name in ("CUDA0", "CUDA1"))
    monkeypatch.setattr("llmrun.model.loading.this_machine", lambda *_: machine)
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path))
    machine = replace(MACHINE, gpus=gpus)
    for mode in ("none", "tensor"):
        found = replace(TUNED, others=(Profile(replace(DEFAULT, split_mode=mode), 1.0, 400.0, 80.0),))
        remember(found, header, machine, tmp_path)
        spec = ModelSpec("tiny", path=header.path)
        model = prepare(spec, header.path, expected=A_CHAT)
        assert (model.load.split_mode, model.plan.tuned) == (mode, (f"split mode {mode}",))
        assert len(model.plan.gpu_bytes) == (1 if mode == "none" else 2)
        given = prepare(spec, header.path, LoadPreferences(tensor_split="3/1"), expected=A_CHAT)
        assert given.load.split_mode == "layer"
    layers = {"layer": -1, "tensor": 3}  # as the plan of each mode would have them

    def planned(preferences: LoadPreferences) -> Plan:
        return replace(model.plan, load=replace(model.load, gpu_layers=layers[preferences.split_mode]))

    assert model.tuned
    assert first_that_fits(LoadPreferences(), model.tuned, planned)[0].split_mode == "layer"


def test_as_many_engines_as_fit_on_each_gpu(header: Header) -> None:
    machine = replace(MACHINE, gpus=(Gpu("CUDA0", "Card", GIB, GIB), Gpu("CUDA1", "Card", GIB, GIB)))
    plan = make_plan(header, machine, LoadPreferences())
    assert count_engines(header, machine, plan) > 1
    large = replace(plan, gpu_bytes=(("CUDA0", GIB // 3), ("CUDA1", GIB // 3)))
    assert count_engines(header, machine, large) == 1


def test_a_folder_that_can_not_be_written_is_said(header: Header, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LlmrunError, match="can't write"):
        keep(outcome(), header, MACHINE, tmp_path / "file")


def test_forget(header: Header, tmp_path: Path) -> None:
    assert not forget(header, MACHINE, tmp_path)
    remember(TUNED, header, MACHINE, tmp_path)
    assert forget(header, MACHINE, tmp_path)
    assert not (tmp_path / MEASURED_FILE).exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"schema": 2, "entries": []}', b'{"schema": 1, "entries": 3}'])
def test_a_damaged_file_is_as_good_as_none(header: Header, tmp_path: Path, content: bytes) -> None:
    (tmp_path / MEASURED_FILE).write_bytes(content)
    assert remembered(header, MACHINE, tmp_path) is None
    remember(TUNED, header, MACHINE, tmp_path)
    assert remembered(header, MACHINE, tmp_path) == TUNED


@pytest.mark.parametrize(
    ("name", "value"),
    [("threads", 0), ("threads", "4"), ("threads", 10_000), ("n_ubatch", 4096), ("flash_attention", "perhaps"),
     ("kv_type", "q1"), ("repack", 1), ("spins", -5), ("unheard_of", 1)],
)  # fmt: skip
def test_settings_that_no_engine_can_have_are_passed_over(
    header: Header, tmp_path: Path, name: str, value: object
) -> None:
    remember(TUNED, header, MACHINE, tmp_path)
    data = json.loads((tmp_path / MEASURED_FILE).read_text())
    data["entries"][0]["tuned"]["default"]["settings"][name] = value
    (tmp_path / MEASURED_FILE).write_text(json.dumps(data))
    assert remembered(header, MACHINE, tmp_path) is None


@pytest.mark.parametrize("rate", ["NaN", "0", "-1", "Infinity", '"fast"'])
def test_rates_that_are_none_are_passed_over(header: Header, tmp_path: Path, rate: str) -> None:
    remember(TUNED, header, MACHINE, tmp_path)
    text = (tmp_path / MEASURED_FILE).read_text()
    (tmp_path / MEASURED_FILE).write_text(text.replace('"decode_rate": 40.0', f'"decode_rate": {rate}'))
    assert remembered(header, MACHINE, tmp_path) is None


def test_the_profile_follows_from_how_long_prompt_and_answer_are() -> None:
    assert choose(TUNED, 2000, 100) == FAST_START.settings
    assert choose(TUNED, 20, 10) == FAST_START.settings  # loads faster
    assert choose(TUNED, 200, 5000).threads == 3
    assert choose(TUNED, 200, 5000, own_environment=False) == DEFAULT
    assert choose(replace(TUNED, others=()), 2000, 100) == DEFAULT


def test_words() -> None:
    assert TUNED.prefill_gain == pytest.approx(200 / 120)
    assert TUNED.decode_gain == pytest.approx(1.1)
    day = time.strftime("%Y-%m-%d", time.localtime(TUNED.at))
    assert TUNED.summary == (f"tuned on {day}: prefill ×1.67, decode ×1.10 with repack off or 3 threads, huge pages on")
    assert replace(TUNED, others=()).summary.endswith("no setting was measurably faster")
    changed = replace(DEFAULT, threads=1, flash_attention="off", spins=0, mmap=False)
    assert changed.changes(DEFAULT) == ("1 thread", "flash attention off", "mmap off", "idle threads sleep at once")


def test_the_json_of_a_profile_names_one_type_of_the_kv_cache() -> None:
    quantized = replace(DEFAULT, kv_type_k="q8_0", kv_type_v="q8_0")
    assert Profile(quantized, 0.5, 100.0, 10.0).to_json() == {
        "settings": {
            "threads": 4, "threads_batch": 4, "n_ubatch": 512, "flash_attention": "auto", "kv_type": "q8_0",
            "repack": True, "mmap": True, "split_mode": "layer", "spins": 8000, "huge_pages": False,
            "cpu_variant": "",
        },
        "load_seconds": 0.5,
        "prefill_rate": 100.0,
        "decode_rate": 10.0,
    }  # fmt: skip


def test_settings_get_into_a_load_and_back() -> None:
    load = Load("/m.gguf", n_ctx=4096, threads=4, flash_attention="off")
    settings = TunableSettings.of(load)
    assert settings == TunableSettings(threads=4, threads_batch=4, flash_attention="off")
    assert TunableSettings.of(settings.applied(load)) == settings
    other = TunableSettings(
        threads=3, threads_batch=2, n_ubatch=128, flash_attention="on", kv_type_k="q8_0", kv_type_v="q8_0",
        repack=False, mmap=False,
    )  # fmt: skip
    assert TunableSettings.of(other.applied(load)) == other


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert DEFAULT.environment == {}
    settings = replace(DEFAULT, spins=0, huge_pages=True)
    assert settings.environment == {"GOMP_SPINCOUNT": "0", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=3")
    assert settings.environment["GLIBC_TUNABLES"] == "glibc.malloc.check=3:glibc.malloc.hugetlb=1"


def test_a_variant_of_the_processors_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMRUN_CPU", raising=False)
    settings, load = replace(DEFAULT, cpu_variant="haswell"), Load("/m.gguf", n_ctx=4096)
    assert settings.environment == {}
    assert not settings.loads_as_usual
    assert settings.changes(DEFAULT, in_answers=True) == ("processor variant haswell",)
    assert DEFAULT.changes(settings) == ("ggml's own processor variant",)
    assert settings.applied_within(load, LoadPreferences(), without_flash=True).cpu_variant == "haswell"
    monkeypatch.setenv("LLMRUN_CPU", "zen4")  # the user's stays
    assert settings.applied_within(load, LoadPreferences(), without_flash=True).cpu_variant == ""


@pytest.mark.parametrize(
    ("cores", "logical", "quota", "expected"),
    [(1, 1, None, (1,)), (2, 2, None, (2, 1)), (4, 8, None, (8, 4, 3, 2, 1)), (16, 32, 2.5, (2, 1))],
)
def test_thread_counts(cores: int, logical: int, quota: float | None, expected: tuple[int, ...]) -> None:
    machine = replace(MACHINE, physical_cores=cores, logical_cores=logical, cpu_quota=quota)
    assert thread_counts(machine) == expected


def test_what_is_tried(header: Header) -> None:
    names = [axis.name for axis in axes_for(header, MACHINE, DEFAULT)]
    assert names[:2] == ["threads", "batch threads"]
    assert "repack" not in names  # Q4_1 never is
    assert "KV type" not in names
    (axis,) = (axis for axis in axes_for(header, MACHINE, DEFAULT, kv=True) if axis.name == "KV type")
    assert axis.rivals(DEFAULT) == {
        replace(DEFAULT, kv_type_k="q8_0", kv_type_v="q8_0", flash_attention="on"): "KV cache q8_0, flash attention on"
    }
    assert "split mode" not in [axis.name for axis in axes_for(header, MACHINE, DEFAULT, n_gpus=1)]
    axis = axes_for(header, MACHINE, DEFAULT, n_gpus=2)[0]
    assert [each.split_mode for each in axis.rivals(DEFAULT)] == ["none", "row", "tensor"]
    assert "processor variant" not in [axis.name for axis in axes_for(header, MACHINE, DEFAULT, cpu_variants=["zen4"])]
    found = axes_for(header, MACHINE, DEFAULT, cpu_variants=["zen4", "haswell"])
    (axis,) = (axis for axis in found if axis.name == "processor variant")
    assert [rival.cpu_variant for rival in axis.rivals(DEFAULT)] == ["haswell"]
    assert [rival.cpu_variant for rival in axis.rivals(replace(DEFAULT, cpu_variant="haswell"))] == [""]
    off = replace(DEFAULT, flash_attention="off")
    (axis,) = (axis for axis in axes_for(header, MACHINE, off) if axis.name == "flash attention")
    assert [rival.flash_attention for rival in axis.rivals(off)] == ["on"]


def test_larger_micro_batches_are_tried_where_weights_are_read_for_each(
    header: Header, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu("CUDA0", "a card", memory_total=GIB, memory_free=GIB)
    assert [most_ubatch(header, machine) for machine in (MACHINE, replace(MACHINE, gpus=(gpu,)))] == [512, 2048]
    monkeypatch.setattr(Header, "expert_bytes", {0: 5})
    assert most_ubatch(header, MACHINE) == 2048
    for n_batch, expected in ((512, []), (1024, [1024]), (2048, [1024, 2048])):
        axes = axes_for(header, MACHINE, DEFAULT, n_batch=n_batch)
        rivals = [rival for axis in axes if axis.name == "larger ubatch" for rival in axis.rivals(DEFAULT)]
        assert [rival.n_ubatch for rival in rivals] == expected


@pytest.mark.parametrize("has_room", [True, False])
def test_a_larger_micro_batch_takes_memory_but_no_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path))
    model = write(tmp_path / "model.gguf", runnable_model({"llama.context_length": 4096}))
    spec, machine = ModelSpec("tiny", path=model), MACHINE
    monkeypatch.setattr("llmrun.model.loading.this_machine", lambda _workers: machine)
    plain = prepare(spec, model)
    if not has_room:
        machine = replace(machine, memory_available=plain.plan.memory.needed + margin(0) + 1_000_000)
    fast = Profile(replace(DEFAULT, n_ubatch=2048), 1.0, 500.0, 40.0)
    remember(replace(TUNED, others=(fast,)), read_header(model), machine, load_settings().state_dir)
    found = prepare(spec, model, expected=A_CHAT)
    assert found.load.n_ctx == plain.load.n_ctx
    assert found.load.n_ubatch == found.load.n_batch == (2048 if has_room else 512)
    assert (found.plan.memory.compute > 2 * plain.plan.memory.compute) is has_room
    for given in ({"n_ubatch": 64}, {"n_batch": 128}):
        load = prepare(spec, model, LoadPreferences(**given), expected=A_CHAT).load
        assert (load.n_batch, load.n_ubatch) == ((512, 64) if "n_ubatch" in given else (128, 128))


@pytest.mark.parametrize(
    ("policy", "free", "expected"),
    [("always [madvise] never", 12 * GIB, 2), ("always [madvise] never", 0, 1), ("[always] madvise never", GIB, 1),
     ("always madvise [never]", GIB, 0), ("", GIB, 0)],
)  # fmt: skip
def test_huge_pages_are_tried_where_linux_gives_them(
    header: Header, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, free: int, expected: int
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    (tmp_path / "enabled").write_text(policy)
    axes = _memory_axes(header, replace(MACHINE, memory_available=free), huge_pages=tmp_path / "enabled")
    assert sum(len(axis.changes) for axis in axes if axis.name == "huge pages") == expected


def outcome(**changes: Any) -> SearchResult:
    verdict = Verdict("faster", 1.67, 1.6, 1.74, (8, 8), True)
    compared = tuple(Improvement(profile, verdict, verdict) for profile in TUNED.others)
    tests = BenchTest(n_prompt=256), BenchTest(n_gen=16, n_depth=512)
    busy = BenchWarning("load", "other programs used 1.5 of 2 cores")
    return replace(SearchResult(TUNED, compared, (), (), *tests, 42.0, (busy,)), **changes)


def output() -> tuple[Output, io.StringIO, io.StringIO]:
    stdout, stderr = io.StringIO(), io.StringIO()
    return Output(stdout=stdout, stderr=stderr, stdin=io.StringIO(), environment={}), stdout, stderr


def test_table() -> None:
    out, stdout, stderr = output()
    show_outcome(out, "tiny", outcome(), TUNED)
    heading, default, repack, threads, gain = stdout.getvalue().splitlines()
    assert heading.split() == ["SETTINGS", "LOAD", "PREFILL", "pp256", "DECODE", "tg16", "@", "d512"]
    assert default.startswith("default")
    assert repack.startswith("repack off")
    assert "×1.67 (1.60 to 1.74)" in repack
    assert threads.startswith("3 threads, huge pages on")
    assert gain == "tiny: prefill ×1.67, decode ×1.10 of the defaults"
    assert "--forget" in stderr.getvalue()
    assert "meanwhile other programs used 1.5 of 2 cores" in stderr.getvalue()


def test_a_copy_for_fast_prompts_is_shown_with_its_commands(tmp_path: Path) -> None:
    found = read_header(write(tmp_path / "Tiny-1B.Q4_1.gguf", tiny_model({"general.file_type": 3})))
    out, _, stderr = output()
    show_fast_copy(out, "tiny", found, FastCopy("Q8_0", 143_000_000, 2.66, 0.98))
    text = " ".join(stderr.getvalue().split())
    assert "reads them ×2.7 as fast and decodes at ×0.98 of the speed" in text
    assert "llmrun quantize tiny --type Q8_0; llmrun evaluate Tiny-1B-Q8_0.gguf --reference tiny" in text
    assert as_json("tiny", outcome())["fast_copy"] is None
    assert as_json("tiny", outcome(), FastCopy("Q8_0", 1, 2.0, 1.0))["fast_copy"]["prefill"] == 2.0


def test_what_can_change_a_greedy_answer_is_said() -> None:
    out, _, stderr = output()
    show_outcome(out, "tiny", outcome(), TUNED)
    assert "--temp 0" in stderr.getvalue()
    assert "(3 threads, repack off)" in stderr.getvalue()
    others = (replace(FAST_START, settings=replace(DEFAULT, n_ubatch=128, huge_pages=True, mmap=False)),)
    out, _, stderr = output()
    show_outcome(out, "tiny", outcome(tuned=replace(TUNED, others=others)), TUNED)
    assert "--temp 0" not in stderr.getvalue()


def test_defaults_that_are_best_are_said_to_be() -> None:
    out, stdout, stderr = output()
    unsure = (
        Improvement(FAST_START, Verdict("noisy", 1.1, 0.8, 1.4, (3, 3), True), Verdict("same", 1, 1, 1, (3, 3), True)),
    )
    nothing = replace(TUNED, others=())
    show_outcome(out, "tiny", outcome(tuned=nothing, compared=(), unsure=unsure), nothing)
    assert "too uncertain to store: repack off: prefill ×1.10 (0.80 to 1.40), decode" in stderr.getvalue()
    assert stdout.getvalue().splitlines()[-1].startswith("tiny: nothing could be told, so the defaults stay")
    assert "--forget" not in stderr.getvalue()


@pytest.mark.parametrize(
    ("verdicts", "words"),
    [
        (("slower", "no difference"), "the defaults are best here"),
        (("unclear", "unclear", "no time"), "nothing could be told, so the defaults stay"),
        (("busy", "no time"), "nothing could be told, so the defaults stay"),
        (("slower", "unclear"), "no setting was measurably faster"),
        (("slower", "busy"), "no setting was measurably faster"),
    ],
)
def test_a_search_without_a_gain_says_what_it_knows(verdicts: tuple[str, ...], words: str) -> None:
    out, stdout, _ = output()
    tried = tuple(Trial("repack off", "decode", verdict) for verdict in verdicts)
    nothing = replace(TUNED, others=())
    show_outcome(out, "tiny", replace(outcome(tuned=nothing, compared=()), tried=tried), nothing)
    assert stdout.getvalue().splitlines()[-1].startswith(f"tiny: {words}")


def test_json() -> None:
    data = json.loads(json.dumps(as_json("tiny", outcome())))
    assert data["model"] == "tiny"
    assert data["default"]["settings"]["threads"] == 4
    assert [each["profile"]["settings"]["repack"] for each in data["tuned"]] == [False, True]


def test_steps_are_lines_and_what_was_left_out_is_said() -> None:
    out, stdout, stderr = output()
    with TuneView(out, 30) as view:
        view.show(TuneProgress("repack off (prefill)", 3.0))
        view.show(Trial("repack off", "prefill", "failed"))
        view.show(Trial("ubatch 128", "prefill", "no time"))
        view.show(Trial("2 threads", "decode", "busy"))
    lines = stderr.getvalue().splitlines()
    assert lines[1].split() == ["repack", "off", "prefill", "failed"]
    assert lines[2:] == [
        "no time was left for (--seconds 60): ubatch 128",
        "not tried while other programs compute, because that changes the best settings: 2 threads",
    ]
    assert stdout.getvalue() == ""
    assert "at 512 tokens" in line_of(Trial("repack off", "decode", "slower", None, 512))


# ---- the search for fast settings, on machines that exist as formulas: near the best, and never below the default


BOTH = (PREFILL, DECODE)
REPACK = Axis("repack", ((("repack", False),),), BOTH)
FLASH_ATTENTION = Axis("flash attention", ((("flash_attention", "off"),),), BOTH, at_depth=True)


def default_of(machine: SimulatedMachine) -> TunableSettings:
    return TunableSettings(threads=machine.cores, threads_batch=machine.cores)


def axes_of(machine: SimulatedMachine) -> tuple[Axis, ...]:
    """Everything that there is to try, as axes_for() has it."""
    cores = machine.cores
    counts = sorted({count for count in (cores - 1, -(-cores * 3 // 4), -(-cores // 2), -(-cores // 4)) if count})
    huge_pages = (("huge_pages", True),)
    return (
        Axis("threads", tuple((("threads", count),) for count in counts), (DECODE,), wants_quiet=True),
        Axis("batch threads", tuple((("threads_batch", count),) for count in counts), (PREFILL,), wants_quiet=True),
        REPACK,
        FLASH_ATTENTION,
        Axis("ubatch", ((("n_ubatch", 256),), (("n_ubatch", 128),)), (PREFILL,), whole_batch=True),
        Axis("huge pages", (huge_pages, (*huge_pages, ("mmap", False))), (DECODE, PREFILL)),
        Axis("waiting", ((("spins", 0),), (("spins", 300_000),)), (DECODE,), wants_quiet=True),
    )


def share_of_best(machine: SimulatedMachine, found: SearchResult, goal: str) -> float:
    """True speed of what was found for this goal, over that of the best combination of all."""
    test = found.prefill_test if goal == PREFILL else found.decode_test
    profiles = (found.tuned.default, *found.tuned.others)
    rate = (lambda each: each.prefill_rate) if goal == PREFILL else (lambda each: each.decode_rate)
    chosen = max(profiles, key=rate).settings
    settings = all_settings(default_of(machine), axes_of(machine))
    return machine.true_rate(chosen, test) / max(machine.true_rate(each, test) for each in settings)


def share_of_default(machine: SimulatedMachine, found: SearchResult) -> float:
    """The worst that any kept profile does at what it was kept for."""
    default, worst = default_of(machine), 1.0
    for compared in found.compared:
        kept = ((compared.prefill, found.prefill_test), (compared.decode, found.decode_test))
        for verdict, test in kept:
            if verdict.kind == "faster":
                rates = [machine.true_rate(each, test) for each in (compared.profile.settings, default)]
                worst = min(worst, rates[0] / rates[1])
    return worst


@pytest.mark.parametrize("cores", [2, 8])
def test_quiet_machines_get_97_percent_of_an_exhaustive_sweep_in_a_minute(cores: int) -> None:
    shares = []
    for seed in range(20):
        machine = SimulatedMachine(seed, cores, noise=0.01, bursts=0.02)
        found = search(machine, default_of(machine), axes_of(machine))
        assert machine.now < 60
        assert share_of_default(machine, found) > 0.99
        shares += [share_of_best(machine, found, goal) for goal in BOTH]
    assert sum(share >= 0.97 for share in shares) >= 0.95 * len(shares)


def test_noise_never_makes_it_slower_than_the_default() -> None:
    worst = []
    for seed in range(25):
        machine = SimulatedMachine(seed, noise=0.06, bursts=0.3)
        worst.append(share_of_default(machine, search(machine, default_of(machine), axes_of(machine))))
    assert sum(share < 0.98 for share in worst) <= 1


def test_nothing_to_gain_is_found_out() -> None:
    """Settings that change nothing: at most as often as the 95 % say, one of them is kept."""
    kept = 0
    for seed in range(30):
        machine = SimulatedMachine(seed, noise=0.02)
        machine._effects = dict.fromkeys(machine._effects, (0.0, 0.0))
        machine._attention = machine._small_batch = machine._repacked_batch = 0.0
        kept += bool(search(machine, default_of(machine), axes_of(machine)[2:]).tuned.others)
    assert kept <= 4


def test_prefill_and_decode_may_want_different_settings() -> None:
    machine = SimulatedMachine(1, noise=0.01)
    machine._effects["repack"] = (math.log(1.6), math.log(0.8))
    found = search(machine, default_of(machine), [REPACK])
    (profile,) = found.tuned.others
    assert not profile.settings.repack
    assert profile.prefill_rate / found.tuned.default.prefill_rate == pytest.approx(1.6, rel=0.03)
    assert profile.decode_rate / found.tuned.default.decode_rate == pytest.approx(0.8, rel=0.03)


def test_a_larger_micro_batch_is_measured_with_a_prompt_that_fills_it() -> None:
    machine = SimulatedMachine(1, noise=0.01)
    machine._small_batch, machine._repacked_batch = math.log(0.8) / 4, 0.0
    changes = [(("n_ubatch", count),) for count in (1024, 2048)]
    axes = [Axis("larger ubatch", (change,), (PREFILL,), whole_batch=True) for change in changes]
    found = search(machine, default_of(machine), axes, seconds=600)
    (profile,) = found.tuned.others
    assert (profile.settings.n_ubatch, found.prefill_test.n_prompt) == (2048, 2048)


def test_uncertain_gains_do_not_count() -> None:
    machine = SimulatedMachine(1, noise=0.01)
    machine._effects["repack"] = (math.log(1.6), 0.0)
    found = search(machine, default_of(machine), [REPACK])
    (compared,) = found.compared
    assert compared.decode.kind == "same"
    assert compared.profile.decode_rate == found.tuned.default.decode_rate
    assert found.tuned.decode_gain == 1.0


def test_flash_attention_is_measured_at_depth() -> None:
    machine = SimulatedMachine(2, noise=0.01)
    machine._attention = 5e-4
    found = search(machine, default_of(machine), [FLASH_ATTENTION])
    assert [each.settings.flash_attention for each in found.tuned.others] == ["off"]
    assert found.decode_test.n_depth == found.tuned.depth > 0


@pytest.mark.parametrize("depth", [0, 512])
def test_depth_can_be_given(depth: int) -> None:
    machine = SimulatedMachine(2)
    steps: list[Step] = []
    search(machine, default_of(machine), [FLASH_ATTENTION], depth=depth, on_step=steps.append)
    assert {step.depth for step in steps if isinstance(step, Trial)} == {depth}


def test_a_setting_that_crashes_is_passed_over() -> None:
    machine = SimulatedMachine(1)
    default = default_of(machine)
    machine.crashes_with = replace(default, repack=False)
    found = search(machine, default, [REPACK])
    assert {(tried.change, tried.verdict) for tried in found.tried} == {("repack off", "failed")}
    assert found.tuned.others == ()
    machine.error = UsageError("no such split mode here")
    found = search(machine, default, [REPACK])
    assert {tried.verdict for tried in found.tried} == {"failed"}
    machine.crashes_with = default
    with pytest.raises(UsageError):
        search(machine, default, [REPACK])


def test_threads_are_not_chosen_while_other_programs_compute() -> None:
    machine = SimulatedMachine(3, cores=8, noise=0.01)
    machine.busy = True
    machine._saturation = 1.0
    found = search(machine, default_of(machine), axes_of(machine))
    assert {each.settings.threads for each in found.tuned.others} <= {8}
    assert {tried.verdict for tried in found.tried if "thread" in tried.change} == {"busy"}


@pytest.mark.parametrize("seconds", [15, 30, 120])
def test_it_keeps_to_its_time(seconds: int) -> None:
    for seed in range(10):
        machine = SimulatedMachine(seed)
        search(machine, default_of(machine), axes_of(machine), seconds=seconds)
        assert machine.now <= seconds


def test_a_model_that_is_too_slow_is_refused_with_a_time_that_is_enough() -> None:
    machine = SimulatedMachine(1)
    machine._prefill, machine._decode = 0.5, 0.1
    with pytest.raises(UsageError, match="not enough for this model") as refused:
        search(machine, default_of(machine), [REPACK])
    machine.now = 0.0
    search(machine, default_of(machine), [REPACK], seconds=float(refused.value.hint.split()[-1]))


def test_changes_without_time_are_reported() -> None:
    machine = SimulatedMachine(1)
    machine._prefill, machine._decode, machine._load = 60.0, 6.0, 3.0
    found = search(machine, default_of(machine), axes_of(machine), seconds=30)
    assert "no time" in {tried.verdict for tried in found.tried}
    assert found.seconds <= 30


def test_unconfirmed_settings_are_not_kept() -> None:
    machine = SimulatedMachine(1, noise=0.0, bursts=0.0)
    machine._effects["repack"] = (1.0, 1.0)
    rates, ends = machine.rates, 30.0

    def slow_at_the_end(settings: TunableSettings, test: BenchTest, repetitions: int) -> tuple[float, ...]:
        machine.now += 30.0 * (not settings.repack and machine.measured > 8)
        return rates(settings, test, repetitions)

    machine.rates = slow_at_the_end  # type: ignore[method-assign]
    found = search(machine, default_of(machine), [REPACK], seconds=ends)
    assert found.compared == ()
    assert found.tuned.others == ()
    assert found.tried[-1].verdict == "no time"


def test_candidates_slower_in_every_pair_are_measured_no_longer() -> None:
    machine = SimulatedMachine(1, noise=0.01, bursts=0.0)
    machine._effects["repack"] = (math.log(0.5), math.log(0.5))
    counts = Counter[TunableSettings]()
    rates = machine.rates

    def counting(settings: TunableSettings, test: BenchTest, repetitions: int) -> tuple[float, ...]:
        counts[settings] += 1
        return rates(settings, test, repetitions)

    machine.rates = counting  # type: ignore[method-assign]
    found = search(machine, default_of(machine), [REPACK])
    assert counts[replace(default_of(machine), repack=False)] == 4  # two for each goal
    assert [trial.verdict for trial in found.tried] == ["slower", "slower"]


def test_measuring_the_default_alone_is_enough_when_nothing_can_be_tried() -> None:
    machine = SimulatedMachine(4, noise=0.0, bursts=0.0)
    found = search(machine, default_of(machine), [])
    expected = machine.true_rate(default_of(machine), BenchTest(n_gen=8))
    assert found.tuned.default.decode_rate == pytest.approx(expected)
    assert found.compared == ()


# ---- the engines of a search: separate where loading differs, shared where it does not, closed for room


MODEL = BenchModel("tiny", 1, 1, 1, 1, "", "", "CPU", "", "")
ENGINES_DEFAULT = TunableSettings(threads=2, threads_batch=2)
EIGHT_TOKENS = BenchTest(n_gen=8)


class FakeRunner:
    """A runner that takes two seconds for everything, and records its commands."""

    started: list[FakeRunner]

    def __init__(self, environment: Mapping[str, str] | None) -> None:
        self.environment = environment
        self.commands: list[Bench] = []
        self.closed = False
        FakeRunner.started.append(self)

    def do(self, kind: Any, command: Bench) -> BenchResult:
        if command.load.n_ubatch == 13:
            raise EngineCrashedError("the engine died")
        self.commands.append(command)
        return BenchResult(MODEL, (Repetition(2_000_000_000),) * command.repetitions, 500_000_000, None)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> EngineBackend:
    FakeRunner.started = []
    monkeypatch.setattr("llmrun.lab.bench.tune.launch", lambda environment: environment)
    monkeypatch.setattr("llmrun.lab.bench.tune.EngineClient", FakeRunner)
    return EngineBackend(Load("/model.gguf", n_ctx=512, threads=2), n_engines=2)


def test_rates(machine: EngineBackend) -> None:
    assert machine.rates(ENGINES_DEFAULT, EIGHT_TOKENS, 3) == (4.0, 4.0, 4.0)
    assert machine.load_seconds(ENGINES_DEFAULT) == 0.5
    warming, measuring = FakeRunner.started[0].commands
    assert (warming.test.n_gen, warming.repetitions) == (1, 1)  # touches all weights
    assert measuring.warm_up
    machine.rates(ENGINES_DEFAULT, BenchTest(n_prompt=64), 1)
    assert not FakeRunner.started[0].commands[-1].warm_up  # a second prompt would cost as much as the first


def test_one_engine_does_for_what_needs_no_loading(machine: EngineBackend) -> None:
    for settings in (
        ENGINES_DEFAULT,
        replace(ENGINES_DEFAULT, threads=1),
        replace(ENGINES_DEFAULT, threads_batch=1, n_ubatch=128),
    ):
        machine.rates(settings, EIGHT_TOKENS, 1)
    (engine,) = FakeRunner.started
    assert [command.load.threads for command in engine.commands] == [2, 2, 1, 2]
    assert engine.commands[-1].load.n_ubatch == 128


def test_engines_are_kept_apart_and_closed_when_there_is_no_room(machine: EngineBackend) -> None:
    others = [replace(ENGINES_DEFAULT, repack=False), replace(ENGINES_DEFAULT, huge_pages=True, spins=0)]
    for settings in (ENGINES_DEFAULT, others[0], ENGINES_DEFAULT, others[1]):
        machine.rates(settings, EIGHT_TOKENS, 1)
    assert [engine.closed for engine in FakeRunner.started] == [False, True, False]
    assert FakeRunner.started[2].environment == others[1].environment
    assert [machine.pending(each, 0)[0] for each in (ENGINES_DEFAULT, *others)] == [False, True, False]
    machine.close()
    assert all(engine.closed for engine in FakeRunner.started)


def test_a_depth_is_prefilled_once(machine: EngineBackend) -> None:
    assert machine.pending(ENGINES_DEFAULT, 256) == (True, True)
    machine.rates(ENGINES_DEFAULT, replace(EIGHT_TOKENS, n_depth=256), 1)
    assert machine.pending(replace(ENGINES_DEFAULT, threads=1), 256) == (False, False)
    assert machine.pending(ENGINES_DEFAULT, 512) == (False, True)
    assert machine.pending(ENGINES_DEFAULT, 0) == (False, False)


def test_an_engine_that_died_is_replaced(machine: EngineBackend) -> None:
    with pytest.raises(EngineCrashedError):
        machine.rates(replace(ENGINES_DEFAULT, n_ubatch=13), EIGHT_TOKENS, 1)
    assert FakeRunner.started[0].closed
    assert machine.rates(ENGINES_DEFAULT, EIGHT_TOKENS, 1)
    assert len(FakeRunner.started) == 2
