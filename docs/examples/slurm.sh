#!/bin/bash
# Train on two nodes with eight GPUs each: sbatch slurm.sh
# The nodes share the folders of --data and --out.  The same command continues a run that was stopped.
#SBATCH --job-name=warpfold
#SBATCH --nodes=2
# One task is one rank, and takes one GPU.
#SBATCH --ntasks-per-node=8
# Not --gpus-per-task: it hides the GPUs of the other ranks, which NCCL would then not reach directly.
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
# Three minutes before the time limit this script is asked to save.  A step, a checkpoint and the end must fit in.
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

# The settings that `warpfold doctor --cluster` recommends.
# Data loading has processes of its own, so torch needs few threads.
export OMP_NUM_THREADS=4
# These variables slow down NCCL or CUDA, and may come from ~/.bashrc or from an image.
unset CUDA_LAUNCH_BLOCKING NCCL_P2P_DISABLE NCCL_SHM_DISABLE NCCL_IB_DISABLE NCCL_NET_GDR_LEVEL
unset NCCL_BLOCKING_WAIT TORCH_NCCL_BLOCKING_WAIT TORCH_DISTRIBUTED_DEBUG
# RoCE with an NCCL older than 2.21 needs the GID of RoCE v2, which show_gids lists.
# export NCCL_IB_GID_INDEX=3
# Each rank opens a connection to every other rank, and adapters lock the memory that they read and write.
ulimit -n "$(ulimit -Hn)"
ulimit -l unlimited || echo "ulimit -l: refused. Ask for LimitMEMLOCK=infinity of slurmd." >&2

# Since Slurm 22.05 srun ignores the --cpus-per-task of the job.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# At SIGTERM all ranks finish their step, save, and end with 0.
asked=
trap 'asked=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
srun --wait=180 warpfold train monomer --data store --out run &
step=$!
# A trapped signal interrupts wait, so wait again until srun has ended.
wait "$step"; code=$?
while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done

# Slurm requeues jobs after lost nodes and preemption, but not after a time limit.
[ -z "$asked" ] || scontrol requeue "$SLURM_JOB_ID"
exit "$code"
