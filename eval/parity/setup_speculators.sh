#!/usr/bin/env bash
# Makes the virtual environment that eval/parity/speculators_client.py runs in:
# ${DRAFTLAB_ENVS:-.envs}/speculators, with the speculators library and a CPU build of torch.
# Does nothing when the stamp says that the wanted versions are already there.
#
#   eval/parity/setup_speculators.sh            # build it if it is missing
#   eval/parity/setup_speculators.sh --check    # exit 0 if it is installed, else 1
set -euo pipefail
# shellcheck source=env_common.sh
. "$(dirname "${BASH_SOURCE[0]}")/env_common.sh"

TORCH_VERSION=2.13.0
SPECULATORS_VERSION=0.9.0
# torchaudio and torchvision would replace the CPU torch; the library never imports them.
SKIP='torch|torchaudio|torchvision'
WANTED="torch==$TORCH_VERSION speculators==$SPECULATORS_VERSION"

parity_begin speculators "$WANTED" "$@"

parity_new_env "$dir"
parity_pip "$dir" "torch $TORCH_VERSION (CPU)" "torch==$TORCH_VERSION" numpy
parity_check_cpu_torch "$dir" "$TORCH_VERSION"
parity_pip "$dir" "speculators $SPECULATORS_VERSION" --no-deps "speculators==$SPECULATORS_VERSION"
parity_requirements "$dir" speculators "$SKIP" >"$dir/requirements.txt"
parity_pip "$dir" "the requirements of speculators" -r "$dir/requirements.txt" \
  "torch==$TORCH_VERSION"
parity_check_cpu_torch "$dir" "$TORCH_VERSION"
"$dir/bin/python" -c 'import speculators' ||
  parity_die "speculators was installed in $dir but does not import (reason above)"
parity_end "$WANTED" torch speculators transformers safetensors numpy pydantic
