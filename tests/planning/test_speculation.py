"""What may be wished of drafts, which step times are remembered for whom, and the gain that they promise."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.gguf_writer import TensorSpec, tiny_model, write

from llmrun.errors import LlmrunError, UsageError
from llmrun.gguf.reader import read_header
from llmrun.planning.hardware import Hardware
from llmrun.planning.speculation import AUTO, OFF, DraftPolicy, expected_gain, read_speculate
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import Finished, Stats
from llmrun.protocol.speculation import AttentionTime, Speculation, StepsMeasured, StepTables, StepTime

GIB = 1 << 30
MACHINE = Hardware("Some CPU", ("avx2",), 4, 8, None, 16 * GIB, 12 * GIB)
LOAD = Load("/tiny.gguf", 512, threads=4)
HYBRID = {
    "general.architecture": "qwen35",
    "qwen35.block_count": 4,
    "qwen35.embedding_length": 64,
    "qwen35.attention.head_count": 4,
    "qwen35.ssm.conv_kernel": 4,
    "qwen35.ssm.inner_size": 64,
    "qwen35.ssm.state_size": 16,
    "qwen35.ssm.group_count": 4,
}
TIMES = (StepTime(1, 0, 0.010), StepTime(4, 0, 0.020), StepTime(1, 1000, 0.030), StepTime(4, 1000, 0.060))


def drafting(folder: Path, load: Load = LOAD, most: int = AUTO, **metadata: Any) -> DraftPolicy:
    header = read_header(write(folder / "tiny.gguf", tiny_model({f"llama.{k}": v for k, v in metadata.items()})))
    return DraftPolicy(header, MACHINE, load, folder / "state", most)


def test_what_may_be_wished() -> None:
    wished = [read_speculate(value) for value in ("auto", "off", "3", "15", 7)]
    assert wished == [AUTO, OFF, 3, 15, 7]


@pytest.mark.parametrize("value", ["2", "16", "-1", "on", "", "3.5", "٣", 0, True, 10**30, "1" * 5000], ids=repr)
def test_all_else_is_refused_with_what_may_be(value: str | int) -> None:
    with pytest.raises(UsageError, match=r"invalid --speculate .*: must be auto, off, or a number .* 3 to 15"):
        read_speculate(value)


def test_a_number_and_off_need_no_times(tmp_path: Path) -> None:
    assert drafting(tmp_path, most=7).speculation() == Speculation(7)
    assert drafting(tmp_path, most=OFF).speculation() is None
    assert drafting(tmp_path, most=OFF).speculation(7) == Speculation(7), "for one answer"
    assert not drafting(tmp_path, most=7).lacks_times
    assert not drafting(tmp_path, most=OFF).lacks_times


def test_a_command_that_ends_with_its_answer_measures_in_it(tmp_path: Path) -> None:
    policy = drafting(tmp_path)
    assert policy.speculation(probes=True) == Speculation(15, probes=True)
    assert drafting(tmp_path, replace(LOAD, n_seq_max=2)).speculation(probes=True) is None
    assert drafting(tmp_path, most=OFF).speculation(probes=True) is None
    policy.follow(StepsMeasured(1, TIMES))
    policy.follow(Finished(1, "stop", Stats()))
    assert drafting(tmp_path).speculation(probes=True) == Speculation(15, TIMES)


def test_auto_is_off_until_step_times_are_measured(tmp_path: Path) -> None:
    new = drafting(tmp_path)
    assert new.lacks_times
    assert new.speculation() is None
    new.remember(StepTables(TIMES))
    for known in (new, drafting(tmp_path)):
        assert known.speculation() == Speculation(15, TIMES)
        assert not known.lacks_times


@pytest.mark.parametrize(
    "change", [{"threads": 2}, {"kv_type_k": "q8_0"}, {"flash_attention": "off"}, {"repack": False}, {"gpu_layers": 0}]
)
def test_step_times_hold_for_one_way_to_load(tmp_path: Path, change: dict[str, Any]) -> None:
    drafting(tmp_path).remember(StepTables(TIMES))
    other = drafting(tmp_path, replace(LOAD, **change))
    assert other.times == ()
    other.remember(StepTables(TIMES[:2]))
    assert (drafting(tmp_path).times, drafting(tmp_path, replace(LOAD, **change)).times) == (TIMES, TIMES[:2])


def test_another_shape_has_its_own(tmp_path: Path) -> None:
    drafting(tmp_path).remember(StepTables(TIMES))
    assert drafting(tmp_path, block_count=3).times == ()


def test_the_measured_table_decides_for_a_mixture(tmp_path: Path) -> None:
    new = drafting(tmp_path, expert_count=8)
    assert new.lacks_times
    assert new.speculation(probes=True) is None, "a probe repeats one token, and so its experts"
    new.remember(StepTables(TIMES))
    assert new.speculation() == Speculation(15, TIMES)


def test_a_recurrent_model_drafts_as_many_as_it_can_take_back(tmp_path: Path) -> None:
    def policy(n_rollback: int, most: int = AUTO) -> DraftPolicy:
        path = write(tmp_path / "hybrid.gguf", tiny_model(HYBRID))
        return DraftPolicy(read_header(path), MACHINE, replace(LOAD, n_rollback=n_rollback), tmp_path / "state", most)

    assert not policy(0).lacks_times
    assert policy(0).words == "none, because they don't pay here"
    assert policy(0).speculation() is policy(0).speculation(7) is None
    new = policy(3)
    assert new.lacks_times
    assert new.speculation(probes=True) == Speculation(3, probes=True)
    new.remember(StepTables(TIMES))
    assert policy(3).speculation() == Speculation(3, TIMES)
    assert policy(3, 15).speculation() == Speculation(3)
    assert policy(7).times == (), "copies of the state take time, too"


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: entry.pop("times"),
        lambda entry: entry.update(times=5),
        lambda entry: entry["times"][0].update(seconds=0.0),
        lambda entry: entry["times"][0].update(depth=-1),
        lambda entry: entry["times"][0].update(width=2),
        lambda entry: entry.update(times=[]),
    ],
)
def test_damaged_times_are_none(tmp_path: Path, damage: Any) -> None:
    drafting(tmp_path).remember(StepTables(TIMES[:2]))
    file = tmp_path / "state/steps.json"
    data = json.loads(file.read_text())
    damage(data["entries"][0])
    file.write_text(json.dumps(data))
    assert drafting(tmp_path).times == ()


def test_what_can_not_be_written_is_known_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    new = drafting(tmp_path)
    with pytest.raises(LlmrunError):
        new.remember(StepTables(TIMES))
    assert new.times == TIMES


def test_words(tmp_path: Path) -> None:
    new = drafting(tmp_path)
    assert new.words == "none, because no step times are measured here yet"
    new.remember(StepTables(TIMES))
    assert new.words == "as many as the measured step times say will pay"
    assert drafting(tmp_path, most=7).words == "up to 7 per step"
    assert drafting(tmp_path, most=OFF).words == "none"


@pytest.mark.parametrize(
    ("depth", "drafted", "gain"),
    [
        (0, 30, 2.5 * 10 / 20),  # 4 rows a step
        (0, 10, 2.5 * 10 / (10 + 10 / 3)),  # 2 rows: a third of the way
        (0, 300, 2.5 * 10 / 20),  # more rows than were measured
        (500, 30, 2.5 * 20 / 40),  # between both depths
        (9999, 30, 2.5 * 30 / 60),
    ],
)
def test_expected_gain(depth: int, drafted: int, gain: float) -> None:
    stats = Stats(completion_tokens=25, decode_steps=10, drafted_tokens=drafted, context_used=depth)
    assert expected_gain(stats, StepTables(TIMES)) == pytest.approx(gain)


def test_no_gain_without_drafts_or_times() -> None:
    stats = Stats(completion_tokens=25, decode_steps=10, drafted_tokens=30)
    assert expected_gain(stats, StepTables()) is None
    assert expected_gain(replace(stats, drafted_tokens=0), StepTables(TIMES)) is None
    assert expected_gain(replace(stats, decode_steps=0), StepTables(TIMES)) is None


# ---- a draft model ---------------------------------------------------------------------------------


def pair(folder: Path, share: int = 4) -> DraftPolicy:
    """A model with a draft model of so much less."""
    tensor = TensorSpec("token_embd.weight", (64, 16 * share), 0, 64 * 16 * share * 4)
    large = read_header(write(folder / "large.gguf", tiny_model(tensors=[tensor])))
    small = read_header(write(folder / "small.gguf", tiny_model()))
    return DraftPolicy(large, MACHINE, replace(LOAD, draft=LOAD), folder / "state", AUTO, small)


def test_a_draft_models_steps_are_guessed_by_its_size_until_they_are_measured(tmp_path: Path) -> None:
    policy = pair(tmp_path)
    assert policy.speculation() is None
    policy.remember(StepTables(TIMES))
    drafted = policy.speculation()
    assert drafted is not None
    small, large = (read_header(tmp_path / f"{name}.gguf").weight_bytes for name in ("small", "large"))
    assert [each.seconds / whole.seconds for each, whole in zip(drafted.draft_times, TIMES, strict=True)] == (
        pytest.approx([small / large] * 4)
    )
    assert policy.lacks_times, "its own are better"
    policy.remember(StepTables(TIMES, TIMES[:2]))
    for known in (policy, pair(tmp_path)):
        assert known.speculation() == Speculation(15, TIMES, TIMES[:2])
        assert not known.lacks_times


def test_a_gain_has_a_draft_models_steps_subtracted() -> None:
    stats = Stats(completion_tokens=25, decode_steps=10, drafted_tokens=30, draft_steps=30)
    seconds = 10 * 0.020 + 30 * 0.001
    assert expected_gain(stats, StepTables(TIMES, (StepTime(1, 0, 0.001),))) == pytest.approx(0.25 / seconds)


# ---- times that are out of date --------------------------------------------------------------------


def answers(policy: DraftPolicy, seconds: float, count: int, steps: int = 40) -> None:
    """So many answers of steps that took so long."""
    stats = Stats(completion_tokens=steps, decode_steps=steps, decode_seconds=steps * seconds)
    for _ in range(count):
        policy.follow(Finished(1, "stop", stats))


def test_times_are_measured_again_where_three_answers_in_turn_took_longer(tmp_path: Path) -> None:
    policy = drafting(tmp_path)
    policy.remember(StepTables(TIMES))
    answers(policy, 0.016, 2)
    answers(policy, 0.012, 1)
    answers(policy, 0.016, 2)
    assert not policy.lacks_times
    answers(policy, 0.016, 1)
    assert policy.lacks_times
    assert policy.speculation() == Speculation(15, TIMES), "better than nothing"
    policy.remember(StepTables(TIMES))
    assert not policy.lacks_times


def test_times_that_an_answer_undercuts_are_forgotten(tmp_path: Path) -> None:
    """They were measured beside other programs; the next `run` measures again."""
    policy = drafting(tmp_path)
    policy.remember(StepTables(TIMES))
    answers(policy, 0.006, 1)
    for each in (policy, drafting(tmp_path)):
        assert each.lacks_times
        assert each.speculation() is None
        assert each.speculation(probes=True) == Speculation(15, probes=True)


@pytest.mark.parametrize(("seconds", "is_kept"), [(0.002, True), (0.004, False)])
def test_attention_measured_beside_other_programs_is_forgotten_too(
    tmp_path: Path, seconds: float, is_kept: bool
) -> None:
    policy = drafting(tmp_path)
    policy.remember(StepTables(TIMES, (), (AttentionTime(0, seconds, 2 * seconds),)))
    assert not policy.comparisons.attention
    answers(policy, 0.002, 1)
    assert policy.lacks_times
    assert policy.comparisons.attention != is_kept


def test_short_answers_and_slow_ones_beside_others_say_nothing_about_times(tmp_path: Path) -> None:
    policy, crowd = drafting(tmp_path), drafting(tmp_path, replace(LOAD, n_seq_max=4))
    for each in (policy, crowd):
        each.remember(StepTables(TIMES))
    answers(policy, 0.050, 5, steps=20)
    answers(crowd, 0.050, 5)
    assert not policy.lacks_times
    assert not crowd.lacks_times
    answers(crowd, 0.006, 1)
    assert crowd.lacks_times, "but a faster one does"


def test_nothing_is_no_news(tmp_path: Path) -> None:
    policy = drafting(tmp_path)
    policy.remember(StepTables(TIMES))
    assert not policy.remember(StepTables())
    assert policy.times == TIMES
