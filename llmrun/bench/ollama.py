"""Ollama as the other program: its server on this machine, over its own HTTP API.

Owns the temporary import of the model, and the conversion of Ollama's figures to a row; must not know how rows are
compared. Only a server on this machine is used. Ollama takes text, not tokens: rates come from its own counts and
times.
"""

from __future__ import annotations

import os
import random
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2

from llmrun.bench.parameters import Case
from llmrun.bench.results import BenchRow
from llmrun.bench.run import BenchedModel
from llmrun.errors import LlmrunError, UsageError
from llmrun.models.hashing import sha256_of
from llmrun.protocol.codec import load_json
from llmrun.protocol.settings import DEFAULTS, SETTINGS
from llmrun.remote.server import is_loopback, ollama_host

_QUICK, _PATIENT = 5.0, 1800.0  # seconds
_PREFIX = "llmrun-bench-"
_TRIES = 3
_CLOSE = 0.02  # a prompt length this near to the target is good enough
# Common words, one token each, with the space before, in most vocabularies.
_WORDS = (
    "the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "he",
    "his", "but", "at", "are", "this", "have", "from", "or", "had", "an", "they",
)  # fmt: skip


class Ollama:
    """A running server."""

    name = "ollama"

    def __init__(self, host: str, port: int) -> None:
        self.where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        # A proxy or password of the environment is not meant for a server on this machine.
        self._client = httpx2.Client(base_url=f"http://{self.where}", timeout=_PATIENT, trust_env=False)
        self._version = str(self._ask("GET", "/api/version", seconds=_QUICK).get("version", ""))
        self._imported: dict[Path, str] = {}
        self._words: dict[tuple[Path, int], int] = {}
        self._random = random.Random(1)  # noqa: S311 - other words every time, the same in every run

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> Ollama:
        """Find the server of OLLAMA_HOST, or at Ollama's default address.

        Raises:
            UsageError: the server is on another machine, or not running.
        """
        host, port = address(environment.get("OLLAMA_HOST", ""))
        try:
            return cls(host, port)
        except LlmrunError as error:
            if shutil.which("ollama", path=environment.get("PATH")):
                hint = "start it in another terminal: ollama serve"
            else:
                hint = "there is no ollama on the PATH either; --vs llama-bench compares with llama.cpp's own"
            raise UsageError(f"no Ollama answers at {host}:{port}", why=error.why, hint=hint) from None

    def measure(self, model: BenchedModel, case: Case) -> BenchRow:
        """Measure one repetition; see ExternalBenchmark."""
        name = self._imported.get(model.path) or self._import(model.path)
        test, settings = case.test, case.settings
        answer = self._generate(name, model, case)
        prefill = _seconds_a_token(answer, "prompt_eval") if test.n_prompt else 0.0
        decode = _seconds_a_token(answer, "eval") if test.n_gen else 0.0
        return BenchRow(
            model_filename=str(model.path),
            model_type=model.header.name,
            model_size=model.header.weight_bytes,
            model_n_params=model.header.n_parameters,
            n_batch=settings.n_batch,
            n_ubatch=settings.n_ubatch,
            n_threads=settings.threads,
            n_gpu_layers=settings.gpu_layers,
            n_prompt=test.n_prompt,
            n_gen=test.n_gen,
            n_depth=test.n_depth,
            test_time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            samples_ns=(round(1e9 * (prefill * test.n_prompt + decode * test.n_gen)),),
            test=test.name,
            model=model.name,
            program=self.name,
            version=self._version,
            repetitions=1,
        )

    def notes(self, model: BenchedModel, case: Case) -> tuple[str, ...]:
        """Return the settings that Ollama decides itself."""
        test, settings = case.test, case.settings
        found = ["Ollama gets words, not token ids, and its own clock counts"]
        if test.n_gen and not test.chat:
            found.append("Ollama samples and makes text, which this test of ours does not")
        if test.n_depth and test.n_prompt:
            found.append("at depth, Ollama computes the whole prompt: its rate is over all of it")
        ignored = [
            SETTINGS[name].label
            for name in ("n_ubatch", "flash_attention", "kv_type_k", "kv_type_v", "repack")
            if getattr(settings, name) != getattr(DEFAULTS, name)
        ]
        if ignored:
            found.append(f"Ollama chooses {', '.join(ignored)} by itself")
        return tuple(found)

    def close(self) -> None:
        """Remove the imported models."""
        for name in self._imported.values():
            with suppress(LlmrunError):
                self._ask("DELETE", "/api/delete", {"model": name})
        self._imported.clear()
        self._client.close()

    def _import(self, path: Path) -> str:
        """Import the file into Ollama's store, which copies it, under a temporary name."""
        digest = f"sha256:{sha256_of(path)}"
        name = f"{_PREFIX}{uuid.uuid4().hex[:12]}"
        self._imported[path] = name  # removed even if the import fails half-way
        try:
            blob, headers = f"/api/blobs/{digest}", {"Content-Length": str(path.stat().st_size)}
            with _told(self.where):
                if not self._client.head(blob, timeout=_QUICK).is_success:
                    with path.open("rb") as file:
                        _checked(self._client.post(blob, content=file, headers=headers))
            self._ask("POST", "/api/create", {"model": name, "files": {"model.gguf": digest}, "stream": False})
        except LlmrunError as error:
            raise LlmrunError(f"Ollama can't import {path.name}", why=error.why or error.what) from None
        return name

    def _generate(self, name: str, model: BenchedModel, case: Case) -> dict[str, Any]:
        """Generate an answer. The prompt's length is adjusted by trying: Ollama does not count tokens beforehand."""
        test, settings = case.test, case.settings
        target = test.n_depth + test.n_prompt
        key = (model.path, target)
        options = {
            "num_predict": test.n_gen or 1,
            "num_ctx": target + test.n_gen + 64,
            "num_batch": settings.n_batch,
            "num_thread": settings.threads,
            "seed": 1,
            **({"num_gpu": settings.gpu_layers} if settings.gpu_layers >= 0 else {}),
        }
        is_first = key not in self._words
        for _ in range(_TRIES):
            words = self._words.setdefault(key, max(target, 1))
            # New words each time: Ollama would have a known prompt in its cache.
            prompt = " ".join(self._random.choices(_WORDS, k=words))
            body = {"model": name, "prompt": prompt, "raw": True, "stream": False, "options": options}
            answer = self._ask("POST", "/api/generate", body)
            counted = int(answer.get("prompt_eval_count", 0))
            near = not target or not counted or abs(counted - target) <= max(_CLOSE * target, 2)
            if near and not is_first:
                return answer
            is_first = False  # the first one loaded the model and warmed up
            if not near:
                self._words[key] = max(1, round(words * target / counted))
        return answer

    def _ask(self, method: str, path: str, body: Any = None, seconds: float = _PATIENT) -> dict[str, Any]:
        with _told(self.where):
            response = _checked(self._client.request(method, path, json=body, timeout=seconds))
            answer = load_json(response.content) if response.content else {}
        return answer if isinstance(answer, dict) else {}


