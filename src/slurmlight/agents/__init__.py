"""Agents: async functions of a task and an endpoint. They know nothing of engines, gateways or trainers."""
