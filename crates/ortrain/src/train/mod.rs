//! Steps: module, optimizer, schedules of the learning rate.

pub(crate) mod anomaly;
pub(crate) mod learning_rate;
pub(crate) mod lr_scheduler;
pub(crate) mod module;
pub(crate) mod not_finite;
pub mod optim;
pub(crate) mod optimizer;
pub(crate) mod optimizer_model;
pub(crate) mod schedule;
pub(crate) mod schedule_text;
pub(crate) mod scheduler;
