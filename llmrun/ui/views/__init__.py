"""The output of each command: on a terminal, in a pipe, as a page."""
