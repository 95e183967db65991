#!/usr/bin/env bash
# Trains on a Cloud TPU pod slice: installs this repository on every host, and starts one process on each. The arguments after
# the slice's name and zone are those of `zjax train`; its workdir must be on a file system that all hosts see:
#
#   bash scripts/tpu_pod.sh my-slice us-east5-a --config=configs/llama3_70b.py --workdir=/mnt/runs/llama3_70b
#
# Needs gcloud, logged in, and a slice made with a TPU VM image that has Python 3.11 or newer (tpu-ubuntu2204-base has not:
# use v2-alpha-tpuv5 or later, or set PYTHON).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "$#" -lt 3 ]; then
  echo "usage: bash scripts/tpu_pod.sh SLICE ZONE --config=FILE --workdir=DIR [...]" >&2
  exit 2
fi
slice="$1" zone="$2"
shift 2
python="${PYTHON:-python3.11}"
where=(--zone="$zone" --worker=all)

archive="$(mktemp -d)/zjax.tar.gz"
trap 'rm -rf "$(dirname "$archive")"' EXIT
git archive --format=tar.gz --prefix=zjax/ -o "$archive" HEAD
gcloud compute tpus tpu-vm scp "$archive" "$slice":zjax.tar.gz "${where[@]}"

arguments="$(printf '%q ' "$@")"
gcloud compute tpus tpu-vm ssh "$slice" "${where[@]}" --command="set -e
tar xzf zjax.tar.gz
cd zjax
test -x .venv/bin/python || $python -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[tpu]'
exec .venv/bin/zjax train $arguments"
