"""Thousands of prompts through one model, side by side: nothing is lost, nothing is answered twice."""
