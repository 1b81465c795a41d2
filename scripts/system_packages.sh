#!/usr/bin/env bash
# Installs the Debian packages that tests use, as root on Debian; elsewhere says what is missing (those tests skip).
set -euo pipefail

missing=()
for program in prometheus promtool; do
    command -v "$program" >/dev/null || missing+=("$program")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing the Debian package prometheus (tests run the dashboard's queries against it)"
    export DEBIAN_FRONTEND=noninteractive
    if apt-get update -q && apt-get install -y -q --no-install-recommends prometheus; then
        exit 0
    fi
fi
echo "Not found: ${missing[*]}. The tests of the dashboard skip; Debian's package prometheus has both programs." >&2
