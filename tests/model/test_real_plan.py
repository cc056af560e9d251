"""The plan beside the real thing: memory as predicted, refusals at once, and a table without the network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.installed import Installed

import llmrun as package
from llmrun.planning.hardware import probe
from llmrun.planning.memory import memory, repacked_types, without_flash_attention
from llmrun.planning.predict import work_of
from llmrun.protocol.messages import Finished

NOWHERE = {"HF_ENDPOINT": "http://127.0.0.1:9"}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of another process is Linux's to tell")
@pytest.mark.parametrize(("n_ctx", "words"), [(2048, 20), (4096, 1200)])
def test_peak_memory_is_as_predicted(pulled: None, n_ctx: int, words: int) -> None:
    with package.load("smollm2", pull=False, n_ctx=n_ctx) as model:
        limits = package.Limits(max_tokens=16)
        reply = model.generate("word " * words, sampling=package.SamplingParams(temperature=0), limits=limits)
        *_, finished = reply.events()
        assert isinstance(finished, Finished)
        assert model._runner is not None
        assert model.load is not None
        status = Path(f"/proc/{model._runner.pid}/status").read_text()
    peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    # File pages stay mapped beside repacked weights: part of the resident set, but not needed.
    copies = work_of(model.header).copies(repacked_types(probe().cpu_flags))
    n_used = finished.stats.context_used
    predicted = memory(model.header, n_used)  # only used cells of the window take memory
    if model.load.flash_attention == "off":
        predicted = without_flash_attention(memory(model.header, n_ctx, used=n_used), model.header, n_used)
    assert predicted.needed + copies == pytest.approx(peak, rel=0.1)


def test_plan_of_an_installed_model_needs_no_network(llmrun: Installed) -> None:
    done = llmrun.run("plan", "smollm2", "--ctx", "1k,8k", "--json", env=NOWHERE)
    assert done.returncode == 0
    (row,) = json.loads(done.stdout)["quants"]
    assert (row["quant"], row["verdict"], row["n_ctx"]) == ("Q4_1", "fits", 8192)
    assert [at["n_ctx"] for at in row["contexts"]] == [1024, 8192]
    assert row["decode_rate"] > row["contexts"][0]["decode_rate"] > row["contexts"][1]["decode_rate"] > 0


def test_table(llmrun: Installed) -> None:
    done = llmrun.run("plan", "smollm2")
    heading, line = done.stdout.decode().splitlines()
    assert heading.split()[0] == "QUANT"
    assert line.startswith("Q4_1")
    assert line.endswith("fits")
    assert b"\x1b" not in done.stdout + done.stderr


def test_without_the_hub_it_says_what_is_known(llmrun: Installed) -> None:
    done = llmrun.run("plan", "qwen3-8b", env=NOWHERE)
    assert (done.returncode, done.stdout) == (5, b"")
    assert b"Qwen3 8B: 8B parameters, Q4_K_M takes" in done.stderr


def test_too_much_is_refused_with_what_to_type(llmrun: Installed) -> None:
    done = llmrun.run("run", "smollm2", "hi", "--ctx", "16000000")
    assert (done.returncode, done.stdout) == (6, b"")
    assert b"--ctx " in done.stderr
    assert b"the largest that fits" in done.stderr


def test_doctor_lets_a_model_answer(llmrun: Installed) -> None:
    done = llmrun.run("doctor", "--json", env=NOWHERE)
    assert done.returncode == 0
    findings = {finding["topic"]: finding for finding in json.loads(done.stdout)}
    assert "tokens at" in findings["answer"]["text"]
    quick = llmrun.run("doctor", "--json", "--no-answer", env=NOWHERE)
    assert "answer" not in {finding["topic"] for finding in json.loads(quick.stdout)}
