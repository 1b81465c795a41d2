#!/usr/bin/env bash
# Installs the Debian packages that the tests use, as root on Debian; elsewhere says what is missing (those tests skip).
# A C compiler only helps if it is there before pdserve is installed, which builds its CPU kernels then.
set -euo pipefail

missing=() packages=()
want() { # program, Debian packages
    command -v "$1" >/dev/null && return
    missing+=("$1")
    packages+=("${@:2}")
}
want prometheus prometheus
want promtool prometheus
want cc gcc libc6-dev
want_library() { # file, Debian package
    /sbin/ldconfig -p 2>/dev/null | grep "$1" >/dev/null && return
    missing+=("$1")
    packages+=("$2")
}
want_library libibverbs.so.1 libibverbs1 # Mooncake
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing Debian packages for the tests: ${packages[*]}"
    export DEBIAN_FRONTEND=noninteractive
    if apt-get update -q && apt-get install -y -q --no-install-recommends "${packages[@]}"; then
        exit 0
    fi
fi
echo "Not found: ${missing[*]} (Debian packages ${packages[*]}). The tests that need them skip." >&2
