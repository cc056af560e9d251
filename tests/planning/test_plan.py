"""The plan: what is chosen for which machine, what is said about it, and what is refused with numbers."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest
from support.model_facts import Facts

from llmrun.errors import OutOfMemoryError, UsageError
from llmrun.planning.hardware import Hardware
from llmrun.planning.memory import kv_bytes, memory, reserved_bytes
from llmrun.planning.plan import Measurements, choose_flash_attention, make_plan, margin, scores_fit
from llmrun.planning.preferences import ALL_LAYERS, LoadPreferences
from llmrun.protocol.devices import Gpu
from llmrun.protocol.sizes import readable_size

GIB = 1 << 30
MIB = 1 << 20
WITHOUT_FLASH = Measurements("off")


SMALL = Facts()
LARGE = Facts(
    weight_bytes=5 * GIB,
    n_ctx_train=131_072,
    n_embd=4096,
    n_vocab=128_256,
    kv_bytes=65_536.0,
    n_layers=31,
    n_parameters=8_030_000_000,
    key_length=128,
    most_heads=32,
)


def machine(free: int = 16 * GIB, cores: int = 4, quota: float | None = None, gpus: tuple[Gpu, ...] = ()) -> Hardware:
    return Hardware("CPU", (), cores, 2 * cores, quota, 32 * GIB, free, gpus)


def gpu(free: int, *, shared: bool = False) -> Gpu:
    return Gpu("CUDA0", "NVIDIA Imaginary", 24 * GIB, free, shared)


def test_plenty_of_memory_needs_no_words() -> None:
    plan = make_plan(SMALL, machine(), LoadPreferences())
    assert (plan.load.n_ctx, plan.load.n_batch, plan.load.threads, plan.load.gpu_layers) == (8192, 512, 4, -1)
    assert plan.notes == ()
    assert replace(plan.memory, copies=0) == memory(SMALL, 8192)
    assert (plan.ram_bytes, plan.vram_bytes) == (plan.memory.needed, 0)


def test_recurrent_states_are_copied_for_drafts_where_memory_allows_it() -> None:
    hybrid = replace(SMALL, recurrent_bytes=20 * MIB, can_roll_back=True)
    large = replace(hybrid, recurrent_bytes=150 * MIB)
    preferences = LoadPreferences()
    plan = make_plan(hybrid, machine(), preferences)
    assert plan.load.n_rollback == 3
    assert plan.memory.kv == memory(hybrid, 8192).kv + 3 * 20 * MIB
    assert make_plan(large, machine(), preferences).load.n_rollback == 3
    assert make_plan(large, machine(), replace(preferences, parallel=4)).load.n_rollback == 0
    four = make_plan(hybrid, machine(), replace(preferences, parallel=4))
    assert four.load.n_rollback == 3
    assert four.memory.kv - memory(hybrid, four.load.n_cells, sequences=4).kv == 4 * 3 * 20 * MIB
    assert make_plan(large, machine(), replace(preferences, n_drafted=9)).load.n_rollback == 9
    assert make_plan(hybrid, machine(), replace(preferences, n_drafted=0)).load.n_rollback == 0
    assert make_plan(replace(hybrid, can_roll_back=False), machine(), preferences).load.n_rollback == 0


HEADS = replace(SMALL, n_draft_heads=1, can_use_heads=True, has_proven_heads=True, head_bytes=5 * MIB, head_cache=400.0)


def test_prediction_heads_are_used_where_memory_allows_it() -> None:
    plan = make_plan(HEADS, machine(), LoadPreferences())
    assert plan.load.draft_heads
    assert replace(plan.memory, copies=0) == memory(HEADS, 8192, heads=True)
    assert plan.draft_bytes == memory(HEADS, 8192, heads=True).needed - memory(HEADS, 8192).needed > 5 * MIB
    assert f"{readable_size(plan.draft_bytes)} of that for the model's prediction heads" in plan.summary
    without = make_plan(HEADS, machine(), LoadPreferences(draft_heads=False))
    assert (without.load.draft_heads, without.draft_bytes) == (False, 0)
    assert plan.memory.weights - without.memory.weights == 5 * MIB
    assert plan.memory.kv - without.memory.kv == 8192 * 800
    assert plan.memory.compute - without.memory.compute > 16 * 4 * HEADS.n_vocab
    assert not make_plan(SMALL, machine(), LoadPreferences()).load.draft_heads
    assert not make_plan(HEADS, machine(gpus=(gpu(GIB),)), LoadPreferences()).load.draft_heads


def test_without_memory_for_heads_the_context_comes_first() -> None:
    large = replace(HEADS, head_bytes=2 * GIB, weight_bytes=SMALL.weight_bytes + 2 * GIB)
    short = make_plan(large, machine(free=GIB), LoadPreferences())
    assert not short.load.draft_heads
    assert any("multi-token prediction are left out" in note for note in short.notes)
    assert short.load.n_ctx == make_plan(large, machine(free=GIB), LoadPreferences(draft_heads=False)).load.n_ctx


def test_heads_on_request_are_used_or_refused() -> None:
    asked = LoadPreferences(draft_heads=True)
    unproven = replace(HEADS, has_proven_heads=False)
    assert make_plan(unproven, machine(), asked).load.draft_heads
    assert not make_plan(unproven, machine(), LoadPreferences()).load.draft_heads
    assert make_plan(HEADS, machine(gpus=(gpu(GIB),)), asked).load.draft_heads
    with pytest.raises(UsageError, match="has no heads to draft with"):
        make_plan(SMALL, machine(), asked)
    with pytest.raises(UsageError, match="can't draft"):
        make_plan(replace(HEADS, can_use_heads=False), machine(), asked)


def test_context_is_cut_to_what_fits_and_said() -> None:
    plan = make_plan(LARGE, machine(free=12 * GIB), LoadPreferences())
    assert plan.load.n_ctx < 131_072
    assert plan.load.n_ctx % 256 == 0
    left = margin(12 * GIB)
    assert plan.ram_bytes <= 12 * GIB - left
    assert memory(LARGE, plan.load.n_ctx + 256).needed > 12 * GIB - left
    assert plan.notes == (
        f"context {plan.load.n_ctx:,} of 131,072 tokens: what fits into 12.9 GB of free memory with some to "
        "spare (--ctx asks for more)",
    )


def test_largest_context_agrees_with_trying_them_all() -> None:
    generator = random.Random(1)
    for _ in range(200):
        facts = Facts(
            weight_bytes=generator.randrange(GIB),
            n_ctx_train=generator.randrange(600, 20_000),
            n_embd=generator.randrange(64, 4096),
            n_vocab=generator.randrange(1000, 200_000),
            kv_bytes=generator.choice([0.0, 100.0, 20_000.0, 200_000.0]),
        )
        free = generator.randrange(GIB, 4 * GIB)
        room = free - max(512 * MIB, free // 10)
        steps = [facts.n_ctx_train, *range(256, facts.n_ctx_train, 256)]
        fitting = [n for n in steps if memory(facts, n).needed <= room]
        best = max(fitting, default=0)
        if best < 512:
            with pytest.raises(OutOfMemoryError):
                make_plan(facts, machine(free), LoadPreferences())
        else:
            assert make_plan(facts, machine(free), LoadPreferences()).load.n_ctx == best


def test_model_that_does_not_fit_is_refused_with_numbers() -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        make_plan(LARGE, machine(free=4 * GIB), LoadPreferences())
    assert "5.4 GB of it for the weights" in caught.value.why
    assert "4.3 GB are free" in caught.value.why
    assert caught.value.hint == "use a smaller quant: Q2_K would take about 3.2 GB"


def test_smaller_quant_is_named_with_its_command() -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        make_plan(LARGE, machine(free=5 * GIB + 50 * MIB), LoadPreferences(), name="big", repository="owner/big-GGUF")
    assert caught.value.hint == "llmrun run owner/big-GGUF:Q4_K_S (about 4.6 GB), if the repository has it"


def test_no_quant_is_small_enough() -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        make_plan(LARGE, machine(free=2 * GIB), LoadPreferences())
    assert caught.value.hint == "use a smaller model (`llmrun list --all`), or close other programs"


def test_model_that_leaves_nothing_to_others_can_be_forced() -> None:
    free = LARGE.weight_bytes + 750 * MIB
    with pytest.raises(OutOfMemoryError) as caught:
        make_plan(LARGE, machine(free), LoadPreferences())
    assert "--ctx 512" in caught.value.hint
    plan = make_plan(LARGE, machine(free), LoadPreferences(n_ctx=512))
    assert plan.load.n_ctx == 512
    assert re.fullmatch(r"context 512 tokens: leaves only [\d.]+ MB of memory free", plan.notes[0])


def test_wished_context_that_does_not_fit_names_the_largest_that_does() -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        make_plan(LARGE, machine(free=8 * GIB), LoadPreferences(n_ctx=100_000))
    assert "100,000" in caught.value.what
    assert "8.6 GB are free" in caught.value.why
    option = re.fullmatch(r"llmrun run MODEL --ctx (\d+), the largest that fits", caught.value.hint)
    assert option
    largest = int(option[1])
    assert make_plan(LARGE, machine(free=8 * GIB), LoadPreferences(n_ctx=largest)).load.n_ctx == largest
    with pytest.raises(OutOfMemoryError):
        make_plan(LARGE, machine(free=8 * GIB), LoadPreferences(n_ctx=largest + 256))


def test_the_first_context_advised_is_one_that_the_model_was_trained_on() -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        make_plan(SMALL, machine(free=8 * GIB), LoadPreferences(n_ctx=1_000_000))
    option = re.fullmatch(
        r"llmrun run MODEL --ctx 8192, what the model was trained on; (\d+) is the largest that fits", caught.value.hint
    )
    assert option
    assert make_plan(SMALL, machine(free=8 * GIB), LoadPreferences(n_ctx=int(option[1]))).load.n_ctx > 8192
    with pytest.raises(OutOfMemoryError, match="1,000,000") as caught:
        make_plan(replace(SMALL, n_ctx_train=0), machine(free=8 * GIB), LoadPreferences(n_ctx=1_000_000))
    assert caught.value.hint == f"llmrun run MODEL --ctx {option[1]}, the largest that fits"


def test_wish_on_a_model_that_does_not_fit_at_all() -> None:
    with pytest.raises(OutOfMemoryError, match="the model does not fit"):
        make_plan(LARGE, machine(free=2 * GIB), LoadPreferences(n_ctx=4096))


def test_wish_beyond_training_is_done_and_said() -> None:
    plan = make_plan(SMALL, machine(), LoadPreferences(n_ctx=16_384))
    assert plan.load.n_ctx == 16_384
    assert plan.notes == ("context 16,384 tokens: the model was trained on 8,192, so answers get worse beyond that",)


def test_short_wish_makes_a_short_batch() -> None:
    plan = make_plan(SMALL, machine(), LoadPreferences(n_ctx=1024))
    assert (plan.load.n_ctx, plan.load.n_batch, plan.notes) == (1024, 512, ())


def test_unknown_training_context() -> None:
    plan = make_plan(replace(SMALL, n_ctx_train=0), machine(), LoadPreferences())
    assert plan.load.n_ctx == 4096
    assert "does not state" in plan.notes[0]


def test_absurd_training_context_is_bounded() -> None:
    facts = replace(SMALL, n_ctx_train=2**31 - 1, kv_bytes=0.0)
    assert make_plan(facts, machine(free=256 * GIB), LoadPreferences()).load.n_ctx == 1 << 24


def test_unknown_memory_refuses_nothing() -> None:
    unknown = replace(machine(), memory_total=0, memory_available=0)
    assert make_plan(LARGE, unknown, LoadPreferences()).load.n_ctx == 131_072
    assert make_plan(LARGE, unknown, LoadPreferences(n_ctx=512)).notes == ()


def test_tiny_training_context_is_not_too_small() -> None:
    assert make_plan(replace(SMALL, n_ctx_train=256), machine(), LoadPreferences()).load.n_ctx == 256


def test_threads_of_a_container() -> None:
    plan = make_plan(SMALL, machine(cores=8, quota=2.5), LoadPreferences())
    assert plan.load.threads == 2
    assert plan.notes == ("threads 2 of 8 cores: the container may use 2.5 of them",)


def test_wished_threads() -> None:
    assert make_plan(SMALL, machine(cores=4), LoadPreferences(threads=8)).notes == ()
    plan = make_plan(SMALL, machine(cores=4), LoadPreferences(threads=9))
    assert plan.load.threads == 9
    assert plan.notes == ("threads 9: more than the 8 there are, so it gets slower",)


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({"n_batch": 64}, (64, 64)),
        ({"n_batch": 64, "n_ubatch": 1024}, (64, 64)),
        ({"n_ubatch": 128}, (512, 128)),
        ({"n_ubatch": 1024}, (1024, 1024)),
        ({"n_batch": 2048}, (2048, 512)),
        ({"n_batch": 1 << 20, "n_ubatch": 64}, (8192, 64)),
    ],
)
def test_batches_of_the_user(given: dict[str, Any], sizes: tuple[int, int]) -> None:
    plan, usual = (make_plan(SMALL, machine(), LoadPreferences(**wishes)) for wishes in (given, {}))
    assert (plan.load.n_batch, plan.load.n_ubatch) == sizes
    assert (plan.memory.compute > usual.memory.compute) == (sizes[1] > 512)


def test_huge_machine_stays_within_bounds() -> None:
    assert make_plan(SMALL, machine(cores=1024), LoadPreferences()).load.threads == 512


@pytest.mark.parametrize("layers", [-1, 0, 1000])
def test_wished_gpu_layers(layers: int) -> None:
    assert make_plan(SMALL, machine(), LoadPreferences(gpu_layers=layers)).load.gpu_layers == layers


@pytest.mark.parametrize(
    ("wishes", "what", "why"),
    [
        ({"n_ctx": 255}, "--ctx 255", "256 and 16,777,216"),
        ({"n_ctx": 1 << 25}, "--ctx", "256 and 16,777,216"),
        ({"threads": 0}, "--threads 0", "1 and 512"),
        ({"threads": 513}, "--threads 513", "1 and 512"),
        ({"n_batch": 0}, "--batch-size 0", "1 and"),
        ({"n_ubatch": 0}, "--ubatch-size 0", "1 and"),
        ({"gpu_layers": -2}, "--gpu-layers -2", "-1 and 1,000"),
        ({"gpu_layers": 1001}, "--gpu-layers", "-1 and 1,000"),
        ({"parallel": 0}, "--parallel 0", "1 and 128"),
        ({"parallel": 129}, "--parallel", "1 and 128"),
        ({"kv_type_k": "q3_0"}, "--cache-type-k q3_0", "f16"),
        ({"kv_type_v": "q3_0"}, "--cache-type-v q3_0", "f16"),
        ({"flash_attention": "maybe"}, "--flash-attention maybe", "auto, on, off"),
        ({"kv_type_v": "q8_0", "flash_attention": "off"}, "needs flash attention", ""),
    ],
)
def test_bad_wishes(wishes: dict[str, Any], what: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        LoadPreferences(**wishes)
    assert what in caught.value.what
    assert why in caught.value.why


# ---- several clients ---------------------------------------------------------------------------------


def test_several_clients_share_cells_for_all_of_their_windows() -> None:
    plan = make_plan(SMALL, machine(), LoadPreferences(parallel=8))
    assert (plan.load.n_ctx, plan.load.n_seq_max, plan.load.n_cells, plan.load.n_parked) == (8192, 8, 65_536, 16)
    assert plan.notes == ()
    assert "context 8,192 tokens for each of 8, 65,536 in all" in plan.summary
    load = plan.load
    assert (load.n_ctx, load.n_seq_max, load.n_cells, load.n_parked) == (8192, 8, 65_536, 16)


def test_on_a_gpu_the_cache_is_whole_when_the_model_is_loaded() -> None:
    hardware = replace(machine(), gpus=(gpu(24 * GIB),))
    for preferences in (LoadPreferences(), LoadPreferences(parallel=4)):
        plan = make_plan(SMALL, hardware, preferences)
        assert plan.load.n_cells == 8192 * preferences.parallel
        assert "its memory is allocated at once" in plan.summary
        ((_, at_start),) = plan.gpu_bytes
        assert at_start == plan.vram_bytes


def test_more_clients_move_no_layer_off_the_gpu() -> None:
    hardware = replace(machine(), gpus=(gpu(12 * GIB),))
    one = make_plan(LARGE, hardware, LoadPreferences(n_ctx=8192))
    many = make_plan(LARGE, hardware, LoadPreferences(n_ctx=8192, parallel=32))
    assert (one.load.gpu_layers, many.load.gpu_layers) == (-1, -1)
    assert 8192 < many.load.n_cells < 32 * 8192
    assert len(many.notes) == 1
    assert f"share {many.load.n_cells:,} tokens of KV cache" in many.notes[0]
    assert "on GPUs" in many.notes[0]
    more = make_plan(LARGE, hardware, LoadPreferences(n_ctx=many.load.n_cells + 256))
    assert more.load.gpu_layers != -1


def test_on_a_processor_each_client_gets_a_window_of_its_own_if_that_is_enough() -> None:
    large = replace(LARGE, n_ctx_train=131_072)
    one, four, many = (
        make_plan(large, machine(free=24 * GIB), LoadPreferences(parallel=parallel)) for parallel in (1, 4, 32)
    )
    assert four.load.n_cells == 4 * four.load.n_ctx
    assert 16_384 <= four.load.n_ctx < one.load.n_ctx
    assert "for each of 4 answers at the same time" in four.notes[0]
    assert f"(--parallel 1 leaves {one.load.n_ctx:,})" in four.notes[0]
    assert many.load.n_ctx > one.load.n_ctx // 2, "windows of 32 clients would be short: they share what there is"
    assert many.load.n_cells < 32 * many.load.n_ctx


def test_one_client_is_what_it_was() -> None:
    plan = make_plan(SMALL, machine(), LoadPreferences())
    assert (plan.load.n_seq_max, plan.load.n_cells, plan.load.n_parked) == (1, plan.load.n_ctx, 0)


def test_windows_of_an_odd_size_that_fit_are_not_cut() -> None:
    plan = make_plan(SMALL, machine(), LoadPreferences(n_ctx=1000, parallel=3))
    assert (plan.load.n_cells, plan.notes) == (3000, ())


def test_several_clients_share_what_fits() -> None:
    plan = make_plan(LARGE, machine(free=12 * GIB), LoadPreferences(n_ctx=16_384, parallel=16))
    assert plan.load.n_ctx == 16_384
    assert 16_384 < plan.load.n_cells < 16 * 16_384
    left = 12 * GIB - margin(12 * GIB)
    assert plan.ram_bytes <= left

    def needed(cells: int) -> int:
        return memory(LARGE, cells, sequences=16, parked=16).needed

    assert needed(plan.load.n_cells) <= left < needed(plan.load.n_cells + 256)
    assert plan.notes == (
        f"16 answers at the same time share {plan.load.n_cells:,} tokens of KV cache: "
        "what fits into 12.9 GB of free memory with some to spare",
    )


def test_no_client_has_less_than_one_alone() -> None:
    alone = make_plan(LARGE, machine(free=12 * GIB), LoadPreferences())
    plan = make_plan(LARGE, machine(free=12 * GIB), LoadPreferences(parallel=4))
    assert alone.load.n_ctx - 512 <= plan.load.n_ctx <= plan.load.n_cells, "rows of logits take a little"


@pytest.mark.parametrize("parallel", [1, 4])
@pytest.mark.parametrize("free", [7, 8, 10, 12, 20, 30, 100])
def test_copies_of_conversations_take_what_is_left(free: int, parallel: int) -> None:
    """They change no window, and with them the plan leaves as much to the rest of the system."""
    plan = make_plan(LARGE, machine(free=free * GIB), LoadPreferences(parallel=parallel))
    left = free * GIB - margin(free * GIB) - (plan.ram_bytes - plan.load.copy_bytes)
    assert plan.load.copy_bytes == plan.memory.copies == max(min(plan.memory.kv, 8 * 10**9, left), 0)
    assert (f"copies of conversations {readable_size(plan.load.copy_bytes)}" in plan.summary) == (
        plan.load.copy_bytes > 0
    )


@pytest.mark.parametrize("kv_on_use", [True, False])
@pytest.mark.parametrize("flash_attention", ["on", "off"])
def test_a_whole_window_is_planned_wherever_its_memory_comes_from(flash_attention: str, *, kv_on_use: bool) -> None:
    plan = make_plan(SMALL, replace(machine(), kv_on_use=kv_on_use), LoadPreferences(flash_attention=flash_attention))
    assert plan.memory.kv == kv_bytes(SMALL, plan.load.n_ctx)
    is_on_use = kv_on_use and flash_attention == "on"
    assert ("takes memory when it is used" in plan.summary) == is_on_use
    assert ("its memory is allocated at once" in plan.summary) == (not is_on_use)


def test_copies_of_a_recurrent_model_have_room_for_checkpoints() -> None:
    plan = make_plan(replace(SMALL, recurrent_bytes=10 * MIB), machine(), LoadPreferences(parallel=2))
    assert plan.memory.checkpoints > 0
    assert plan.load.copy_bytes == plan.memory.kv + plan.memory.checkpoints


def test_cells_that_come_on_use_lend_their_memory_to_copies() -> None:
    on_use = replace(machine(), kv_on_use=True)
    plan = make_plan(LARGE, on_use, LoadPreferences(parallel=2, flash_attention="on"))
    assert plan.load.cell_bytes == LARGE.kv_bytes_per_token()
    assert make_plan(LARGE, machine(), LoadPreferences(parallel=2, flash_attention="on")).load.cell_bytes == 0
    assert make_plan(LARGE, on_use, LoadPreferences(parallel=2, flash_attention="off")).load.cell_bytes == 0
    on_gpu = replace(on_use, gpus=(gpu(20 * GIB),))
    assert make_plan(LARGE, on_gpu, LoadPreferences(parallel=2, flash_attention="on")).load.cell_bytes == 0


def test_clients_apart_have_a_window_each_that_fits_for_all() -> None:
    facts = replace(LARGE, rope_depends_on_window=True)
    plan = make_plan(facts, machine(free=12 * GIB), LoadPreferences(parallel=4))
    assert plan.load.n_cells == 4 * plan.load.n_ctx
    assert plan.load.n_parked == 0
    assert plan.ram_bytes <= 12 * GIB - margin(12 * GIB)
    assert replace(plan.memory, copies=0) == memory(facts, plan.load.n_cells, sequences=4)
    assert f"context {plan.load.n_ctx:,} of 131,072 tokens" in plan.notes[0]


def test_a_recurrent_model_has_a_state_for_each_client_and_none_to_park() -> None:
    facts = replace(SMALL, recurrent_bytes=10 * MIB)
    plan = make_plan(facts, machine(), LoadPreferences(parallel=8))
    assert plan.load.n_parked == 0
    assert plan.memory.kv == make_plan(SMALL, machine(), LoadPreferences(parallel=8)).memory.kv + 8 * 10 * MIB


def test_sequence_ids_are_enough_for_the_most_clients() -> None:
    plan = make_plan(SMALL, machine(), LoadPreferences(parallel=128))
    assert plan.load.n_seq_max + plan.load.n_parked == 256


# ---- GPUs ------------------------------------------------------------------------------------------


def test_a_gpu_that_holds_everything_gets_it() -> None:
    plan = make_plan(LARGE, machine(gpus=(gpu(23 * GIB),)), LoadPreferences(n_ctx=8192))
    assert plan.load.gpu_layers == ALL_LAYERS
    assert plan.vram_bytes > LARGE.weight_bytes
    assert plan.ram_bytes - plan.memory.copies < GIB
    assert plan.load.copy_bytes == plan.memory.kv, "what leaves the GPU's memory has room here"
    assert plan.notes == ()


def test_a_small_gpu_gets_the_layers_that_fit() -> None:
    plan = make_plan(LARGE, machine(gpus=(gpu(3 * GIB),)), LoadPreferences(n_ctx=8192))
    assert 0 < plan.load.gpu_layers < 31
    assert plan.vram_bytes <= 3 * GIB
    one_more = (plan.memory.weights + plan.memory.kv) // 32
    assert plan.vram_bytes + one_more > 3 * GIB - 256 * MIB
    assert plan.notes == (f"{plan.load.gpu_layers} of 32 layers on the GPU: what fits into its 3.2 GB of free memory",)


def test_a_gpu_makes_room_in_memory() -> None:
    with pytest.raises(OutOfMemoryError):
        make_plan(LARGE, machine(free=4 * GIB), LoadPreferences())
    assert make_plan(LARGE, machine(free=4 * GIB, gpus=(gpu(8 * GIB),)), LoadPreferences()).load.n_ctx >= 512


def test_two_gpus_share_the_layers() -> None:
    one = make_plan(LARGE, machine(gpus=(gpu(3 * GIB),)), LoadPreferences(n_ctx=8192))
    two = make_plan(LARGE, machine(gpus=(gpu(3 * GIB), gpu(3 * GIB))), LoadPreferences(n_ctx=8192))
    assert two.load.gpu_layers > one.load.gpu_layers


@pytest.mark.parametrize("free", [0, 200 * MIB])
def test_a_full_gpu_gets_nothing(free: int) -> None:
    plan = make_plan(LARGE, machine(gpus=(gpu(free),)), LoadPreferences(n_ctx=8192))
    assert (plan.load.gpu_layers, plan.vram_bytes, plan.ram_bytes) == (
        0,
        reserved_bytes(LARGE, 8192),
        plan.memory.needed,
    )


def test_integrated_graphics_have_no_memory_of_their_own() -> None:
    plan = make_plan(LARGE, machine(gpus=(gpu(12 * GIB, shared=True),)), LoadPreferences(n_ctx=8192))
    assert (plan.load.gpu_layers, plan.vram_bytes, plan.ram_bytes) == (ALL_LAYERS, 0, plan.memory.needed)


@pytest.mark.parametrize(("wish", "layers"), [(0, 0), (5, 5), (32, ALL_LAYERS), (99, ALL_LAYERS), (-1, ALL_LAYERS)])
def test_wished_layers_with_a_gpu(wish: int, layers: int) -> None:
    plan = make_plan(LARGE, machine(gpus=(gpu(23 * GIB),)), LoadPreferences(n_ctx=4096, gpu_layers=wish))
    assert plan.load.gpu_layers == layers
    assert plan.vram_bytes >= reserved_bytes(LARGE, 4096), "without layers, it still computes prompts"


def test_smaller_kv_type_leaves_room_for_more_context() -> None:
    small = make_plan(LARGE, machine(free=12 * GIB), LoadPreferences(kv_type_k="q8_0", kv_type_v="q8_0"))
    assert small.load.n_ctx > make_plan(LARGE, machine(free=12 * GIB), LoadPreferences()).load.n_ctx


def test_summary() -> None:
    text = make_plan(SMALL, machine(), LoadPreferences()).summary
    assert text.startswith("plan: context 8,192 tokens (its memory is allocated at once), 4 threads; ")
    assert "KV cache 188.7 MB" in text
    assert "GPU" not in text
    assert (
        ": all layers on the GPU"
        in make_plan(LARGE, machine(gpus=(gpu(23 * GIB),)), LoadPreferences(n_ctx=4096)).summary
    )


@pytest.mark.parametrize(
    ("wishes", "flags", "facts", "slow"),
    [
        (LoadPreferences(), ("avx512_fp16",), SMALL, True),
        (LoadPreferences(), (), SMALL, False),
        (LoadPreferences(), ("avx512_fp16",), LARGE, False),
        (LoadPreferences(flash_attention="off"), ("avx512_fp16",), SMALL, False),
        (LoadPreferences(), ("avx512_fp16",), replace(SMALL, key_length=0), False),
    ],
)
def test_slow_flash_attention_is_told(
    wishes: LoadPreferences, flags: tuple[str, ...], facts: Facts, slow: bool
) -> None:
    plan = make_plan(facts, replace(machine(), cpu_flags=flags), wishes)
    assert plan.load.flash_attention == wishes.attention["flash_attention"]
    assert ("flash attention is slow here" in plan.summary) == slow


@pytest.mark.parametrize(
    ("wishes", "measured", "free", "expected"),
    [
        (LoadPreferences(), "", 16, "auto"),
        (LoadPreferences(), "on", 16, "auto"),
        (LoadPreferences(), "off", 16, "off"),
        (LoadPreferences(flash_attention="on"), "off", 16, "on"),
        (LoadPreferences(kv_type_k="q8_0"), "off", 16, "auto"),
        (LoadPreferences(parallel=4), "off", 16, "auto"),
        (LoadPreferences(parallel=4, as_alone=True), "off", 16, "off"),
        (LoadPreferences(), "off", 1, "off"),
    ],
)
def test_flash_attention_of_one_sequence_is_the_measured_one_or_llama_cpps(
    wishes: LoadPreferences, measured: str, free: int, expected: str
) -> None:
    plan = make_plan(SMALL, machine(free=free * GIB), wishes, measured=Measurements(measured))
    assert plan.load.flash_attention == expected


def test_a_gpu_has_flash_attention() -> None:
    hardware = machine(gpus=(gpu(23 * GIB),))
    assert make_plan(SMALL, hardware, LoadPreferences(), measured=WITHOUT_FLASH).load.flash_attention == "auto"


@pytest.mark.parametrize("parallel", [1, 2, 16])
@pytest.mark.parametrize("n_ctx", [None, 2048])
@pytest.mark.parametrize("facts", [SMALL, LARGE])
@pytest.mark.parametrize("free", [10, 16, 24])
def test_several_answers_of_one_seed_are_computed_with_the_flash_attention_of_one(
    facts: Facts, n_ctx: int | None, parallel: int, free: int
) -> None:
    hardware = machine(free=free * GIB)
    wishes = LoadPreferences(n_ctx=n_ctx)
    alone = make_plan(facts, hardware, wishes, measured=WITHOUT_FLASH)
    together = replace(wishes, parallel=parallel, as_alone=True)
    several = make_plan(facts, hardware, together, measured=WITHOUT_FLASH)
    chosen = choose_flash_attention(facts, hardware, wishes, WITHOUT_FLASH)
    assert several.load.flash_attention == alone.load.flash_attention == chosen
    assert alone.load.flash_attention == ("auto" if alone.load.n_ctx * facts.most_heads > 1 << 19 else "off")


def test_flash_attention_is_left_to_llama_cpp_where_no_window_fits() -> None:
    assert choose_flash_attention(LARGE, machine(free=GIB), LoadPreferences(), WITHOUT_FLASH) == "auto"


@pytest.mark.parametrize(("memory", "n_ctx", "fits"), [(16, 8192, True), (2, 8192, False), (64, 131_072, False)])
def test_scores_may_take_little_memory(memory: int, n_ctx: int, fits: bool) -> None:
    for free in (memory, 1):
        hardware = replace(machine(free=free * GIB), memory_total=memory * GIB)
        assert scores_fit(SMALL, hardware, n_ctx) is fits, "whatever other programs leave of it"


def test_scores_that_are_written_count_as_memory() -> None:
    with_flash, without = (make_plan(SMALL, machine(), LoadPreferences(flash_attention=mode)) for mode in ("on", "off"))
    assert without.memory.compute == 4 * 512 * 8192 * 9
    assert without.ram_bytes - with_flash.ram_bytes == without.memory.compute - with_flash.memory.compute
    assert without.memory.needed == without.ram_bytes


def test_wide_micro_batches_count_no_memory_of_another_gpu() -> None:
    """An integrated GPU has no memory of its own to spare."""
    integrated = replace(gpu(24 * GIB, shared=True), name="CUDA1")
    preferences, shown = LoadPreferences(gpu_layers=-1), []
    for free in range(1, 25):
        alone, beside = (
            make_plan(LARGE, machine(gpus=gpus), preferences)
            for gpus in ((gpu(free * GIB),), (gpu(free * GIB), integrated))
        )
        assert (alone.load.n_ubatch, alone.vram_bytes) == (beside.load.n_ubatch, beside.vram_bytes)
        shown.append(alone.load.n_ubatch)
    assert {512, 2048} == set(shown)
