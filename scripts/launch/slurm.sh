#!/usr/bin/env bash
# Sol-RL on two hosts of eight GPUs:
#
#     sbatch scripts/launch/slurm.sh flux1_sol_rl_pickscore [KEY=VALUE]...
#     SOLRL_IMAGE=solrl.sif sbatch scripts/launch/slurm.sh flux1_sol_rl_pickscore
#     SOLRL_IMAGE=REGISTRY#solrl_jax:cuda sbatch scripts/launch/slurm.sh flux1_sol_rl_pickscore
#
# SOLRL_IMAGE names an image that was built with cuda.Dockerfile: a file of Apptainer (`apptainer
# build solrl.sif docker-daemon://solrl_jax:cuda`), or else an image of Pyxis and Enroot. Without it
# the job uses the `solrl` on the PATH.
#
# There is one process per host, which uses all its GPUs. The run directory, the model and the
# prompt cache must be on a shared file system. When the job is preempted (SIGTERM), the run saves
# and exits; after requeueing, the same command resumes it.
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
runs="${SOLRL_RUNS:-$SLURM_SUBMIT_DIR/runs}"
mkdir -p "$runs"
options=(--kill-on-bad-exit=1)  # a process that dies ends the job, which is then requeued
inside=()
image=${SOLRL_IMAGE:-}
if [[ $image == *.sif ]]; then
    inside=(apptainer exec --nv --bind "$runs" "$image")
elif [[ -n $image ]]; then
    options+=("--container-image=$image" --container-mount-home "--container-mounts=$runs:$runs")
fi
# SLURM's environment tells the processes how to find each other.
exec srun "${options[@]}" "${inside[@]}" \
    solrl train "$preset" --hosts auto mesh.fsdp=8 run.dir="$runs/$SLURM_JOB_NAME" "$@"
