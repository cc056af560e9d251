"""The front's end of the pipe: the engine process, what is asked of it, and its death."""
