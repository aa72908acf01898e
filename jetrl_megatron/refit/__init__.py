"""Carrying the trainer's bytes into the engine: what a message holds, where the bytes lie, how both sides digest them."""
