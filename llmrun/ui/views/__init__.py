"""What each command shows."""
