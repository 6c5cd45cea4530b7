#!/usr/bin/env bash
# Submit a run to a Ray cluster that is there already. Not run.
#
#   RAY_ADDRESS=http://HEAD:8265 recipes/cluster/ray_job.sh run_dir=/shared/runs/one \
#     recipe=qwen3_30b_a3b_megatron_sglang trainer.nnodes=2 trainer_ranks=8 \
#     actor_rollout_ref.rollout.nnodes=2 rollout_replicas=4
#
# From the clone's root, which is sent along. Every node needs the same Python environment, with sat-verl installed
# (verl finds it through its entry point), and run_dir, data and model under the same path. `ray job stop ID` ends a run
# as ctrl-C does.
set -euo pipefail

: "${RAY_ADDRESS:?set it to the dashboard of the cluster, for instance http://HEAD:8265}"

case " $* " in
*" run_dir=/"* | *" resume=/"*) ;;
*)
  echo "name a folder that every node sees: run_dir=/shared/runs/NAME" >&2
  exit 2
  ;;
esac

runtime_env='{"working_dir": ".", "excludes": [".git", ".venv", ".cache", "runs", "data"]}'
exec ray job submit --runtime-env-json "$runtime_env" -- python -m recipes.train "$@"
