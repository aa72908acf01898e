"""Carrying the trainer's bytes into the engine: the message, where its bytes lie, how both sides digest them."""
