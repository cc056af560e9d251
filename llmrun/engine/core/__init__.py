"""The generation loop and what it decides with: sequences, their batches, prefixes, samplers and text."""
