#!/bin/bash
# Train on two machines with eight GPUs each.  Start this script on every machine, in the same folder: bash torchrun.sh
# The machines share the folders of --data and --out.  The same command continues a run that was stopped.
set -eu

NODES=2
# One rank for each GPU of a machine.
RANKS_PER_NODE=8
# An address of the first machine that all machines reach, and a free port.
FIRST=node1:29500

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
ulimit -l unlimited || echo "ulimit -l: refused. Set memlock in /etc/security/limits.conf." >&2

# Without this variable a machine that replaces a lost one does not learn where the ranks meet (torch 2.13).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# --rdzv-conf: notice a lost machine in 6 s instead of 15 s, and wait 5 s instead of 30 s for further machines.
# --max-restarts: start all ranks again when one dies; they continue from the last checkpoint.
# --shutdown-timeout: after SIGTERM the ranks have 150 s to finish their step and to save.
# --numa-binding: run each rank on the cores next to its GPU.  Remove the option on machines without GPUs.
exec torchrun --nnodes "$NODES" --nproc-per-node "$RANKS_PER_NODE" \
    --rdzv-backend c10d --rdzv-id warpfold --rdzv-endpoint "$FIRST" \
    --rdzv-conf last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=3 \
    --max-restarts 3 --shutdown-timeout 150 \
    --numa-binding node \
    --log-dir "logs/$(hostname)" --redirects 3 --tee 0:3 --local-ranks-filter 0 \
    -m warpfold train monomer --data store --out run
