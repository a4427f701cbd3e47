#!/usr/bin/env bash
# Train under SLURM: sbatch slurm.sh [options of `boostax train digits`]
#SBATCH --job-name=boostax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
# On GPUs also --gpus-per-node=4: JAX gives each task the one that has its number on the node.
#SBATCH --time=04:00:00
#SBATCH --open-mode=append
#SBATCH --requeue
# SIGTERM to the tasks 120 s before the time is up: they save after the same call and end with 0.
#SBATCH --signal=TERM@120
set -euo pipefail

# The first process listens on a port that JAX derives from the job's number; JAX_COORDINATOR_PORT
# sets another.
# --kill-on-bad-exit: when one task fails, the others end too.
# --resume starts anew where nothing is saved yet, so a job put back in the queue goes on by itself.
# A disk that all nodes share holds the checkpoints.
srun --kill-on-bad-exit=1 \
  boostax train digits --resume --devices "$SLURM_NTASKS" \
  --output "${OUTPUT:-$SLURM_SUBMIT_DIR/runs/digits}" "$@"
