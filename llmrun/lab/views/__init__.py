"""The display of the laboratory's commands."""
