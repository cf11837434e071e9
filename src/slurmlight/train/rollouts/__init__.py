"""Rollouts, the same for every engine: the Agent-Lightning gateway, the pool of warm runners, and who is alive."""
