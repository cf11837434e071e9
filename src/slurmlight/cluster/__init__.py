"""The cluster half: submit, supervise, read Slurm. It never imports the training half."""
