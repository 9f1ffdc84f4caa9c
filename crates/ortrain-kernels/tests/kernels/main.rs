//! Compares kernels with the reference semantics of expressions, on every instruction-set level of this machine.
#![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

mod attention;
mod bf16;
mod bytes;
mod common;
mod conv;
mod gemm;
mod maps;
mod operations;
mod reductions;
mod scatter;
mod segments;
mod windows;
