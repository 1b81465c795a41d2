#!/usr/bin/env bash
# Generates the Python code of the protos beside them. With --check: into a temporary folder, and fails on a difference.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${VENV:-.venv}/bin/python

generate() {
    "$python" -m grpc_tools.protoc -Iprotos --python_out="$1" --pyi_out="$1" --grpc_python_out="$1" protos/pdserve/v1/*.proto
}

if [ "${1:-}" != --check ]; then
    generate protos
    exit
fi
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
generate "$fresh"
if ! diff -r -q -x '*.proto' -x __init__.py -x __pycache__ protos "$fresh"; then
    echo "The generated code is not what the protos say: run make protos and commit the result." >&2
    exit 1
fi
