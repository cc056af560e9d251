"""Libraries that call tools: each gets a call, runs the function, sends its result and takes the answer.

The libraries may lie in another environment: LLMRUN_CLIENTS_PYTHON is its interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from forcing_proxy import DONE, Call, forcing
from support.real_server import RealServer
from table import ROWS, Row

SECONDS = 500  # ends what hangs
PYTHON = os.environ.get("LLMRUN_CLIENTS_PYTHON", sys.executable)
TOWN, WEATHER = "Rome", "sunny in Rome"
SCRIPT = [[Call("weather", {"town": TOWN})]]
FUNCTION = '''
import sys
address, url = sys.argv[1], sys.argv[1] + "/v1"
def weather(town: str) -> str:
    """Tell the weather.

    Args:
        town: its name
    """
    return f"sunny in {town}"
'''
OPENAI = """
import json, openai
client = openai.OpenAI(base_url=url, api_key="none")
schema = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
"""
CASES = {
    "openai": """
said = [{"role": "user", "content": "Weather?"}]
tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
while True:
    message = client.chat.completions.create(model="wide", messages=said, tools=tools).choices[0].message
    if not message.tool_calls:
        break
    said.append(message)
    for call in message.tool_calls:
        result = weather(**json.loads(call.function.arguments))
        said.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(message.content)
""",
    "openai (responses)": """
items = [{"role": "user", "content": "Weather?"}]
tools = [{"type": "function", "name": "weather", "parameters": schema, "strict": False}]
while True:
    answer = client.responses.create(model="wide", input=items, tools=tools)
    calls = [each for each in answer.output if each.type == "function_call"]
    if not calls:
        break
    for call in calls:
        result = weather(**json.loads(call.arguments))
        items += [call, {"type": "function_call_output", "call_id": call.call_id, "output": result}]
print(answer.output_text)
""",
    "anthropic": """
import anthropic
client = anthropic.Anthropic(base_url=address, api_key="none")
said = [{"role": "user", "content": "Weather?"}]
runner = client.beta.messages.tool_runner(
    model="wide", max_tokens=200, messages=said, tools=[anthropic.beta_tool(weather)]
)
print(runner.until_done().content[-1].text)
""",
    "ollama": """
import ollama
client = ollama.Client(host=address)
said = [{"role": "user", "content": "Weather?"}]
client.chat(model="wide", messages=said, tools=[weather], options={"num_predict": 8})
schema = {"type": "object", "properties": {"done": {"const": "llmrun answered"}}, "required": ["done"]}
print(client.chat(model="wide", messages=said, format=schema).message.content)
""",
    "pydantic_ai": """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
agent = Agent(OpenAIChatModel("wide", provider=OpenAIProvider(base_url=url, api_key="none")), tools=[weather])
print(agent.run_sync("Weather?").output)
""",
    "agents": """
import openai
from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
set_tracing_disabled(True)
model = OpenAIResponsesModel("wide", openai.AsyncOpenAI(base_url=url, api_key="none"))
print(Runner.run_sync(Agent("it", model=model, tools=[function_tool(weather)]), "Weather?").final_output)
""",
    "langchain_openai": """
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from langchain_core.tools import tool
model = ChatOpenAI(model="wide", base_url=url, api_key="none").bind_tools([tool(weather)])
said = [HumanMessage("Weather?")]
while (answer := model.invoke(said)).tool_calls:
    said.append(answer)
    said += [ToolMessage(weather(**call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
print(answer.content)
""",
}
CASES = {name: (OPENAI if name.startswith("openai") else "") + code for name, code in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_a_library_calls_a_function(server: RealServer, clean_environment: dict[str, str], name: str) -> None:
    package = name.partition(" ")[0]
    names = f"m.packages_distributions()['{package}'][0]"
    code = f"import {package}, importlib.metadata as m; print({names}, m.version({names}))"
    found = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, timeout=SECONDS, check=False)
    if found.returncode:
        ROWS.append(Row(name, "-", "a function", "skipped: not installed"))
        pytest.skip(f"{name} is not installed")
    with forcing(server.port, SCRIPT) as (address, seen):
        done = subprocess.run(
            [PYTHON, "-c", FUNCTION + CASES[name], address],
            capture_output=True,
            text=True,
            env=clean_environment,
            timeout=SECONDS,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert DONE["done"] in done.stdout
    assert not [each for each in seen if each.method == "POST" and each.status != 200]
    if name != "ollama":  # whose protocol can't force a call
        assert any(WEATHER in result for each in seen for result in each.results)
    distribution, version = found.stdout.split()
    ROWS.append(Row(distribution, version, name, f"{len(seen)} requests"))
