"""Model files on this disk: find, list, install, remove, clean up."""
