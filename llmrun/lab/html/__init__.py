"""Pages without network: markup, plots."""
