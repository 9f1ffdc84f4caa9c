#!/bin/sh
# Regenerates src/generated/checkpoint.rs from schema/checkpoint.fbs. Needs `cargo install planus-cli --version 1.3.0`,
# the version of the `planus` crate.
set -eu
cd "$(dirname "$0")"
planus rust -o src/generated/checkpoint.rs schema/checkpoint.fbs
# The generator derives serde's traits unasked; nothing here uses serde.
sed -i -E 's/,? *::serde::Serialize, ::serde::Deserialize//; /^ +::serde::(Serialize|Deserialize),$/d' \
    src/generated/checkpoint.rs
rustfmt --edition 2024 src/generated/checkpoint.rs
