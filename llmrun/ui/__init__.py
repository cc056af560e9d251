"""What a user sees: Rich and prompt_toolkit live only here."""
