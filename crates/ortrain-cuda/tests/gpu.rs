//! Tests of every GPU backend on the software driver.

mod common;
#[path = "../../ortrain-testkit/gpu/mod.rs"]
mod gpu;
