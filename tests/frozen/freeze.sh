#!/bin/sh
# Copies plugin-api/ to tests/frozen/gantry-plugin-api-VERSION. Usage: ./freeze.sh VERSION
set -eu
cd "$(dirname "$0")"
copy="gantry-plugin-api-${1:?version, e.g. 1.0}"
rm -rf "$copy"
mkdir "$copy"
cp -r ../../plugin-api/Cargo.toml ../../plugin-api/build.rs ../../plugin-api/src "$copy/"
