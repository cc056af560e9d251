"""Plans: this machine's hardware, a model's needs, and the settings that follow."""
