"""The search for fast settings, on machines that exist as formulas: near the best, and never below the default."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from support.simulated_machines import SimulatedMachine, all_settings

from llmrun.bench.tune.axes import DECODE, PREFILL, Axis
from llmrun.bench.tune.search import SearchResult, Step, Trial, search
from llmrun.errors import UsageError
from llmrun.planning.tuned import TunableSettings
from llmrun.protocol.jobs.bench import BenchTest

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
