#!/usr/bin/env bash
# Makes ${DRAFTLAB_ENVS:-.envs}/llamacpp: llama.cpp's converter with a Python that runs it, and its
# server and quantizer, built from the source that the package llama-cpp-python carries. The build
# takes 5 to 20 minutes on two cores; one that was stopped goes on where it was.
# Does nothing when the stamp says that the wanted version is already there.
#
#   eval/parity/setup_llamacpp.sh            # build it if it is missing
#   eval/parity/setup_llamacpp.sh --check    # exit 0 if it is installed, else 1
set -euo pipefail
# shellcheck source=env_common.sh
. "$(dirname "${BASH_SOURCE[0]}")/env_common.sh"

TORCH_VERSION=2.13.0
LLAMA_CPP_PYTHON_VERSION=0.3.36
TARGETS="llama-server llama-quantize"
WANTED="llama-cpp-python==$LLAMA_CPP_PYTHON_VERSION"

parity_begin llamacpp "$WANTED" "$@"
command -v c++ >/dev/null || parity_die "building llama.cpp needs a C++ compiler (c++), found none"

if [ "$(cat "$dir/.fetched" 2>/dev/null)" != "$WANTED" ]; then
  parity_new_env "$dir"
  parity_pip "$dir" "torch $TORCH_VERSION (CPU)" "torch==$TORCH_VERSION" numpy
  parity_check_cpu_torch "$dir" "$TORCH_VERSION"
  parity_pip "$dir" "what the converter imports" transformers sentencepiece protobuf cmake ninja
  echo "fetching the source of llama-cpp-python $LLAMA_CPP_PYTHON_VERSION" >&2
  "$dir/bin/python" -m pip download -qq --disable-pip-version-check --no-deps --no-binary :all: \
    -d "$dir/download" "llama-cpp-python==$LLAMA_CPP_PYTHON_VERSION" ||
    parity_die "could not fetch the source of llama-cpp-python (pip's reason is above)"
  tar -xzf "$dir"/download/*.tar.gz -C "$dir/download"
  mv "$dir"/download/*/vendor/llama.cpp "$dir/source"
  rm -r "$dir/download"
  echo "$WANTED" >"$dir/.fetched"
fi

export PATH="$dir/bin:$PATH"
echo "building $TARGETS in $dir/build" >&2
# Models of a few MB run here: less optimisation, half the time to build.
cmake -G Ninja -S "$dir/source" -B "$dir/build" -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_CXX_FLAGS_RELEASE="-O1 -DNDEBUG" -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF \
  -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF \
  -DLLAMA_USE_PREBUILT_UI=OFF >"$dir/build.log" 2>&1 ||
  parity_die "cmake failed: $(tail -n 5 "$dir/build.log")"
# shellcheck disable=SC2086
cmake --build "$dir/build" --target $TARGETS -j 2 >>"$dir/build.log" 2>&1 ||
  parity_die "the build failed: $(tail -n 5 "$dir/build.log")"
parity_end "$WANTED" torch transformers sentencepiece numpy
