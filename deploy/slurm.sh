#!/bin/bash
# A world of eight workers on two nodes: sbatch deploy/slurm.sh train.py
# srun starts a worker per task, and gw.init_rpc() without arguments finds its place.
#SBATCH --job-name=gradwire
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=2
#SBATCH --time=01:00:00
set -euo pipefail

# The world's key: srun hands it to the workers, and no other user can read it.
GRADWIRE_KEY=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')
export GRADWIRE_KEY
export PYTHONUNBUFFERED=1

# One that fails ends the others, and its exit status is that of the job.
srun --kill-on-bad-exit=1 --label python "$@"
