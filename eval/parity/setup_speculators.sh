#!/usr/bin/env bash
# Makes the virtual environment that eval/parity/speculators_client.py runs in:
# ${DRAFTLAB_ENVS:-.envs}/speculators, with the speculators library and a CPU build of torch.
# Does nothing when the stamp says that the wanted versions are already there.
#
#   eval/parity/setup_speculators.sh            # build, or find it built
#   eval/parity/setup_speculators.sh --check    # only say whether it is there (exit 0 or 1)
set -euo pipefail
# shellcheck source=env_common.sh
. "$(dirname "${BASH_SOURCE[0]}")/env_common.sh"

TORCH_VERSION=2.13.0
SPECULATORS_VERSION=0.9.0
# torchaudio and torchvision would replace the CPU torch; the library never imports them.
SKIP='torch|torchaudio|torchvision'
WANTED="torch==$TORCH_VERSION speculators==$SPECULATORS_VERSION"

dir="$(parity_env_dir speculators)"
if parity_is_ready "$dir" "$WANTED"; then
  echo "ready: $dir ($WANTED)" >&2
  exit 0
fi
if [ "${1:-}" = --check ]; then
  parity_die "not there: $dir with $WANTED; run eval/parity/setup_speculators.sh"
fi

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
parity_stamp "$dir" "$WANTED" torch speculators transformers safetensors numpy pydantic
echo "built: $dir" >&2
cat "$dir/.draftlab-stamp" >&2
