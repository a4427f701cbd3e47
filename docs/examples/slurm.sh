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

# A disk that all nodes share.
output=${OUTPUT:-$SLURM_SUBMIT_DIR/runs/digits}

# The first process listens on a port that JAX derives from the job's number; JAX_COORDINATOR_PORT
# sets another. When one task fails, --kill-on-bad-exit ends the others.
# --resume starts anew where nothing is saved yet.
srun --kill-on-bad-exit=1 \
  boostax train digits --resume --devices "$SLURM_NTASKS" --output "$output" "$@"

# Stopped before its end, it has no summary yet: back into the queue.
[[ -f "$output/summary.json" ]] || scontrol requeue "$SLURM_JOB_ID"
