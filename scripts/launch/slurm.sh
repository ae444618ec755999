#!/usr/bin/env bash
# Sol-RL on two hosts of eight GPUs: `sbatch scripts/launch/slurm.sh flux1_sol_rl_hpsv2 [KEY=VALUE]...`
# One process a host, which drives all its GPUs. The run directory, the model and the prompt cache are on a file system that all
# hosts see. Preempted (SIGTERM), a run saves and ends; requeued, the same command goes on from there.
#SBATCH --job-name=solrl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@300
set -euo pipefail

preset=${1:?usage: sbatch slurm.sh PRESET [KEY=VALUE]...}
shift
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}
# the processes find each other by what SLURM says; --kill-on-bad-exit: a dead one takes the job along, which is then requeued
exec srun --kill-on-bad-exit=1 \
    solrl train "$preset" --hosts auto mesh.fsdp=8 run.dir="${SOLRL_RUNS:-$SLURM_SUBMIT_DIR/runs}/$SLURM_JOB_NAME" "$@"
