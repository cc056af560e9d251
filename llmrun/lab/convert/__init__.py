"""Conversion of a Hugging Face folder (safetensors) to a GGUF file with numpy alone, some rows in memory at a time.

Nothing in the folder is executed, unpickled or trusted. A feature that llama.cpp would compute differently is refused.
"""
