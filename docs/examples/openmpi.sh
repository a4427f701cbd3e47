#!/usr/bin/env bash
# Train with mpirun. Usage: openmpi.sh [options of `boostax train digits`]
#   PROCESSES=8 HOSTFILE=hosts openmpi.sh --devices 8 --output /shared/runs/digits
# On several machines boostax is installed on each at the same place, and --output is on a disk
# that all of them share.
set -euo pipefail

hosts=()
if [[ -n "${HOSTFILE:-}" ]]; then
  hosts=(--hostfile "$HOSTFILE")
fi

# To SIGTERM, and when a process fails, mpirun answers with SIGCONT, SIGTERM and SIGKILL, with
# odls_base_sigkill_timeout seconds from each to the next: the last ones to finish a call and save.
# Quicker is SIGTERM to one of the processes: all save and end with 0, and so does mpirun.
# Without --bind-to none every process computes on a single core.
# --resume starts anew where nothing is saved yet, so the same line goes on after a stop.
exec mpirun -n "${PROCESSES:-2}" "${hosts[@]}" \
  --bind-to none \
  --mca odls_base_sigkill_timeout 20 \
  -x PATH \
  boostax train digits --resume "$@"
