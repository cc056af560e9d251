"""Routes that ask an engine a question, which counts for the queue's limit too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llmrun.protocol.jobs import Empty, JobKind
from llmrun.protocol.jobs.text import TokenizeText
from llmrun.protocol.messages import AnswerRequest
from llmrun.protocol.questions import APPLY_TEMPLATE, COUNT_TOKENS, DETOKENIZE, TOKENIZE_LOADED
from llmrun.server.answer import CompletionRequest
from llmrun.server.exchange import ServerState
from llmrun.server.http import BusyError, read_json, read_json_list
from llmrun.server.pool import PooledAnswer, PooledModel
from llmrun.server.protocols import anthropic, openai_chat, openai_responses
from llmrun.server.protocols.fields import Fields
from llmrun.server.protocols.options import HIGHEST_TOKEN, read_adapters
from llmrun.server.protocols.timings import FINGERPRINT, generation_settings

_Result = TypeVar("_Result")


class EngineRoutes:
    """llama-server's /props, /slots, /tokenize, /detokenize, /apply-template and /lora-adapters; counts of tokens."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    @property
    def routes(self) -> list[Route]:
        get, post = ["GET"], ["POST"]
        return [
            Route("/props", self._props, methods=get),
            Route("/slots", self._slots, methods=get),
            Route("/tokenize", self._tokenize, methods=post),
            Route("/detokenize", self._detokenize, methods=post),
            Route("/apply-template", self._apply_template, methods=post),
            Route("/lora-adapters", self._adapters, methods=get),
            Route("/lora-adapters", self._scale_adapters, methods=post),
            Route("/v1/messages/count_tokens", self._count_messages, methods=post),
            Route("/v1/chat/completions/input_tokens", self._count_chat, methods=post),
            Route("/chat/completions/input_tokens", self._count_chat, methods=post),
            Route("/v1/responses/input_tokens", self._count_response, methods=post),
            Route("/responses/input_tokens", self._count_response, methods=post),
        ]

    async def _props(self, request: Request) -> Response:
        """Describe the model in ?model=, or the first one, as llama-server does."""
        async with self._state.engine(request.query_params.get("model", ""), request.receive) as (_, pooled):
            model = pooled.loaded_model
            name = request.query_params.get("model") or pooled.name
            sampling, _ = self._state.pool.sampling(pooled, name, self._state.sampling)
            header = model.header
            return JSONResponse(
                {
                    "default_generation_settings": {
                        "params": generation_settings(sampling=sampling),
                        "n_ctx": model.n_ctx,
                    },
                    "total_slots": model.parallel,
                    "model_alias": pooled.name,
                    "model_path": str(pooled.path),
                    "model_ftype": header.quant,
                    "chat_template": header.chat_template or "",
                    "bos_token": header.special_token("bos") or "",
                    "eos_token": header.special_token("eos") or "",
                    "modalities": {"vision": "image" in model.modalities, "audio": "audio" in model.modalities},
                    "reasoning": model.thinks,
                    "endpoint_slots": True,
                    "endpoint_metrics": True,
                    "endpoint_props": False,
                    "build_info": FINGERPRINT,
                    "is_sleeping": False,
                }
            )

    async def _slots(self, request: Request) -> Response:
        """List the places for requests of each loaded model; prefixes are shared, so none has a prompt of its own."""
        pool = self._state.pool
        statuses, slots = await pool.statuses(), list[dict[str, Any]]()
        for pooled in pool.models:
            status = statuses.get(pooled.name)
            if status is not None and pooled.is_loaded:
                slots += _slots_of(pooled, status.running, request.scope["owner"])
        if request.query_params.get("fail_on_no_slot") and all(slot["is_processing"] for slot in slots):
            raise BusyError("no slot is free")
        return JSONResponse(slots)

    async def _adapters(self, request: Request) -> Response:
        return JSONResponse(self._state.pool.adapters.described)

    async def _scale_adapters(self, request: Request) -> Response:
        """Set the scales of adapters for all requests that name none, as llama-server does."""
        scales = read_adapters(Fields({"lora": await read_json_list(request.receive)}))
        self._state.pool.adapters = self._state.pool.adapters.scaled(scales or ())
        return JSONResponse({"success": True})

    async def _tokenize(self, request: Request) -> Response:
        fields = Fields(await read_json(request.receive))
        text = fields.text("content") or fields.text("prompt") or ""
        special, adds_bos = fields.flag("parse_special") is not False, fields.flag("add_special") is True
        has_pieces = fields.flag("with_pieces") is True
        async with self._state.engine(fields.text("model") or "", request.receive) as (engine, _):
            command = TokenizeText("", text, special, adds_bos=adds_bos, has_pieces=has_pieces)
            found = await engine.do(TOKENIZE_LOADED, command)
        texts = {piece.token: _piece(bytes.fromhex(piece.data)) for piece in found.pieces}
        tokens = [{"id": token, "piece": texts[token]} if has_pieces else token for token in found.tokens]
        return JSONResponse({"tokens": tokens, "count": len(tokens)})

    async def _detokenize(self, request: Request) -> Response:
        fields = Fields(await read_json(request.receive))
        tokens = fields.wholes("tokens", 0, HIGHEST_TOKEN)
        async with self._state.engine(fields.text("model") or "", request.receive) as (engine, _):
            text = await engine.do(DETOKENIZE, tokens)
        return JSONResponse({"content": text})

    # ---- about the prompt of a request for completions ----

    async def _apply_template(self, request: Request) -> Response:
        prompt = await self._ask(request, APPLY_TEMPLATE, openai_chat.read)
        return JSONResponse({"prompt": prompt})

    async def _count_messages(self, request: Request) -> Response:
        counted = await self._ask(request, COUNT_TOKENS, anthropic.read_count)
        return JSONResponse({"input_tokens": counted.total})

    async def _count_chat(self, request: Request) -> Response:
        counted = await self._ask(request, COUNT_TOKENS, openai_chat.read)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": counted.total})

    async def _count_response(self, request: Request) -> Response:
        def read(body: dict[str, Any]) -> CompletionRequest:
            return openai_responses.read(self._state.responses.expanded(request.scope["owner"], body))

        counted = await self._ask(request, COUNT_TOKENS, read)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": counted.total})

    async def _ask(
        self,
        request: Request,
        kind: JobKind[AnswerRequest, Empty, _Result],
        read: Callable[[dict[str, Any]], CompletionRequest],
    ) -> _Result:
        """Return an engine's result for the prompt of a request that `read` takes from its body."""
        completion = await asyncio.to_thread(read, await read_json(request.receive))
        completion = completion.owned_by(request.scope["owner"])
        async with self._state.engine(completion.model, request.receive) as (engine, pooled):
            prompt = self._state.pool.complete(pooled, completion.model, completion.request)
            return await engine.do(kind, prompt)


