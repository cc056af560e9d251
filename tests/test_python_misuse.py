"""Wrong arguments of the Python API: refused before anything is sent, by name and value; nothing dies of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engines import fake_client
from support.gguf_writer import tiny_model, write
from support.python_misuse import MISUSES, Misuse

import llmrun
from llmrun import errors
from llmrun.errors import LlmrunError, UsageError
from llmrun.model import loading
from llmrun.model.loading import prepare
from llmrun.models.registry import ModelSpec
from llmrun.protocol.arguments import FLAGS, KINDS, in_python
from llmrun.protocol.jobs.beams import BeamSettings


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[llmrun.Model]:
    """One model for all: what one call did wrong must not matter to the next."""
    path = write(tmp_path_factory.mktemp("model") / "tiny.gguf", tiny_model())
    with prepare(ModelSpec("tiny", path=path), path) as model, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(llmrun.__file__).parents[1]))
        model.start(fake_client())
        yield model


@pytest.mark.parametrize("misuse", MISUSES, ids=lambda misuse: " ".join(misuse.words))
def test_a_wrong_argument_is_named_with_its_value(model: llmrun.Model, misuse: Misuse) -> None:
    engine = model.chat("hi") and model.last_answer()[0].pid
    _ = llmrun.load  # as every program does; from then on, messages name arguments
    with pytest.raises(UsageError) as caught:
        misuse.call(model)
    said = f"{caught.value} {caught.value.hint}"
    assert all(word in said for word in misuse.words), said
    assert "--" not in said
    assert model.chat("hi").text == "Hello"
    assert model.last_answer()[0].pid == engine, "and it is the same engine"


def test_every_argument_of_every_public_function_has_a_kind() -> None:
    methods = [value for name, value in vars(llmrun.Model).items() if inspect.isfunction(value) and name[0] != "_"]
    unchecked = {
        function.__name__: name
        for function in (loading.load, *methods)
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in ("self", "takes", "start") and parameter.kind is not inspect.Parameter.VAR_KEYWORD
        if not hasattr(function, "__wrapped__") or name not in KINDS
    }
    # What a Python program does not call: it asks load() for a model that is started.
    assert unchecked.keys() == {"start", "takes"}


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        ("invalid --ctx 5", "invalid n_ctx 5"),
        ("ask for a larger one with --ctx", "ask for a larger one with n_ctx"),
        ("llmrun run 'a b' --ctx 512, the largest that fits", "load('a b', n_ctx=512), the largest that fits"),
        ("llmrun run MODEL --lora '/a b.gguf'", "load('MODEL', lora=['/a b.gguf'])"),
        ("use --raw, --template chatml or --template FILE", "use generate(), template=chatml or template=FILE"),
        ("llmrun run x --verbose on; see `llmrun list --all`", "llmrun run x --verbose on; see `llmrun list --all`"),
    ],
)
def test_messages_name_the_argument_of_whoever_called(flags: str, arguments: str) -> None:
    assert UsageError(flags).what == flags, "the commands'"
    assert in_python(flags) == arguments
    _ = llmrun.load
    assert UsageError("x", why=flags, hint=flags).why == arguments
    assert str(LlmrunError(flags)) == arguments


def test_the_arguments_that_messages_name_exist() -> None:
    known = {*KINDS, *llmrun.SamplingParams.__dataclass_fields__, *vars(llmrun.Model)}
    known |= {*llmrun.Message.__dataclass_fields__, *BeamSettings.__dataclass_fields__}
    assert {name.removesuffix("()") for name in FLAGS.values()} <= known


def test_an_engine_names_flags_and_the_program_hears_of_arguments(model: llmrun.Model) -> None:
    from llmrun.protocol.messages import Failed

    assert errors.rephrase is str
    _ = llmrun.load
    assert Failed(1, "usage", "too long", "", "a larger --ctx").error().hint == "a larger n_ctx"
