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

# To SIGTERM mpirun answers with SIGTERM to all processes and, after odls_base_sigkill_timeout
# seconds, SIGKILL: the time to finish a call and save. It ends all when one fails.
# Without --bind-to none every process computes on a single core.
# --resume starts anew where nothing is saved yet, so the same line goes on after a stop.
exec mpirun -n "${PROCESSES:-2}" "${hosts[@]}" \
  --bind-to none \
  --mca odls_base_sigkill_timeout 30 \
  -x PATH \
  boostax train digits --resume "$@"
