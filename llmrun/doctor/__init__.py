"""What is wrong with this installation, and a trial answer that shows it."""
