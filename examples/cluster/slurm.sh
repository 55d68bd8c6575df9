#!/bin/bash
# One run over two machines of eight GPUs each:
#     sbatch examples/cluster/slurm.sh examples/mnist.toml
# To continue it, on as many machines as you like:
#     sbatch --nodes 1 examples/cluster/slurm.sh --resume runs/<id>
# The folder, with the data and `runs/`, must be on a file system that all machines share.
#SBATCH --job-name=shoal
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00

set -euo pipefail

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$first:29500" \
    --rdzv-id "$SLURM_JOB_ID" \
    -m shoal run "$@"
