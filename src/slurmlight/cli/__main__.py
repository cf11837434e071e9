"""``python -m slurmlight.cli``: how the scripts in slurm/ call the command line."""

from slurmlight.cli import main

if __name__ == "__main__":
    main()
