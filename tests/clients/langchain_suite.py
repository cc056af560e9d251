"""LangChain's standard tests of a chat model, over four protocols of a server; test_suites.py runs this file."""

from __future__ import annotations

import os
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

URL = os.environ["LLMRUN_SUITE_URL"]
FEW: dict[str, Any] = {"model": "test", "temperature": 0}


class _Standard(ChatModelIntegrationTests):  # type: ignore[misc]
    @property
    def model_override_value(self) -> str:
        return "other"


class TestChat(_Standard):
    @property
    def chat_model_class(self) -> type:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**FEW, "base_url": f"{URL}/v1", "api_key": "none", "max_tokens": 300, "stream_usage": True}


class TestResponses(TestChat):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True}


class TestMessages(_Standard):
    @property
    def chat_model_class(self) -> type:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**FEW, "base_url": URL, "api_key": "none", "max_tokens": 300}


class TestOllama(_Standard):
    @property
    def chat_model_class(self) -> type:
        return ChatOllama

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**FEW, "base_url": URL, "num_predict": 300}
