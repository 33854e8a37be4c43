#!/bin/bash
# Trains on the nodes of a Slurm job: sbatch launch/slurm.sh [RECIPE] [--FLAG VALUE ...]
# docs/slurm.md explains it. Options of sbatch on the command line win over these.
#SBATCH --job-name=fastgpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=fastgpt-%j.log
set -eu

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
gpus=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}
limit=
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=540 # seconds that torchrun leaves its ranks to save

# Ten minutes before the time limit: torchrun hands SIGTERM on to its ranks, which save and end.
trap 'limit=yes; scancel --signal=TERM "$SLURM_JOB_ID.0"' USR1

srun --kill-on-bad-exit=1 --export=ALL \
    torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc_per_node="$gpus" \
    --rdzv-backend=c10d --rdzv-endpoint="$first:${PORT:-29400}" --rdzv-id="$SLURM_JOB_ID" \
    train.py "$@" --run-dir "${RUN_DIR:-runs/slurm-$SLURM_JOB_ID}" --resume auto &
step=$!

status=0
wait "$step" || status=$?
if [ "$limit" ]; then # the signal ended the first wait, not the step
    wait "$step" || true
    echo "the time limit is near: this job goes on in the queue"
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
