"""A home that is full or can't be written is no bug in llmrun: what does not need it goes on, the rest says why."""

from __future__ import annotations

import errno
import io
from pathlib import Path

import pytest
from support.gguf_writer import tiny_model, write

from llmrun.cli.chat import SessionOptions, _store
from llmrun.cli.main import _explained
from llmrun.doctor.doctor import _directory
from llmrun.errors import DiskFullError, OutOfMemoryError, ResourceError
from llmrun.lab.bench import tune as tuning
from llmrun.lab.bench.tune import Improvement, SearchResult
from llmrun.lab.cli.tune import tune
from llmrun.planning.tuned import Profile, TunableSettings, TunedSettings
from llmrun.protocol.jobs.bench import BenchTest
from llmrun.statistics import Verdict
from llmrun.ui.terminal.output import Output


@pytest.fixture
def unusable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home that is a file. Permissions would not keep root away."""
    home = tmp_path / "home"
    home.touch()
    monkeypatch.setenv("LLMRUN_HOME", str(home))
    return home


def output() -> tuple[Output, io.StringIO]:
    stderr = io.StringIO()
    return Output(stdout=io.StringIO(), stderr=stderr, stdin=io.StringIO(), environment={}), stderr


def saving(*, last: bool = False, session: str | None = None, private: bool = False) -> SessionOptions:
    return SessionOptions(last, session, private, None, 0)


def test_a_new_chat_goes_on_unsaved_and_says_so(unusable: Path) -> None:
    out, stderr = output()
    with _store(out, saving()) as store:
        assert store.folder is None
        assert store.all() == []
    assert stderr.getvalue().startswith("This chat is not saved: can't read or write the saved chats in ")
    out, stderr = output()
    with _store(out, saving(private=True)):
        assert stderr.getvalue() == ""


@pytest.mark.parametrize("wanted", [saving(last=True), saving(session="trip")])
def test_a_chat_that_should_be_there_ends_with_an_error(unusable: Path, wanted: SessionOptions) -> None:
    with pytest.raises(ResourceError, match="can't read or write"), _store(output()[0], wanted):
        pass


def test_what_tuning_found_is_shown_where_it_can_not_be_kept(
    unusable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    default = Profile(TunableSettings(threads=2, threads_batch=2), 1.0, 100.0, 10.0)
    faster = Profile(TunableSettings(threads=1, threads_batch=2), 1.0, 100.0, 20.0)
    verdict = Verdict("faster", 2.0, 1.9, 2.1, (8, 8), True)
    tests = BenchTest(n_prompt=256), BenchTest(n_gen=16)
    found = SearchResult(
        TunedSettings(default, (faster,), 0, 0.0), (Improvement(faster, verdict, verdict),), (), (), *tests, 42.0
    )
    monkeypatch.setattr(tuning, "tune", lambda *arguments, **options: found)
    with pytest.raises(ResourceError, match="can't write"):
        tune.__wrapped__(str(write(tmp_path / "model.gguf", tiny_model())), devices={})
    shown = capsys.readouterr()
    assert "decode ×2.00 of the defaults" in shown.out
    assert "remembered" not in shown.err


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), DiskFullError),
        (OSError(errno.EFBIG, "File too large"), DiskFullError),
        (OSError(errno.EROFS, "Read-only file system", "/home/file"), ResourceError),
        (OSError(errno.ENOSPC, "No space left on device", "/home/file"), ResourceError),
        (OSError(errno.EIO, "Input/output error"), ResourceError),
        (MemoryError(), OutOfMemoryError),
    ],
)
def test_what_the_system_refuses_is_no_bug_of_ours(error: Exception, kind: type[Exception]) -> None:
    explained = _explained(error)
    assert type(explained) is kind
    assert explained.exit_status == 6
    assert str(getattr(error, "filename", None) or "") in str(explained)


def test_what_nobody_expected_is() -> None:
    assert _explained(KeyError("x")).exit_status == 1


def test_doctor_tells_it_apart_from_a_bug(unusable: Path) -> None:
    assert _directory("state", unusable).exit_status == 6
