"""An OpenAI-compatible server as the engine: where it is, what it has, and a client with the runner's surface."""
