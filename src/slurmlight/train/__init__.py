"""The training half: engines, rollouts, checkpoints. It never calls Slurm; the run folder is where it meets it."""
