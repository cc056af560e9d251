"""HTTP in front of the engines: OpenAI's, Anthropic's and Ollama's protocols, and the models they speak to."""
