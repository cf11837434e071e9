"""slurmlight: train LLM agents by reinforcement learning as batch jobs that look after themselves."""

__version__ = "0.1.0"