def _slots_of(pooled: PooledModel, n_running: int, owner: str) -> list[dict[str, Any]]:
    """Describe the places of a model for answers.

    Args:
        n_running: answers in its engine, those of the page among them.
        owner: who asks; of answers of others only the number is told.
    """
    model, slots = pooled.loaded_model, list[dict[str, Any]]()
    n_others = n_running - len(pooled.running)
    for number in range(model.parallel):
        slot = {"id": number, "n_ctx": model.n_ctx, "model": pooled.name}
        answer = pooled.running.get(number)
        if answer is None:
            slots.append({**slot, "is_processing": n_others > 0})
            n_others -= 1
        else:
            details = _described(answer) if answer.request.owner == owner else {}
            slots.append({**slot, "is_processing": True, **details})
    return slots


def _described(answer: PooledAnswer) -> dict[str, Any]:
    request, started = answer.request, answer.started
    n_left = -1 if request.limits.max_tokens is None else request.limits.max_tokens - answer.n_tokens
    return {
        "id_task": answer.number,
        "speculative": request.speculation is not None,
        "n_prompt_tokens": started.prompt_tokens,
        "n_prompt_tokens_cache": started.reused_tokens,
        "params": generation_settings(request, seed=started.seed, stream=answer.stream),
        "next_token": [
            {
                "has_next_token": True,
                "has_new_line": answer.has_new_line,
                "n_remain": n_left,
                "n_decoded": answer.n_tokens,
            }
        ],
    }


def _piece(data: bytes) -> str | list[int]:
    """Return the text of a token, or its bytes if they are not whole characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
