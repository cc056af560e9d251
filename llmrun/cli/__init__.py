"""The command line: Typer lives only here."""
