"""What a person sees: Rich and prompt_toolkit live only here."""
