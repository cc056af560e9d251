"""Which models stay in memory, and which goes first; engines are fake, memory is what the test says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.engines import fake_engine
from support.gguf_writer import lora_tensors, runnable_model, tiny_adapter, write
from support.model_disk import lonely_home, put_ollama

from llmrun.config import load_settings
from llmrun.errors import BadModelError, ModelNotFoundError, OutOfMemoryError, UsageError
from llmrun.model import Model
from llmrun.model.loading import prepare
from llmrun.models.location import ModelLocation, locate
from llmrun.planning.measurements import Comparisons
from llmrun.planning.preferences import LoadPreferences
from llmrun.protocol.messages import AnswerRequest, Message
from llmrun.protocol.params import Limits
from llmrun.protocol.speculation import ComparisonTimes
from llmrun.runner.launch import EngineHandle
from llmrun.server.http import CrashingPromptError
from llmrun.server.model_routes import ModelCatalog
from llmrun.server.pool import CrashTracker, Pool

pytestmark = pytest.mark.usefixtures("package_on_path")


class Machine:
    """Has memory for so many models, and notes which are loaded."""

    def __init__(
        self,
        folder: Path,
        names: str,
        *,
        room: int = 9,
        mode: str = "normal",
        keep_seconds: float = 9e9,
        idle_seconds: float = 9e9,
    ) -> None:
        self.paths = [str(write(folder / f"{name}.gguf", runnable_model())) for name in names]
        self.loads: list[str] = []
        self.room, self.mode = room, mode
        self.promised: list[int] = []
        self.may_start = threading.Event()
        self.may_start.set()
        self.pool = Pool(
            self.paths,
            load_settings(),
            self.prepare,
            keep_seconds=keep_seconds,
            start=self.start,
            idle_seconds=idle_seconds,
        )

    def prepare(self, located: ModelLocation, path: Path, promised: int) -> Model:
        self.promised.append(promised)
        if len([kept for kept in self.pool.models if kept.is_loaded]) >= self.room:
            raise OutOfMemoryError("there is no room")
        return prepare(located.spec, path, LoadPreferences(n_ctx=256))

    def start(self, model: Model) -> EngineHandle:
        self.loads.append(model.path.stem)
        self.may_start.wait()
        return fake_engine(self.mode)

    @property
    def loaded(self) -> str:
        """Names of the models in memory."""
        return "".join(sorted(Path(kept.name).stem for kept in self.pool.models if kept.is_loaded))

    async def use(self, index: int) -> None:
        """Ask a model for something."""
        async with self.pool.lease(self.paths[index]) as kept:
            await self.pool.ready(kept)


def run(machine: Machine, scenario: Callable[[Machine], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        try:
            await scenario(machine)
        finally:
            await machine.pool.close()

    asyncio.run(all_of_it())


def test_a_model_is_loaded_once_and_stays(tmp_path: Path) -> None:
    async def scenario(machine: Machine) -> None:
        await asyncio.gather(*(machine.use(0) for _ in range(5)))
        await machine.use(0)
        assert (machine.loaded, machine.loads) == ("a", ["a"])

    run(Machine(tmp_path, "a"), scenario)


def test_names_of_ollama_with_the_same_weights_are_models_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = runnable_model({"llama.context_length": 1024})
    store = lonely_home(tmp_path / "home", monkeypatch) / ".ollama/models"
    put_ollama(store, "library/plain:latest", weights)
    put_ollama(store, "library/same:latest", weights)
    put_ollama(
        store, "library/tuned:latest", weights,
        adapter=tiny_adapter(tensors=lora_tensors(n_in=32, n_out=32)), system=b"Be a pirate.",
        params=b'{"stop": ["x"], "temperature": 0.25, "num_ctx": 512, "num_gpu": 1}',
        messages=b'[{"role": "user", "content": "Ahoy?"}, {"role": "assistant", "content": "Arr"}]',
    )  # fmt: skip
    machine = Machine(tmp_path, "")
    pool = Pool(
        (), load_settings(), lambda located, path, _: prepare(located.spec, path), keep_seconds=9, start=machine.start
    )
    hi, rude = Message("user", "hi"), Message("system", "Be rude.")

    catalog = ModelCatalog(load_settings())
    assert [catalog.find(name)[0].name for name in ("ollama/tuned", "ollama/tuned:latest")] == [
        "ollama/tuned:latest"
    ] * 2

    async def scenario() -> None:
        async with pool.lease("ollama/plain") as plain, pool.lease("ollama/tuned") as tuned:
            async with pool.lease("ollama/same") as same:
                assert same is plain
            await asyncio.gather(pool.ready(plain), pool.ready(tuned))
            assert (plain.loaded_model.adapters, len(tuned.loaded_model.adapters)) == ((), 1)
            assert tuned.loaded_model.plan.load.n_ctx == 512
            assert "PARAMETER num_gpu is left out: llmrun has no such setting" in tuned.loaded_model.plan.notes
            assert tuned.loaded_model.sampling({})[0].temperature == 0.25
            assert tuned.loaded_model.sampling({})[1]["temperature"] == "Modelfile"
            asked = AnswerRequest((hi,))
            assert pool.complete(plain, "ollama/plain", asked) == asked
            found = pool.complete(tuned, "ollama/tuned", asked)
            assert found.limits.stop == ("x",)
            assert [each.content for each in found.messages] == ["Be a pirate.", "Ahoy?", "Arr", "hi"]
            own = AnswerRequest((rude, hi), limits=Limits(stop=("y",)))
            found = pool.complete(tuned, "ollama/tuned", own)
            assert found.limits.stop == ("y",)
            assert [each.content for each in found.messages] == ["Be rude.", "Ahoy?", "Arr", "hi"]
            text = pool.complete(tuned, "ollama/tuned", AnswerRequest(prompt="hi"))
            assert (text.messages, text.limits.stop) == ((), ("x",))
        await pool.close()

    asyncio.run(scenario())


def test_the_least_recently_used_goes_when_there_is_no_room(tmp_path: Path) -> None:
    async def scenario(machine: Machine) -> None:
        for index in (0, 1, 0, 2):
            await machine.use(index)
        assert machine.loaded == "ac"

    run(Machine(tmp_path, "abc", room=2), scenario)


def test_what_a_loaded_model_may_still_take_is_not_promised_to_the_next(tmp_path: Path) -> None:
    async def scenario(machine: Machine) -> None:
        async with machine.pool.lease(machine.paths[0]) as kept:
            await machine.pool.ready(kept)
            assert kept.model is not None
            kept.model.plan = replace(kept.model.plan, ram_bytes=10**13)
        await machine.use(1)
        async with machine.pool.lease(machine.paths[0]) as kept:
            kept.model.plan = replace(kept.model.plan, ram_bytes=0)  # it has all that it will ever take
        await machine.use(2)
        first, second, third = machine.promised
        assert first == 0
        assert 0.9 * 10**13 < second <= 10**13
        assert third < 10**12

    run(Machine(tmp_path, "abc"), scenario)


def test_less_memory_is_planned_with_where_some_is_promised(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", runnable_model())
    located = locate(str(path), load_settings())
    prepare(located.spec, path, LoadPreferences(n_ctx=256))
    with pytest.raises(OutOfMemoryError):
        prepare(located.spec, path, LoadPreferences(n_ctx=256), promised=2**60)


def test_a_model_in_use_or_waited_for_never_goes(tmp_path: Path) -> None:
    async def scenario(machine: Machine) -> None:
        async with machine.pool.lease(machine.paths[0]) as kept:
            await machine.pool.ready(kept)
            with pytest.raises(OutOfMemoryError):
                await machine.use(1)
            assert machine.loaded == "a"
        await machine.use(1)
        assert machine.loaded == "b"

    run(Machine(tmp_path, "ab", room=1), scenario)


def test_a_model_that_nobody_asks_goes_after_its_time(tmp_path: Path) -> None:
    async def scenario(machine: Machine) -> None:
        await machine.use(0)
        while machine.loaded:
            await asyncio.sleep(0)
        await machine.use(0)
        assert machine.loads == ["a", "a"]

    run(Machine(tmp_path, "a", keep_seconds=0.0), scenario)


def test_a_request_between_the_timer_and_the_unload_keeps_the_model(tmp_path: Path) -> None:
    async def scenario(machine: Machine) -> None:
        await machine.use(0)
        (pooled,) = machine.pool.models
        machine.pool._when_unused(pooled, machine.pool._unload)  # as the timer does: the task has not run yet
        async with machine.pool.lease(machine.paths[0]) as kept:
            connection = await machine.pool.ready(kept)
            for _ in range(9):
                await asyncio.sleep(0)
            assert connection.alive
        assert machine.loads == ["a"]

    run(Machine(tmp_path, "a"), scenario)


def test_a_model_whose_time_is_over_while_it_is_loaded_for_nobody_goes_afterwards(tmp_path: Path) -> None:
    async def scenario(machine: Machine) -> None:
        machine.may_start.clear()
        async with machine.pool.lease(machine.paths[0]) as kept:
            waiting = asyncio.ensure_future(machine.pool.ready(kept))
            while not machine.loads:
                await asyncio.sleep(0)
            waiting.cancel()
        assert kept.expiry is not None
        await asyncio.sleep(kept.expiry.when() - asyncio.get_running_loop().time())
        machine.may_start.set()
        assert kept.starting is not None
        await kept.starting
        assert machine.loaded == "a"
        while machine.loaded:
            await asyncio.sleep(0)

    run(Machine(tmp_path, "a", keep_seconds=0.0), scenario)


def test_an_idle_engine_compares_ways_to_compute_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path / "home"))
    writers, remember = list[threading.Thread](), Comparisons.remember

    def noted(self: Comparisons, found: ComparisonTimes) -> None:
        remember(self, found)
        writers.append(threading.current_thread())

    monkeypatch.setattr(Comparisons, "remember", noted)
    monkeypatch.setattr("llmrun.planning.measurements.can_compare_attention", lambda *_: True)

    async def scenario(machine: Machine) -> None:
        for _ in range(2):
            async with machine.pool.lease("") as kept:
                await machine.pool.ready(kept)
                assert kept.idling is None, "it is in use"
            while not writers:
                await asyncio.sleep(0)
        assert kept.model is not None
        assert kept.model.comparisons.missing() is None

    run(Machine(tmp_path, "a", idle_seconds=0.0), scenario)
    assert len(writers) == 1
    assert threading.main_thread() not in writers, "the event loop does not wait for files"


def test_less_than_no_time_is_for_ever(tmp_path: Path) -> None:
    async def scenario(machine: Machine) -> None:
        async with machine.pool.lease("", keep_seconds=-1) as kept:
            await machine.pool.ready(kept)
        assert kept.expiry is None
        assert machine.loaded == "a"

    run(Machine(tmp_path, "a", keep_seconds=0.0), scenario)


def test_a_pin_is_shown_and_survives_requests_that_say_nothing(tmp_path: Path) -> None:
    async def scenario(machine: Machine) -> None:
        for keep_seconds, pinned in ((40.0, False), (-1, True), (None, True), (50.0, False), (None, False)):
            async with machine.pool.lease("", keep_seconds=keep_seconds) as kept:
                await machine.pool.ready(kept)
            assert (kept.expiry is None) is pinned
        assert kept.keep_seconds == 50.0

    run(Machine(tmp_path, "a", keep_seconds=60.0), scenario)


def test_what_can_not_be_loaded_is_told_to_all_who_wait_and_tried_again(tmp_path: Path) -> None:
    async def scenario(machine: Machine) -> None:
        results = await asyncio.gather(machine.use(0), machine.use(0), return_exceptions=True)
        assert [type(result) for result in results] == [BadModelError] * 2
        assert machine.loads == ["a"]
        machine.mode = "normal"
        await machine.use(0)
        assert machine.loaded == "a"

    run(Machine(tmp_path, "a", mode="refuse"), scenario)


@pytest.mark.parametrize("name", ["nothing", "owner/repo:Q4_K_M", "/etc/passwd", "../a", "a.gguf", "x\ny", "é" * 600])
def test_what_is_not_here_is_not_found(tmp_path: Path, name: str) -> None:
    async def scenario(machine: Machine) -> None:
        with pytest.raises(ModelNotFoundError) as raised:
            async with machine.pool.lease(name):
                pass
        assert ("llmrun pull" if name.startswith("owner") else "serve --any-model") in raised.value.hint
        assert not machine.loads

    run(Machine(tmp_path, "a"), scenario)


def test_without_a_model_of_its_own_a_server_wants_a_name(tmp_path: Path) -> None:
    async def scenario(machine: Machine) -> None:
        with pytest.raises(UsageError, match="model is missing"):
            async with machine.pool.lease(""):
                pass

    run(Machine(tmp_path, ""), scenario)


def test_prompts_that_were_in_dying_engines_are_remembered_for_a_while() -> None:
    deaths = CrashTracker()
    for engine in (1, 1, 2):  # two answers to it were in the first one
        deaths.check("killer")
        deaths.add("killer", engine)
    with pytest.raises(CrashingPromptError):
        deaths.check("killer")
    for number in range(1000):
        deaths.add(str(number), 3)
    deaths.check("killer")


def test_a_prompt_that_was_answered_is_not_to_blame() -> None:
    deaths = CrashTracker()
    deaths.add("innocent", 1)
    deaths.forget("innocent")
    deaths.add("innocent", 2)
    deaths.check("innocent")
