"""The terminal user interface. Rich and prompt_toolkit are used only here."""
