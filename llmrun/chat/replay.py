"""Recorded answers: the whole request, so that the same machine and build give the same bytes again."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llmrun.chat.store.turns import Answer, answer_of, plain_facts
from llmrun.errors import UsageError
from llmrun.model import Model
from llmrun.models.fingerprint import ModelFingerprint, fingerprint_file
from llmrun.planning.hardware import probe
from llmrun.protocol.codec import as_dict, from_json, load_json
from llmrun.protocol.llama_folder import llama_version
from llmrun.protocol.messages import AnswerRequest, Finished, given_values
from llmrun.storage import write_whole

_KIND, _VERSION = "llmrun-record", 2
_OF_ANSWER = frozenset({"sampling", "limits"})  # fields of the request that the answer states


@dataclass(frozen=True, slots=True)
class Recording:
    """A request, its answer, and the environment that the answer's bytes depend on."""

    request: AnswerRequest
    place: Mapping[str, str]  # name -> value of everything that the bytes depend on besides the request
    answer: Answer  # with the sampling parameters and the seed that were used
    draft: ModelFingerprint | None = None  # the draft model

    def again(self) -> AnswerRequest:
        """Return the request with the seed of its answer."""
        return replace(self.request, sampling=replace(self.answer.sampling, seed=self.answer.stats.seed))


def record_of(model: Model, request: AnswerRequest, text: str, finished: Finished) -> Recording:
    """Return the record of an answer, and of the drafts in its steps, whose number depends on the time they took."""
    if request.speculation is not None:
        recorded = request.speculation._replace(only_if_it_pays=False, recorded=finished.drafts)
        request = replace(request, speculation=recorded)
    answer = Answer(text, "", finished.reason, model.used, request.sampling, request.limits, finished.stats)
    return Recording(request, place_of(model), replace(answer, adapters=model.load.adapters), _draft_of(model))


def _draft_of(model: Model) -> ModelFingerprint | None:
    return fingerprint_file(model.draft.name, model.draft.path) if model.draft is not None else None


def place_of(model: Model) -> dict[str, str]:
    """Return everything that an answer's bytes depend on, besides the request and the sampling."""
    used, draft, machine = model.used, _draft_of(model), probe()
    adapters = [
        f"{_file(fingerprint_file('', Path(adapter.path)))} x {adapter.scale:g}" for adapter in model.load.adapters
    ]
    return {
        "model": _file(used),
        **({"draft model": _file(draft)} if draft is not None else {}),
        **({"adapters": "; ".join(adapters)} if adapters else {}),
        "llmrun": version("llmrun"),
        "llama-cpp-python": llama_version(),
        "processor": machine.cpu_name,
        "system": f"{platform.system()} {platform.machine()}",
        "devices": ", ".join(model.loaded.devices),
        "threads": str(model.load.threads),
        "context": str(model.loaded.n_ctx),
        "batch": str(model.load.n_batch),
        "KV cache": f"{model.load.kv_type_k} {model.load.kv_type_v}",
        "flash attention": model.load.flash_attention,
    }


def _file(used: ModelFingerprint) -> str:
    return used.sha256 or f"{Path(used.path).name}, {used.size} bytes"


def differences(record: Recording, here: Mapping[str, str]) -> list[str]:
    """Return a line for each value that differs from the recorded one."""
    return [
        f"{name}: recorded {record.place.get(name, 'nothing')}, here {here.get(name, 'nothing')}"
        for name in {**here, **record.place}
        if record.place.get(name) != here.get(name)
    ]


def write(path: Path, record: Recording) -> None:
    """Write a record to a file.

    Raises:
        DiskFullError: the disk is full.
        UsageError: the file can't be written.
    """
    request, given = as_dict(record.request), given_values(record.request).keys() - _OF_ANSWER
    document = {
        "kind": _KIND,
        "version": _VERSION,
        "place": dict(record.place),
        "request": {name: value for name, value in request.items() if name in given},
        "answer": {"content": record.answer.content, **plain_facts(record.answer)},
        "draft": as_dict(record.draft) if record.draft is not None else None,
    }
    write_whole(path, json.dumps(document, ensure_ascii=False, indent=1) + "\n")


def read(path: Path) -> Recording:
    """Read a record.

    Raises:
        UsageError: the file can't be read, or is not a record.
    """
    try:
        document: Any = load_json(path.read_text(encoding="utf-8"))
        if document["kind"] != _KIND or document["version"] not in (1, _VERSION):
            raise ValueError("it is of another kind or version")
        earlier = {"stops_repeats": document.get("stops_repeats", False)}  # where earlier records have it
        fields = {**earlier, **document["request"]}
        if document["version"] == 1:
            fields["speculation"] = None  # step times, not drafts
        request = from_json(AnswerRequest, fields)
        facts = document["answer"]
        answer = answer_of(str(facts["content"]), "", facts)
        place = {str(name): str(value) for name, value in document["place"].items()}
        draft = from_json(ModelFingerprint, document["draft"]) if document.get("draft") else None
        return Recording(replace(request, sampling=answer.sampling, limits=answer.limits), place, answer, draft)
    except OSError as error:
        raise UsageError(f"{str(path)!r} can't be read", why=error.strerror or str(error)) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{str(path)!r} is not a record of an answer", why=str(error), hint="llmrun run --record"
        ) from None
