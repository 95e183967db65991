#!/usr/bin/env bash
# Installs zjax into .venv and runs the main job: a 3M-parameter Llama with ZeRO-3 on 8 simulated devices.
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
"$python" -m pip install --quiet --disable-pip-version-check -e .
.venv/bin/zjax train --config=configs/llama_tiny.py --workdir=runs/llama_tiny "$@"
