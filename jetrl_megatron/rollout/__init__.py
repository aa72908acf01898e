"""The rollout side: a vLLM engine in a process of its own, and the client that a trainer rank drives it with."""
