#!/usr/bin/env bash
# Trains on Cloud TPU: requests a queued resource, waits for it, copies this
# repository to all of its hosts, and runs `python -m flaxshard` on each.
#
#   launch/cloud_tpu.sh --name=digits --zone=us-central2-b \
#     --accelerator_type=v4-16 --runtime_version=tpu-ubuntu2204-base \
#     -- --config=configs/digits.py --workdir=gs://my-bucket/digits
#
#   --name=NAME               name of the queued resource and of its nodes
#   --zone=ZONE               a zone that has the accelerator
#   --accelerator_type=TYPE   such as v4-16, v5p-16, v5litepod-16, v6e-16
#   --runtime_version=NAME    v4: tpu-ubuntu2204-base, v5p: v2-alpha-tpuv5,
#                             v5e: v2-alpha-tpuv5-lite, v6e: v2-alpha-tpuv6e
#   --slices=COUNT            number of slices (default 1)
#   --project=PROJECT         default: the project that gcloud is set to
#   --spot                    uses spot capacity, which can be preempted
#   --python=COMMAND          Python 3.11 or later on the hosts (default
#                             python3.11, which is installed if it is missing)
#   --dry_run                 prints the commands instead of running them
#   --                        the rest are the arguments of the training
#
# Run it in the root of the repository, with gcloud logged in. The workdir must
# be a bucket that the TPU's service account can write to. JAX finds the hosts
# by itself. The run ends with this command: use tmux or nohup for long ones.
# After a preemption, delete the queued resource and run the same command again;
# training continues from the last checkpoint. To delete it:
#
#   gcloud compute tpus queued-resources delete NAME --zone=ZONE --force
#
# The Cloud TPU API has no TPUs newer than v6e: use launch/jobset.yaml on GKE.
#
# References:
#   https://docs.cloud.google.com/sdk/gcloud/reference/compute/tpus/queued-resources
#   https://docs.cloud.google.com/tpu/docs/runtimes

set -euo pipefail

fail() {
  echo "launch/cloud_tpu.sh: $*" >&2
  exit 2
}

name='' zone='' accelerator_type='' runtime_version=''
slices=1 project='' spot=false python=python3.11 dry_run=false
while (($#)) && [[ $1 != -- ]]; do
  case $1 in
    --name=* | --zone=* | --accelerator_type=* | --runtime_version=* | \
      --slices=* | --project=* | --python=*)
      variable=${1%%=*}
      printf -v "${variable#--}" '%s' "${1#*=}"
      ;;
    --spot) spot=true ;;
    --dry_run) dry_run=true ;;
    *) fail "unknown argument '$1'; arguments of the training follow after --" ;;
  esac
  shift
done
(($#)) || fail "the arguments of the training are missing: -- --config=..."
shift

for variable in name zone accelerator_type runtime_version; do
  [[ -n ${!variable} ]] || fail "--$variable is missing"
done
[[ $name =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] ||
  fail "--name must be lower-case letters, digits and '-', got '$name'"
[[ $slices =~ ^[1-9][0-9]*$ ]] ||
  fail "--slices must be a positive integer, got '$slices'"
config='' workdir=''
for argument in "$@"; do
  case $argument in
    --config=*) config=${argument#*=} ;;
    --workdir=*) workdir=${argument#*=} ;;
  esac
done
[[ -n $config ]] || fail "--config is missing after --"
[[ -f ${config%%:*} ]] || fail "--config=$config is not a file"
[[ $workdir == gs://?* ]] ||
  fail "--workdir must be gs://BUCKET/PATH, got '$workdir'"
[[ -f pyproject.toml ]] || fail "run it in the root of the repository"
$dry_run || command -v gcloud >/dev/null ||
  fail "gcloud is missing: https://docs.cloud.google.com/sdk/docs/install"

location=("--zone=$zone")
[[ -z $project ]] || location+=("--project=$project")

resources() { # COMMAND [ARGUMENT...]
  gcloud compute tpus queued-resources "$@" "${location[@]}"
}

run() {
  if $dry_run; then
    printf '%q ' gcloud compute tpus queued-resources "$@" "${location[@]}"
    echo
  else
    resources "$@"
  fi
}

get_state() {
  resources describe "$name" --format='value(state.state)'
}

request=(
  create "$name"
  "--accelerator-type=$accelerator_type"
  "--runtime-version=$runtime_version"
)
if ((slices == 1)); then
  request+=("--node-id=$name")
else
  request+=("--node-count=$slices" "--node-prefix=$name")
fi
if $spot; then
  request+=(--spot)
fi
if $dry_run || ! get_state >/dev/null 2>&1; then
  run "${request[@]}"
fi

if $dry_run; then
  run describe "$name" '--format=value(state.state)'
else
  while state=$(get_state) && [[ $state != ACTIVE ]]; do
    case $state in
      FAILED | SUSPENDING | SUSPENDED | DELETING)
        fail "the queued resource $name is $state; delete it and try again"
        ;;
    esac
    echo "the queued resource $name is $state" >&2
    sleep "${POLL_SECONDS:-30}"
  done
  [[ $state == ACTIVE ]] || fail "the queued resource $name is gone"
fi

# Tracked and new files, without what git ignores.
archive=${TMPDIR:-/tmp}/$name.tar.gz
if ! $dry_run; then
  git ls-files -z --cached --others --exclude-standard |
    tar --create --gzip --null --files-from=- --file="$archive"
fi
everywhere=(--node=all --worker=all)
run scp "$archive" "$name:flaxshard.tar.gz" "${everywhere[@]}"

# Quoted for the shell of the hosts.
printf -v quoted '%q ' "$@"
printf -v python '%q' "$python"
run ssh "$name" "${everywhere[@]}" --command="set -e
rm -rf flaxshard_run
mkdir flaxshard_run
tar --extract --gzip --file=flaxshard.tar.gz --directory=flaxshard_run
command -v $python || {
  sudo apt-get update
  sudo apt-get install --yes $python $python-venv
}
$python -m venv flaxshard_venv
flaxshard_venv/bin/pip install --quiet './flaxshard_run[train]' 'jax[tpu]'"
run ssh "$name" "${everywhere[@]}" --command="cd flaxshard_run
exec ../flaxshard_venv/bin/python -m flaxshard ${quoted% }"