@contextmanager
def _told(where: str) -> Iterator[None]:
    """Turn network errors into LlmrunError.

    Raises:
        LlmrunError: with the reason.
    """
    try:
        yield
    except (OSError, httpx2.HTTPError, ValueError) as error:
        raise LlmrunError(f"Ollama at {where} does not answer", why=str(error) or type(error).__name__) from error


def _checked(response: httpx2.Response) -> httpx2.Response:
    """Return a successful response.

    Raises:
        LlmrunError: in Ollama's words.
    """
    if response.is_success:
        return response
    try:
        reason = str(load_json(response.content)["error"])
    except (ValueError, KeyError, TypeError):
        reason = f"status {response.status_code}"
    raise LlmrunError("Ollama refused", why=reason)


def _seconds_a_token(answer: Mapping[str, Any], phase: str) -> float:
    """Return the figures of a phase, "prompt_eval" or "eval".

    Raises:
        LlmrunError: Ollama did not report them.
    """
    try:
        count, ns = int(answer[f"{phase}_count"]), int(answer[f"{phase}_duration"])
    except (KeyError, TypeError, ValueError):
        count, ns = 0, 0
    if count <= 0 or ns <= 0:
        raise LlmrunError("Ollama's answer can't be used", why=f"it does not say how long {phase}uation took")
    return ns / 1e9 / count


def address(text: str) -> tuple[str, int]:
    """Return host and port of OLLAMA_HOST: "", "127.0.0.1", ":11434", "http://localhost:1234".

    Raises:
        UsageError: the host is another machine, or the value is invalid.
    """
    _, host, port = ollama_host(text)
    if is_loopback(host):
        return host, port
    raise UsageError(
        f"OLLAMA_HOST={text} is another machine",
        why="both programs have to run on the same one, and nothing is sent anywhere",
        hint="unset OLLAMA_HOST, and start it here: ollama serve",
    )
