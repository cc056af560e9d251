"""Tools that a chat's model may call: functions of a Python file, and MCP servers, each in its own process."""
