"""Checks of the installation, and a trial answer."""
