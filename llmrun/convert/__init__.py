"""From a Hugging Face folder (safetensors) to a GGUF file: with numpy alone, one tensor in memory at a time.

Nothing in the folder is run, unpickled or trusted. What llama.cpp could not compute the same way is refused by name.
"""
