"""Tools that a chat's model may call: functions of a Python file, and MCP servers, each in a process of its own."""
