"""Evaluation of a checkpoint: merge, serve, run, report."""
