"""What the commands of the laboratory show."""
