"""Wrong values are refused by every command before a model is looked for: no network, no disk, no download."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from support.commands import app_of
from typer.testing import CliRunner

from llmrun import __main__
from llmrun.cli.sampling import read_value, shown_value
from llmrun.errors import LlmrunError, UsageError
from llmrun.protocol.llama_folder import KERNELS_VARIABLE, own_kernels_wanted
from llmrun.protocol.params import BOUNDS, PARAMETERS, SamplingParams

MODEL = "owner/not-here-GGUF"

ENGINE = (
    ("--threads", "0"), ("--threads", "9999"), ("--gpu-layers", "-2"), ("--n-cpu-moe", "-1"), ("-ngl", "-2"),
    ("-b", "0"), ("-ub", "0"),
    ("--cache-type-k", "q1"), ("-ctk", "q1"), ("--cache-type-v", "q1"), ("-ctv", "q1"), ("-fa", "maybe"),
    ("--flash-attention", "maybe"), ("--cache-type-v", "q8_0", "--flash-attention", "off"),
)  # fmt: skip
DEVICES = (
    ("--split-mode", "rows"), ("-sm", "rows"), ("--main-gpu", "-1"), ("-mg", "64"), ("--tensor-split", "3/x"),
    ("-ts", "0/0"), ("-ts", "-1"), ("--override-tensor", "ffn"), ("-ot", "(=CPU"), ("-ot", "x="),
)  # fmt: skip
LOADING = (
    ("--kernels", "x"),
    *ENGINE, *DEVICES, ("--split-mode", "tensor", "-fa", "off"), ("--device", "GPU0", "--rpc", "x"),
    ("--ctx", "5"), ("--ctx", "99999999999"), ("--speculate", "2"), ("--speculate", "on"),
    ("--lora", "x.gguf:much"), ("--lora", "x.gguf:nan"), ("--rpc", "x:y"), ("--rpc", "x,x"), ("--rpc", ""),
)  # fmt: skip
DRAFTING = (("--draft", "x", "--speculate", "off"),)
ANSWERING = (
    ("--max-tokens", "0"), ("--stop", ""), ("--ban", ""), ("--grammar", "not/there"), ("--json-schema", "{"),
    ("--json-schema", "{}", "--grammar", "g"), ("--think-tokens", "-1"), ("--think-effort", "x"),
    ("--no-think", "--think-effort", "low"), ("--no-think", "--think-tokens", "5"),
    ("--show-thoughts", "perhaps"), ("--template", "not/there"),
    ("--file", "not/there"), ("--format", "xml"),
    ("--image", "not/there"),
    ("--audio", "not/there"),
)  # fmt: skip
SAMPLING = (
    *((PARAMETERS[name].flag, str(low - 2)) for name, (low, high) in BOUNDS.items()),  # -1 is a word of other programs
    *((PARAMETERS[name].flag, str(high + 1)) for name, (low, high) in BOUNDS.items()),
    ("--temp", "nan"), ("--logit-bias", "x"), ("--logit-bias", "5=nan"), ("--sampler-order", "top_k,topp"),
    ("--sampler-order", "top_k,top_k"), ("--watermark", "blue"), ("--watermark-key", "@not/there"),
)  # fmt: skip
BEAMS = (
    ("--beams", "1"), ("--beams", "65"), ("--length-penalty", "nan", "--beams", "4"), ("--length-penalty", "1"),
    ("--early-stopping", "perhaps", "--beams", "4"),
)  # fmt: skip
TOOLS = (
    ("--tools", "not/there"), ("--tools", "mcp:"), ("--tools", "files:not/there"), ("--tools", "web:http://"),
    ("--yes-to", "x"), ("--tool-timeout", "0"),
)  # fmt: skip
FAR = (("--at", ""), ("--at", "ftp://x"), ("--at", "x?key=y"), ("--key-file", "not/there"))
WRONG: dict[str, tuple[tuple[str, ...], ...]] = {
    "run": (
        *LOADING, *DRAFTING, *ANSWERING, *SAMPLING, *BEAMS, *FAR, *TOOLS, ("--record", "not/there/x.json"),
        ("--answers", "0"), ("--logprobs", "21"), ("--docs-model", "x"), ("--tools", "files", "--raw"),
    ),
    "chat": (
        *LOADING, *DRAFTING, *ANSWERING, *SAMPLING, *FAR, ("--overflow", "perhaps"), ("--keep", "-1"),
        ("--continue", "--private"), ("--session", "x", "--private"), *TOOLS, ("--docs-model", "x"),
    ),
    "plan": (
        ("--ctx", "5"), ("--ctx", "x"), ("--cache-type-k", "q1"), ("--cache-type-v", "q1"), ("--rpc", "x:y"),
        *DEVICES, ("--device", "GPU0", "--rpc", "x"),
    ),
    "quantize": (
        ("--type", "q4_9"), ("--type", "iq1_s"), ("--threads", "0"), ("--tensor-type", "x"),
        ("--tensor-type", "a=q77"), ("--output-type", "q77"), ("--embedding-type", "q77"), ("--size", "many"),
        ("--bpw", "99"), ("--bpw", "nan"), ("--fit", "--ctx", "5"), ("--ctx", "4096"), ("--imatrix", "not/there"),
        ("--calibration", "not/there"), ("--types", "q4_9"), ("--report-to", "x.txt"), ("--text", "x.txt"),
        ("--report", "--text", "not/there"), ("--size", "4GB", "--bpw", "4"), ("--report", "--tensor-type", "a=q8_0"),
        ("--report", "--output-type", "q8_0"), ("--report", "--embedding-type", "q8_0"), ("--report", "--pure"),
        ("--report", "--keep-output"), ("--report", "--dry-run"), ("--report", "--type", "q8_0"),
    ),
    "report": (
        ("--types", "q4_9"), ("-o", "x.txt"), ("--text", "not/there"), ("--imatrix", "not/there"),
        ("--calibration", "not/there"), *ENGINE,
    ),
    "evaluate": (
        ("--ctx", "5"), ("--long", "--ctx", "512"), ("--chunks", "0"), ("--chunks", "x"), *ENGINE,
        ("--text", "not/there"), ("--lora", "x.gguf:much"),
    ),
    "bench": (
        ("-p", "x"), ("-p", "-1"), ("-n", "x"), ("-pg", "5"), ("--chat", "0,5"), ("-d", "-1"), ("-t", "0"),
        ("-t", "9999"), ("-b", "0"), ("-ub", "0"), ("-fa", "maybe"), ("-ctk", "q1"), ("-ctv", "q1"),
        ("-fa", "off", "-ctv", "q8_0"), ("-rpk", "2"), ("-ngl", "-5"), ("-ncmoe", "-1"), ("-r", "0"), ("--delay", "-1"),
        ("-o", "x.docx"), ("-o", "not/there/x.json"), ("--vs", "nothing"), ("-p", "0", "-n", "0"), ("-p", "99999999"),
        ("-p", "1-9999"), ("--clients", "0"), ("--clients", "129"), ("--clients", "1", "--tokens", "1"),
        ("--draft", "x"), ("--lora", "x.gguf:much"), ("--at", "http://host"), ("--key-file", "key", "--clients", "1"),
        *(("--at", wrong, "--clients", "1") for wrong in ("", "host:80", "ftp://host", "http://user:x@host", "http://h?k=x")),
        ("--at", "http://host", "--key-file", "not/there", "--clients", "1"),
        ("--rpc", "x:y"), ("--rpc", "x", "-ngl", "3"), *DEVICES, ("-dev", "GPU0", "--rpc", "x"), ("--kernels", "x"),
    ),
    "tune": (("--seconds", "1"), ("--seconds", "nan"), ("--depth", "-1"), *DEVICES),
}  # fmt: skip
# Any value will do, or what is wrong with it can't be known yet: a name, a text.
FREE = {
    "run": {
        "--preset",
        "--system",
        "--prefill",
        "--docs",
        "--dry-breaker",
        "--mmproj",
        "--install-completion",
        "--show-completion",
    },
    "chat": {"--preset", "--system", "--prefill", "--docs", "--dry-breaker", "--mmproj", "--session"},
    "plan": {"--draft"},
    "evaluate": {"--reference"},
    "quantize": {"--output"},
    "bench": {"--machine", "--compare"},
    "tune": {"--device"},
}


@pytest.fixture
def nothing_is_touched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Looking for a model, the chats or the network fails the test."""

    def touched(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("a model was looked for")

    monkeypatch.chdir(tmp_path)
    for name in ("llmrun.model.loading.locate", "llmrun.cli.loading.locate", "llmrun.cli.chat.Sessions"):
        monkeypatch.setattr(name, touched)
    monkeypatch.setattr("socket.socket.connect", touched)
    monkeypatch.setattr("subprocess.Popen", touched)  # an engine


@pytest.mark.usefixtures("nothing_is_touched")
@pytest.mark.parametrize("command", WRONG)
def test_wrong_values_are_refused_by_the_flag_before_anything_is_looked_for(command: str) -> None:
    app = app_of(command)
    spellings = {word: each.opts for each in typer.main.get_command(app).params for word in each.opts}
    accepted, unnamed = [], []
    for options in WRONG[command]:
        done = CliRunner().invoke(app, [MODEL, *options], input="hi")
        status = done.exception.exit_status if isinstance(done.exception, LlmrunError) else done.exit_code
        if status not in (2, 7):  # usage, or a broken grammar
            accepted.append((options, done.exception))
        said = f"{done.output} {done.exception}"
        names = [name for word in options for name in spellings.get(word, ())]
        if re.search("invalid (?!test )", said, re.IGNORECASE) and not any(name in said for name in names):
            unnamed.append((options, said))
    assert not accepted
    assert not unnamed


@pytest.mark.parametrize("command", WRONG)
def test_the_table_knows_every_option_with_a_value(command: str) -> None:
    tried = {word for options in WRONG[command] for word in options} | FREE.get(command, set())
    parameters = typer.main.get_command(app_of(command)).params
    options = [each for each in parameters if each.param_type_name == "option" and not (each.is_flag or each.hidden)]
    assert not [option.opts for option in options if not tried & set(option.opts)]


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("temperature", "3000", "invalid /set temperature 3000"),
        ("--temp", "nan", "invalid /set temp nan"),
        ("top_k", "x", "invalid /set top-k x"),
        ("logit-bias", "5", "invalid /set logit-bias '5'"),
        ("order", "top_k,topp", "/set order: 'topp' is not a step of the sampler"),
        ("nothing", "", "there is no sampling parameter 'nothing'"),
        ("min_p", "", "/set min-p needs a value"),
    ],
)
def test_a_chats_set_is_refused_by_what_was_typed(name: str, text: str, what: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_value(name, text, "/set ")
    assert refused.value.what == what


def test_the_sampler_order_is_shown_in_words_that_a_table_can_wrap() -> None:
    text = shown_value("order", SamplingParams().order)
    assert max(map(len, text.split())) < 20
    assert read_value("order", text) == ("order", SamplingParams().order)


@pytest.mark.parametrize("typed", [["--kernels", "ggml"], ["--kernels=ggml"], ["--kernels", "GGML"]])
def test_engines_get_the_chosen_kernels(typed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that starts before the command is known, and those of the command."""
    monkeypatch.setenv(KERNELS_VARIABLE, "")
    __main__._choose_kernels(["run", "smollm2", *typed])
    assert not own_kernels_wanted()
    monkeypatch.setenv(KERNELS_VARIABLE, "")
    CliRunner().invoke(app_of("run"), [MODEL, *typed], input="hi")
    assert os.environ[KERNELS_VARIABLE] == "ggml"
    assert not own_kernels_wanted()
