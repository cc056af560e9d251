"""The command line: Typer lives only here and in lab/cli/."""
