"""What this machine has, what a model needs, and how both go together."""
