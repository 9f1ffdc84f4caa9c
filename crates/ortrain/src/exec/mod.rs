//! Runs: devices, inputs and outputs, compiled schedules, profiles.

pub(crate) mod backend;
pub(crate) mod caller_memory;
pub(crate) mod executable_cache;
pub(crate) mod inputs;
pub(crate) mod outputs;
pub(crate) mod over_limit;
pub(crate) mod profile;
pub(crate) mod run_options;
pub(crate) mod step_inputs;
pub(crate) mod trace;
pub(crate) mod value;
