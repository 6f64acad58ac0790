#!/bin/bash
# Several hosts under Slurm: the first serves with its own ranks, the others lend theirs. Kubernetes does the same with a
# StatefulSet whose pod 0 serves. torchrun is not needed: the front starts, watches and replaces ranks itself.
# An example; the project's tests run the two commands on one machine only.
#SBATCH --job-name=moeless
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
set -euo pipefail

export MODEL=${1:?usage: sbatch deploy/slurm.sh MODEL_FOLDER (on storage that all hosts see)}
export RANKS_PER_HOST=8
export HEAD_ADDRESS=$(srun --nodes=1 --ntasks=1 --relative=0 hostname --ip-address | awk '{print $1}'):29400
export MOELESS_RANK_KEY=$(openssl rand -hex 16)
# Name the interface that the hosts share, if gloo does not find it: export GLOO_SOCKET_IFNAME=eth0

srun --kill-on-bad-exit=1 bash -c '
if [ "$SLURM_PROCID" = 0 ]; then
  exec moeless serve "$MODEL" --host 0.0.0.0 --ep $((SLURM_NNODES * RANKS_PER_HOST)) \
    --local-ranks "$RANKS_PER_HOST" --rank-address "$HEAD_ADDRESS"
else
  exec moeless join "$HEAD_ADDRESS" --ranks "$RANKS_PER_HOST"
fi'
