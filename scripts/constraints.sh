#!/usr/bin/env bash
# Writes constraints.txt from what is installed, keeping the comment at its head. Build tags (+cpu) are dropped.
set -euo pipefail
cd "$(dirname "$0")/.."
fresh=$(mktemp)
trap 'rm -f "$fresh"' EXIT
{
    grep '^#' constraints.txt
    "${VENV:-.venv}/bin/python" -m pip freeze --exclude-editable | grep '==' | sed 's/+[A-Za-z0-9.]*$//'
} >"$fresh"
cp "$fresh" constraints.txt
